"""Decides in which types parameters are kept and operators compute.

[Note: precision]
Three cases, for each parameter:

- No type was asked for: the parameter, its gradient, its master and its optimizer states have the type in which the
  parameter was loaded. That is what plain torch does.
- 16-bit was asked for (``--bf16``, ``--fp16``, or ``dtype``): the parameter is 16-bit, its master and states are fp32,
  and forward runs under ``torch.autocast``.
- fp32 was asked for: everything is fp32.

In 16-bit training the stock Trainer keeps parameters in fp32, and autocast rounds the operands of matrix products at
every use. Rounding such a parameter once gives the same numbers with half the bytes. Autocast does not round the other
parameters (embeddings, norms, scales, positions): operators use them in fp32, and their results are fp32. So these
parameters stay fp32 here too, if they were loaded in fp32, and losses are those of the stock Trainer.

In 16-bit training float64 parameters stay float64. Parameters that transformers or ``keep_fp32`` names are fp32, and so
are fp32 parameters of a model that was loaded mostly in 16-bit.
"""

import dataclasses
import difflib
import fnmatch
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.specs import FP32, TensorSpec, Types
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.model.quantized import is_packed, keeps_type

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OWN = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)
"""Types that a parameter may have in a chunk; others become fp32."""

_MULTIPLYING = (
    *(torch.nn.Linear, torch.nn.Bilinear, torch.nn.modules.conv._ConvNd, torch.nn.RNNBase, torch.nn.RNNCellBase),
    torch.nn.MultiheadAttention,
)
_KEEPING = (torch.nn.Embedding, torch.nn.EmbeddingBag, ParametrizationList)
_SMALL_SHARE = 0.05
"""Parameters of modules of unknown classes stay in fp32 if all of them are less than this part of the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The decision about types; see [Note: precision].

    Attributes:
        asked: The type that was asked for, or ``None``.
        dtype: The type of most parameters.
        reason: The reason for it, in a few words.
        autocast: The type of ``torch.autocast`` around forward; ``None`` without autocast.
        is_narrow: Whether most of the model was loaded in 16-bit.
        keep_fp32: Name patterns of parameters that stay in fp32; ``"auto"`` stands for those that autocast does not
            round.
    """

    asked: torch.dtype | None
    dtype: torch.dtype
    reason: str
    autocast: torch.dtype | None
    is_narrow: bool
    keep_fp32: tuple[str, ...]

    def casting(self, device: torch.device) -> Casting:
        """The conversions of types at the beginning and the end of a forward.

        Args:
            device: The compute device.
        """
        casts_inputs = self.autocast is None and self.asked in (torch.bfloat16, torch.float16)
        return Casting(device, self.autocast, self.asked if casts_inputs else None)

    def assign(
        self, model: torch.nn.Module, specs: Sequence[TensorSpec], parameters: Sequence[torch.nn.Parameter]
    ) -> list[TensorSpec]:
        """Gives each parameter its types.

        Args:
            model: The model.
            specs: The specs of its parameters.
            parameters: Its parameters, in the same order; their types are those that they were loaded in.

        Returns:
            The specs with types.
        """
        wide = self._find_wide(model, specs, parameters)
        pairs = zip(specs, parameters, strict=True)
        return [
            dataclasses.replace(spec, types=self._types(own, id(own) in wide, spec.trainable)) for spec, own in pairs
        ]

    def _types(self, parameter: torch.Tensor, is_wide: bool, trainable: bool) -> Types:
        own = parameter.dtype
        is_own = self.asked is None or (own is torch.float64 and self.asked is not torch.float32)
        if keeps_type(parameter) or (is_own and own in _OWN):
            return Types(_name(own), _name(own))
        if self.asked in (None, torch.float32) or is_wide or (own is torch.float32 and self.is_narrow):
            return FP32
        # A master of its own type: nothing was rounded, nothing will be updated.
        return Types(_name(self.asked), _name(own) if own is self.asked and not trainable else "float32")

    def _find_wide(
        self, model: torch.nn.Module, specs: Sequence[TensorSpec], parameters: Sequence[torch.nn.Parameter]
    ) -> set[int]:
        """Identities of the parameters that stay in fp32 where 16-bit was asked for."""
        if self.asked not in (torch.bfloat16, torch.float16):
            return set()
        found: set[int] = set()
        if self.autocast is not None and "auto" in self.keep_fp32:
            left = _left_by_autocast(model, sum(spec.numel for spec in specs))
            found = {id(parameter) for parameter in parameters if parameter.dtype is torch.float32} & left
        kept = _kept_by_transformers(model, self.asked)
        for spec, parameter in zip(specs, parameters, strict=True):
            names = (spec.name, *spec.aliases)
            is_kept = any(fnmatch.fnmatchcase(f".{name}.", f"*.{part}.*") for name in names for part in kept)
            if is_kept or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.keep_fp32):
                found.add(id(parameter))
        return found

    def describe(self, specs: Iterable[TensorSpec]) -> str:
        """One line for the log."""
        numel: dict[str, int] = {}
        for spec in specs:
            numel[spec.types.param] = numel.get(spec.types.param, 0) + spec.numel
        total = max(sum(numel.values()), 1)
        parts = [f"{share / total:.1%} in {name}" for name, share in sorted(numel.items(), key=lambda item: -item[1])]
        kinds = ", ".join(parts) if len(parts) > 1 else f"in {next(iter(numel), _name(self.dtype))}"
        computing = "" if self.autocast is None else f"; forward runs under autocast to {_name(self.autocast)}"
        return f"parameters {kinds} ({self.reason}){computing}"


