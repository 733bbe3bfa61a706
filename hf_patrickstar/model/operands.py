"""Operands that autograd keeps for backward."""

import torch


class KeptOperand:
    """What autograd keeps in place of an operand that is, or looks into, the value of a parameter."""

    __slots__ = ()


def check_version(operand: torch.Tensor, version: int) -> None:
    """Refuses an operand that was changed in place since autograd has kept it.

    Torch does not look where there are hooks on what autograd keeps.

    Args:
        operand: Has its version.
        version: The version that it had.

    Raises:
        RuntimeError: If it was changed.
    """
    if operand._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{operand.type()}] is at version {operand._version}; expected version {version} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )
