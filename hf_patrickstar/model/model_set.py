"""Several models that one engine trains together, because an optimizer holds parameters of all of them."""

import torch


class ModelSet(torch.nn.ModuleList):
    """Holds models that stay models of their own: each is called, saved and zeroed by itself.

    Nobody calls this one. Parameters are named by the place of their model: ``0.weight``.
    """


def roots_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The user's models in what an engine trains: the model itself, or those of a set.

    Args:
        model: What the engine was given.
    """
    return list(model) if isinstance(model, ModelSet) else [model]
