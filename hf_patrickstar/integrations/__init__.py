"""Integrations with Accelerate and transformers; other folders import these libraries inside functions at most."""
