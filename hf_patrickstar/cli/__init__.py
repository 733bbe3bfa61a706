"""The command ``hf-patrickstar``."""
