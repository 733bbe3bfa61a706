"""Optimizers that work chunk by chunk, at each chunk's home; loss scaling, gradient norm and clipping."""
