"""Acts: chunks, the manager that moves them, and the hooks that tie it to a model."""
