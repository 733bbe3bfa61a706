"""What all layers use."""
