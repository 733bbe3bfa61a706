"""Engines in virtual time: on a machine that is not here, with tensors that have no bytes."""
