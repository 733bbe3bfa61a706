"""Tells before training whether a model fits, how fast it will be, and why."""
