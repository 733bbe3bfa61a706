"""Models that were prepared: their parameters are in chunks, and an engine manages them."""

import torch

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import EngineError


def get_engine(model: torch.nn.Module) -> PatrickStarEngine:
    """The engine that manages a model: for statistics, checkpoints, ``attempt`` and ``full_parameters``.

    ``model.patrickstar_engine`` is the same object, which type checkers do not know.

    Args:
        model: A model that ``initialize_engine``, ``PatrickStarAccelerator.prepare`` or the ``train`` of a Trainer has
            prepared; or an adapter around one.

    Raises:
        EngineError: If it has none, or has been detached from it.
    """
    engine = getattr(model, "patrickstar_engine", None)
    if not isinstance(engine, PatrickStarEngine):
        raise EngineError(
            f"{type(model).__name__} has no engine: its parameters are not in chunks. Prepare it by initialize_engine, "
            "by PatrickStarAccelerator.prepare, or by train() of a Trainer with --patrickstar"
        )
    return engine
