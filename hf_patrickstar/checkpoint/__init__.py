"""Saves chunks to files and loads them: the model's weights in common formats, and the training state."""
