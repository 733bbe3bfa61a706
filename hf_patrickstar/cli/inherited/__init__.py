"""A folder for ``PYTHONPATH`` of processes that a script starts under ``hf-patrickstar run --inherit``."""