def choose_precision(
    model: torch.nn.Module, config: PatrickStarConfig, precision: str, parameters: Sequence[torch.nn.Parameter]
) -> Precision:
    """Decides in which types a model trains.

    Args:
        model: The model.
        config: The settings; ``dtype``, ``autocast`` and ``keep_fp32`` are used.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what the Trainer or Accelerate was told.
        parameters: The model's parameters.

    Raises:
        ConfigError: If the precision is not known, or the model cannot compute in it.
    """
    numel: dict[torch.dtype, int] = {}
    for parameter in itertools.filterfalse(keeps_type, parameters):
        numel[parameter.dtype] = numel.get(parameter.dtype, 0) + parameter.numel()
    largest = max(numel, key=lambda kind: numel[kind], default=torch.float32)
    is_narrow = largest in (torch.bfloat16, torch.float16)
    if config.dtype == "auto" and precision == "no":
        own = largest if largest in _OWN else torch.float32
        reason = "dtype=auto: as the model was loaded"
        if is_narrow:
            reason += "; its optimizer states are 16-bit too, as in plain torch, --bf16 makes them fp32"
        return Precision(None, own, reason, None, is_narrow, tuple(config.keep_fp32))
    if config.dtype == "auto" and precision not in _DTYPES:
        raise ConfigError(f"precision '{precision}' is not supported; use bf16, fp16 or no")
    asked = _DTYPES[precision if config.dtype == "auto" else config.dtype]
    reason = f"dtype=auto: --{precision}" if config.dtype == "auto" else f"dtype={config.dtype}"
    autocast = asked if asked is not torch.float32 and config.autocast is not False else None
    if asked is not torch.float32 and autocast is None:
        _refuse_batch_norm(model)
    if asked is not torch.float32:
        _warn_of_patterns(model, config)
    return Precision(asked, asked, reason, autocast, is_narrow, tuple(config.keep_fp32))


def _warn_of_patterns(model: torch.nn.Module, config: PatrickStarConfig) -> None:
    """Warns of patterns that match no parameter. They are no error: one configuration may serve several models."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in config.keep_fp32:
        if pattern != "auto" and not fnmatch.filter(names, pattern):
            near = ", ".join(map(repr, difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)))
            text = f"no parameter of {type(model).__name__} has a name like '{pattern}'; names are, for example, {near}"
            logger.warning("patrickstar: keep_fp32: %s", text)


def _refuse_batch_norm(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"module '{name}' ({type(module).__name__}) keeps running statistics in fp32 and cannot compute with "
                "16-bit parameters; leave autocast on (autocast='auto'), or train in fp32 (dtype='fp32', without "
                "--bf16 and --fp16)"
            )


def _left_by_autocast(model: torch.nn.Module, total_numel: int) -> set[int]:
    """Identities of the parameters that some module uses otherwise than as an operand of a matrix product."""
    rounded, left, unknown = set[int](), set[int](), dict[int, int]()
    for module in model.modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(map(is_packed, own)):  # the library casts the bias to the type that it computes in
            left |= {id(parameter) for parameter in own}
        elif isinstance(module, _MULTIPLYING) or type(module).__name__ == "Conv1D":
            rounded |= {id(parameter) for parameter in own}
        elif isinstance(module, _KEEPING) or all(p.dim() < 2 or p.shape[0] == 1 for p in own):
            left |= {id(parameter) for parameter in own}
        else:  # all of them or none: an operator may need all its operands in one type
            unknown.update((id(parameter), parameter.numel()) for parameter in own)
    is_small = sum(unknown.values()) < _SMALL_SHARE * total_numel
    return left | (set(unknown) - rounded if is_small else set())


def _kept_by_transformers(model: torch.nn.Module, asked: torch.dtype) -> set[str]:
    """Names of modules that transformers keeps in fp32, collected from every transformers model in the model."""
    found: set[str] = set()
    for module in model.modules():
        found |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if asked is torch.float16:
            found |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
