"""What there is to place: one ``TensorSpec`` per parameter, in model order, tied weights once."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from hf_patrickstar.units import ALIGNMENT_NUMEL

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
MASTER = "master"
GRADIENT = "grad"
"""Names of chunk lists: parameters as the optimizer has them, and gradients that accumulate."""
SCALES_SUFFIX = ".absmax"
"""The name of the scales of a packed weight is that of the weight with this."""
BLOCK_NUMEL = 256
"""Elements of an 8-bit state that share a scale, as bitsandbytes cuts a tensor."""
_SCALES = "absmax"
"""Names of lists of such scales begin so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Types:
    """The types of one parameter, by torch's names.

    Attributes:
        param: The type of the value and the gradient in forward and backward.
        state: The type of the master, and of gradients that accumulate.
        states: The type of the other optimizer states, if they have one of their own. States in ``"uint8"`` are
            multiplied with the scale of their block, which is in a list, too.
    """

    param: str = "float32"
    state: str = "float32"
    states: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the value."""
        return ITEMSIZES[self.param]

    @property
    def alignment_numel(self) -> int:
        """Offsets in chunks are multiples of so many elements, so that no block has elements of two parameters."""
        return BLOCK_NUMEL if self.states == "uint8" else ALIGNMENT_NUMEL

    def of_list(self, name: str) -> tuple[str, int]:
        """The type of a list beside ``param``, and how many elements of the parameters share an entry.

        Args:
            name: The name of the list.
        """
        if name in (MASTER, GRADIENT) or not self.states:
            return self.state, 1
        return ("float32", BLOCK_NUMEL) if name.startswith(_SCALES) else (self.states, 1)

    def has_list(self, name: str) -> bool:
        """Whether a list is of use: scales are for states of 8 bits."""
        return self.states == "uint8" or not name.startswith(_SCALES)

    def list_nbytes(self, name: str, numel: int) -> int:
        """Bytes of a list beside ``param`` for so many elements."""
        dtype, block_numel = self.of_list(name)
        return -(-numel // block_numel) * ITEMSIZES[dtype]

    @property
    def widens(self) -> bool:
        """Whether an update copies gradients or states into fp32 before it computes."""
        return self.is_mixed or (self.states == "bfloat16" and self.state == "float32")

    @property
    def is_mixed(self) -> bool:
        """Whether the value is a rounded master, and gradients are widened for the optimizer."""
        return self.param != self.state


FP32 = Types()


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter, as numbers.

    Attributes:
        index: Its place in model order, from 0.
        name: Its first qualified name.
        aliases: Every other qualified name of the same parameter (tied weights, shared modules).
        shape: Its shape.
        trainable: Whether it receives gradients.
        owners: For ``name`` and each alias, the index in ``model.modules()`` order of the module that owns it there.
        optimizer_index: Which of the engine's optimizers updates it, if it is trainable; -1 if none does.
        types: Its types in chunks.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    trainable: bool
    aliases: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()
    optimizer_index: int = 0
    types: Types = FP32

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model that it holds: a byte of a packed weight holds two, and its scales hold none."""
        if self.name.endswith(SCALES_SUFFIX):
            return 0
        return self.numel * (2 if self.types.param == "uint8" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        return self.numel * self.types.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSpec:
    """Parameters that must be on the device at once: those of a module and of the modules around it.

    A module that calls others keeps its own parameters meanwhile. Lists and dictionaries of parameters, and the output
    projection of ``nn.MultiheadAttention``, are never called: the module around them uses their parameters. A module
    that is recomputed in backward needs the parameters of all modules inside it: the recomputed operands of the whole
    segment stay alive until its backward has used them.
    """

    name: str
    class_name: str
    tensor_indices: tuple[int, ...]


def _registered(module: Any) -> list[tuple[Any, str, str]]:
    """Where a module keeps the parameters that it has registered."""
    return [(module._parameters, name, name) for name in module._parameters.keys()]  # noqa: SIM118


def collect_specs(
    model: Any,
    is_recomputed: Callable[[Any], bool] = lambda module: False,
    is_left_out: Callable[[Any], bool] = lambda parameter: False,
    parameters_of: Callable[[Any], Iterable[tuple[Any, str, str]]] = _registered,
) -> tuple[list[TensorSpec], list[ModuleSpec], list[Any]]:
    """Lists a model's parameters in model order, each once, and the modules that own them.

    Args:
        model: A ``torch.nn.Module``; its parameters may be on the meta device.
        is_recomputed: Tells whether a module is recomputed as one segment in backward.
        is_left_out: Tells whether a parameter gets no place, because it has no shape yet, for example.
        parameters_of: Tells where a module keeps its parameters: a dictionary, the key in it, and the name.

    Returns:
        The tensor specs, the module specs, and the parameters in the order of the tensor specs.
    """
    found: dict[int, tuple[int, Any, list[str], list[int]]] = {}
    modules: list[ModuleSpec] = []
    module_indices: dict[int, int] = {}
    held: dict[str, list[int]] = {}
    lent: set[str] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        is_new = id(module) not in module_indices
        module_index = module_indices.setdefault(id(module), len(module_indices))
        own: list[int] = []
        for place, key, name in parameters_of(module):
            parameter = place[key]
            if parameter is None or is_left_out(parameter):
                continue
            index, _, names, owners = found.setdefault(id(parameter), (len(found), parameter, [], []))
            names.append(f"{module_name}.{name}" if module_name else name)
            owners.append(module_index)
            if index not in own:
                own.append(index)
        lent |= _lent_by(module_name, type(module).__name__)
        held[module_name] = own
        if own and is_new:
            modules.append(ModuleSpec(module_name, type(module).__name__, tuple(own)))
    modules = [dataclasses.replace(m, tensor_indices=_held_during(m.name, held, lent)) for m in modules]
    for module_name, module in model.named_modules():
        if is_recomputed(module):
            begin = f"{module_name}." if module_name else ""
            inside = {index for path, own in held.items() if f"{path}.".startswith(begin) for index in own}
            modules.append(ModuleSpec(module_name, type(module).__name__, tuple(sorted(inside))))
    specs = [
        TensorSpec(index, name, tuple(parameter.shape), bool(parameter.requires_grad), tuple(aliases), tuple(owners))
        for index, parameter, (name, *aliases), owners in found.values()
    ]
    return specs, modules, [parameter for _, parameter, *_ in found.values()]


def _lent_by(name: str, class_name: str) -> set[str]:
    """Paths of modules whose parameters are used by the module around them, which never calls them."""
    if class_name == "MultiheadAttention":
        return {f"{name}.out_proj"}
    return {name} if class_name in ("ParameterList", "ParameterDict") else set()


def _held_during(name: str, held: dict[str, list[int]], lent: set[str]) -> tuple[int, ...]:
    """Indices of the tensors that are in use while the module of a name runs."""
    around = {""} | {name[:end] for end in range(len(name) + 1) if end == len(name) or name[end] == "."}
    indices = {index for path in around for index in held.get(path, ())}
    for path in lent:
        if path.rpartition(".")[0] in around:
            indices |= set(held.get(path, ()))
    return tuple(sorted(indices))
