"""Accelerate and transformers. The only place that imports them."""
