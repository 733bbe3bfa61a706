"""What the engine does to modules and parameters of torch; it knows no chunks."""
