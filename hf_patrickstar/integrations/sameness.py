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
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest

import torch

from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile
from hf_patrickstar.integrations.short_training import Record

_ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""The largest distance of neighbouring numbers, relative to their size."""
_PIECE_NUMEL = 2**22


@dataclasses.dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor of one training differs from that of the other.

    Attributes:
        numel: Its elements.
        num_different: Those with other bits.
        largest: The largest difference; infinite or NaN where only one training has such a value.
        is_close: See [Note: close in 16 bits]; false for runs in fp32.
        problem: Why values cannot be compared; empty if they can.
    """

    numel: int
    num_different: int = 0
    largest: float = 0.0
    is_close: bool = False
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """Where two trainings differ.

    Attributes:
        step: The first step after which parameters or buffers differ, 0 for before training; ``None`` if none do.
        names: Parameters and buffers that differ then, in the order of the model.
        numbers: The first loss, and the first gradient norm, that differ, in words.
        are_numbers_close: Whether losses and norms are close; see [Note: close in 16 bits].
    """

    step: int | None
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    are_numbers_close: bool


def find_divergence(plain: Record, chunked: Record) -> Divergence | None:
    """Finds where two trainings differ first; ``None`` if they have the same bits.

    Args:
        plain: A training.
        chunked: The other.
    """
    steps = range(max(len(plain.digests), len(chunked.digests)))
    found = ((step, _names_that_differ(*(_at(record.digests, step) for record in (plain, chunked)))) for step in steps)
    step, names = next(((step, names) for step, names in found if names), (None, ()))
    numbers = (
        *_first("loss", plain.losses, chunked.losses),
        *_first("gradient norm", [[norm] for norm in plain.norms], [[norm] for norm in chunked.norms]),
    )
    if step is None and not numbers:
        return None
    rounding = _rounding_of(plain, chunked)
    told, others = ([*chain(*record.losses), *record.norms] for record in (plain, chunked))
    are_close = rounding is not None and _are_close(told, others, rounding)
    return Divergence(step, names, numbers, are_close)


def _at(digests: Sequence[Mapping[str, str]], step: int) -> Mapping[str, str]:
    return digests[step] if step < len(digests) else {}


def _names_that_differ(plain: Mapping[str, str], chunked: Mapping[str, str]) -> tuple[str, ...]:
    names = dict.fromkeys([*plain, *chunked])
    return tuple(name for name in names if plain.get(name) != chunked.get(name))


def _first(what: str, plain: Sequence[Sequence[float]], chunked: Sequence[Sequence[float]]) -> Iterator[str]:
    """The first step in which a number differs, in words."""
    for step, (left, right) in enumerate(zip_longest(plain, chunked, fillvalue=()), 1):
        texts = [" + ".join(map(repr, values)) or "missing" for values in (left, right)]
        if texts[0] != texts[1]:
            yield f"the {what} of step {step} is {texts[0]} in plain training and {texts[1]} with --patrickstar"
            return


def _rounding_of(plain: Record, chunked: Record) -> float | None:
    return _ROUNDING.get(plain.precision) or _ROUNDING.get(chunked.precision)


def _are_close(plain: Sequence[float], chunked: Sequence[float], rounding: float) -> bool:
    return len(plain) == len(chunked) and all(
        repr(left) == repr(right) or abs(left - right) <= rounding * abs(left)
        for left, right in zip(plain, chunked, strict=True)
    )


class Comparison:
    """Compares the weights of two trainings, from the files that they have written, a piece at a time.

    Args:
        plain: What a training did.
        chunked: What the other did.
        plain_path: The weights of the first one.
        chunked_path: The weights of the other.
    """

    def __init__(self, plain: Record, chunked: Record, plain_path: str, chunked_path: str) -> None:
        self._files = SafetensorsFile(plain_path), SafetensorsFile(chunked_path)
        self._rounding = _rounding_of(plain, chunked)
        self._num_steps = len(plain.losses)
        self._reach = 2 * sum(map(abs, plain.rates))
        self._last = _names_that_differ(plain.digests[-1], chunked.digests[-1])

    def differences(self) -> dict[str, TensorDifference]:
        """How each parameter and buffer differs that does so at the end."""
        return {name: self.difference_of(name) for name in self._last}

    @property
    def numel(self) -> int:
        """Elements of all parameters and buffers of the first training."""
        return sum(math.prod(entry.shape) for entry in self._files[0].entries.values())

    def difference_of(self, name: str) -> TensorDifference:
        """How a parameter or buffer differs.

        Args:
            name: Its name.
        """
        entries = [file.entries.get(name) for file in self._files]
        left, right = entries
        if left is None or right is None:
            which = "plain training" if right is None else "the training with --patrickstar"
            return TensorDifference(0, problem=f"only {which} has it")
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            kinds = [f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}" for entry in (left, right)]
            return TensorDifference(
                math.prod(left.shape), problem=f"it is {kinds[0]} in plain training and {kinds[1]} with --patrickstar"
            )
        numel = math.prod(left.shape)
        num_different, largest, is_close = 0, 0.0, True
        for start in range(0, numel, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, numel)
            piece = self._compare(*(file.read(name, start, stop) for file in self._files))
            num_different += piece.num_different
            largest = math.nan if math.isnan(largest + piece.largest) else max(largest, piece.largest)
            is_close = is_close and piece.is_close
        return TensorDifference(numel, num_different, largest, is_close)

    def _compare(self, plain: torch.Tensor, chunked: torch.Tensor) -> TensorDifference:
        size = plain.element_size()
        are_other = (plain.view(torch.uint8) != chunked.view(torch.uint8)).view(-1, size).any(1)
        if not are_other.any():
            return TensorDifference(plain.numel(), is_close=self._rounding is not None)
        left, right = plain[are_other].double(), chunked[are_other].double()
        distances = (left - right).abs()
        largest = float(distances.max()) if not distances.isnan().any() else math.nan
        is_close = self._rounding is not None and plain.is_floating_point()
        if is_close and self._rounding is not None:
            is_close = bool((distances <= self._num_steps * self._rounding * left.abs() + self._reach).all())
        return TensorDifference(plain.numel(), int(are_other.sum()), largest, is_close)
