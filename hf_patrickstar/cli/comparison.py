"""Whether two recorded trainings are the same: losses, gradient norms, and all parameters and buffers, by their bits.

[Note: close in 16 bits]
In 16-bit, plain training and training in chunks need not have the same bits (docs/live_model.md): a model that was
loaded in 16 bits has fp32 masters in chunks and none in the stock Trainer, and an operator that autocast does not know
gets rounded parameters in chunks. Such runs are *close* if each of these holds:

- losses and gradient norms differ by at most one rounding step of the 16-bit type, relative to the plain ones;
- at the end each element of a weight differs by at most one rounding step of its value for each step of the optimizer,
  and twice the sum of the learning rates: an optimizer of Adam's kind changes a weight by about its learning rate, in
  one direction or, where rounding has changed the sign of a small gradient, in the other.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from itertools import chain, zip_longest

import torch

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile

RECORD, WEIGHTS = "record.json", "weights.safetensors"
_ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""The largest distance of neighbouring numbers, relative to their size."""
_PIECE_NUMEL = 2**22


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What a training did.

    Attributes:
        losses: The loss of each micro-batch, by step.
        norms: The norm of the gradients before clipping, of each step that has logged it.
        rates: The learning rate of each step.
        digests: A hash of each parameter and buffer, before training and after each step.
        precision: What it computes in: ``"bf16"``, ``"fp16"``, or another name for fp32.
        problem: Why the script cannot be checked; empty if it was trained.
    """

    losses: list[list[float]] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    digests: list[dict[str, str]] = dataclasses.field(default_factory=list)
    precision: str = "no"
    problem: str = ""

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> "Record":
        """Reads what a process has written.

        Args:
            directory: Its directory.
        """
        return cls(**json.loads((pathlib.Path(directory) / RECORD).read_text(encoding="utf-8")))

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Writes the record into the directory of its process.

        Args:
            directory: The directory.
        """
        (pathlib.Path(directory) / RECORD).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def compare(plain: str | os.PathLike[str], chunked: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Compares two trainings; weights are read a piece at a time.

    Args:
        plain: The directory of the training without ``--patrickstar``, with its record and its last weights.
        chunked: The directory of the training with ``--patrickstar``.

    Returns:
        ``"same bits"``, ``"close"`` (see [Note: close in 16 bits]) or ``"different"``, and sentences about it.
    """
    left, right = Record.read(plain), Record.read(chunked)
    files = [SafetensorsFile(str(pathlib.Path(home) / WEIGHTS)) for home in (plain, chunked)]
    empty: dict[str, str] = {}
    steps = zip_longest(left.digests, right.digests, fillvalue=empty)
    names_by_step = [[name for name in one | other if one.get(name) != other.get(name)] for one, other in steps]
    details = [
        *_first("loss", left.losses, right.losses),
        *_first("gradient norm", [[norm] for norm in left.norms], [[norm] for norm in right.norms]),
    ]
    step = next((step for step, names in enumerate(names_by_step) if names), None)
    if step is None and not details:
        numel = sum(math.prod(entry.shape) for entry in files[0].entries.values())
        num_losses, num_weights = sum(map(len, left.losses)), len(left.digests[-1])
        return "same bits", [
            f"{len(left.losses)} steps, {num_losses} losses, {len(left.norms)} gradient norms, {num_weights} "
            f"parameters and buffers with {numel:,} elements"
        ]
    if step is not None:
        when = f"after step {step}" if step else "before the first step"
        names = names_by_step[step]
        details.insert(0, f"the first parameters and buffers that differ, {when}: '{names[0]}' ({len(names)} in all)")
    rounding = _ROUNDING.get(left.precision) or _ROUNDING.get(right.precision)
    plain_numbers, chunked_numbers = ([*chain(*record.losses), *record.norms] for record in (left, right))
    are_close = rounding is not None and _are_close(plain_numbers, chunked_numbers, rounding)
    reach = 2 * sum(map(abs, left.rates))
    tolerances = None if rounding is None else (len(left.losses) * rounding, reach)
    for number, name in enumerate(names_by_step[-1]):
        text, is_close = _difference(files, name, tolerances)
        are_close = are_close and is_close
        if number == 0:
            details.append(f"at the end {len(names_by_step[-1])} parameters and buffers differ: '{name}' {text}")
        if not are_close:
            break
    return "close" if are_close else "different", details


def _first(what: str, plain: Sequence[Sequence[float]], chunked: Sequence[Sequence[float]]) -> list[str]:
    """The first step in which a number differs, as a sentence."""
    for step, values in enumerate(zip_longest(plain, chunked, fillvalue=()), 1):
        left, right = (" + ".join(map(repr, numbers)) or "missing" for numbers in values)
        if left != right:
            return [f"the {what} of step {step} is {left} without --patrickstar and {right} with it"]
    return []


def _are_close(plain: Sequence[float], chunked: Sequence[float], rounding: float) -> bool:
    return len(plain) == len(chunked) and all(
        repr(left) == repr(right) or abs(left - right) <= rounding * abs(left)
        for left, right in zip(plain, chunked, strict=True)
    )


def _difference(
    files: Sequence[SafetensorsFile], name: str, tolerances: tuple[float, float] | None
) -> tuple[str, bool]:
    """How a parameter or buffer differs at the end, and whether it is close: relative and absolute tolerance."""
    entries = [file.entries.get(name) for file in files]
    kinds = [f"{entry.dtype} {list(entry.shape)}" if entry is not None else "missing" for entry in entries]
    if kinds[0] != kinds[1] or entries[0] is None:
        return f"is {kinds[0]} without --patrickstar and {kinds[1]} with it", False
    numel = math.prod(entries[0].shape)
    num_different, largest, is_close = 0, 0.0, tolerances is not None and entries[0].dtype.is_floating_point
    for start in range(0, numel, _PIECE_NUMEL):
        plain, chunked = (file.read(name, start, min(start + _PIECE_NUMEL, numel)) for file in files)
        are_other = (plain.view(torch.uint8) != chunked.view(torch.uint8)).view(-1, plain.element_size()).any(1)
        left, right = plain[are_other].double(), chunked[are_other].double()
        distances = (left - right).abs()
        num_different += len(distances)
        largest = float(torch.cat([distances, distances.new_tensor([largest])]).max())  # NaN stays NaN
        if is_close and tolerances is not None:
            is_close = bool((distances <= tolerances[0] * left.abs() + tolerances[1]).all())
    return f"in {num_different:,} of {numel:,} elements, by {largest:.6g} at most", is_close
