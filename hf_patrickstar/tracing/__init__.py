"""Records what a micro-batch of a plain model does, with tensors that have no bytes: no engine is needed."""
