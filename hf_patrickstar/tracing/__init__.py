"""What a model does in a step, recorded from a copy of it that has no bytes."""
