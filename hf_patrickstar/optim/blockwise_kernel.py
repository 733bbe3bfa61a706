"""The kernel for optimizers of bitsandbytes, whose states have 8 bits and a scale for each block of elements."""

import importlib.metadata
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.layout.specs import BLOCK_NUMEL, MASTER
from hf_patrickstar.optim.elementwise import ElementwiseKernel, Job, Segment
from hf_patrickstar.optim.kernel import Means, settings_of
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import ManagedParameter, round_masters

_LEAST_VERSION = "0.50"
_OPTIMIZERS = "bitsandbytes.optim.optimizer"
_METHODS = ("step", "update_step", "init_state", "get_config")
"""What the kernel does as the base classes of bitsandbytes do it."""
_NUM_STATES = {"Optimizer1State": 1, "Optimizer2State": 2}
_ELEMENTWISE = frozenset({"adam", "lion", "momentum", "rmsprop", "adagrad"})
"""Updates that look at no norm of a parameter, and have one tensor of a parameter's shape for each state."""
_MAPS = {"state1": "dynamic", "state2": "udynamic"}
"""Which table of 256 values the numbers of an 8-bit state stand for: that of signed or of unsigned ones."""


def prepare(optimizer: Any) -> None:
    """Lets an optimizer of bitsandbytes find what it was told of single parameters, as its first step does.

    Later masters may be in the place of parameters, and it knows these by identity.

    Args:
        optimizer: An optimizer of any library.

    Raises:
        ConfigError: If its version of bitsandbytes updates nothing on the host.
    """
    library = "bitsandbytes"
    if all(kind.__module__.partition(".")[0] != library for kind in type(optimizer).__mro__):
        return
    version = importlib.metadata.version(library)
    if TorchVersion(version) < _LEAST_VERSION:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} of bitsandbytes {version} updates only parameters on a GPU, and "
            "chunks may be at home on the host; install version 0.50 or later: pip install hf_patrickstar[bnb]"
        )
    optimizer.check_overrides()


def is_blockwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is one of bitsandbytes that the kernel can run block by block."""
    given: Any = optimizer
    bases = [k for k in type(given).__mro__ if k.__module__ == _OPTIMIZERS and k.__name__ in _NUM_STATES]
    if not bases or given.optimizer_name not in _ELEMENTWISE or given.args.max_unorm > 0:
        return False
    overrides = [*given.mng.pid2config.values(), *(config for *_, config in given.mng.module_weight_config_triple)]
    raw = inspect.unwrap  # torch wraps the step of each class
    is_known = all(raw(getattr(type(given), name)) is raw(getattr(bases[0], name)) for name in _METHODS)
    return is_known and not any(config.get("max_unorm", 0) > 0 for config in overrides)


class BlockwiseKernel(ElementwiseKernel):
    """Runs the update functions of bitsandbytes over the lists ``master``, ``state1`` and ``state2``.

    States of 8 bits have their scales in ``absmax1`` and ``absmax2``, one for each ``BLOCK_NUMEL`` elements. Parameters
    that bitsandbytes gives states of 32 bits (small ones, and those that its ``GlobalOptimManager`` names, as the
    Trainer does for embeddings) are in chunks whose states are fp32. A paged optimizer needs no pages: the plan moves
    its states.

    Args:
        optimizer: See ``ElementwiseKernel``.
        means: See ``Kernel``.
    """

    splits_tensors = False  # checkpoints have no parts of scales
    cut_numel = BLOCK_NUMEL

    def __init__(self, optimizer: Any, means: Means) -> None:
        super().__init__(optimizer, means)
        self._library = optimizer
        kinds = (kind.__name__ for kind in type(optimizer).__mro__)
        self.num_states = next(_NUM_STATES[name] for name in kinds if name in _NUM_STATES)
        self._states = ("state1", "state2")[: self.num_states]
        self.list_names = (MASTER, *self._states, *(_scale_of(name) for name in self._states))
        self._positions: dict[int, tuple[int, int]] = {}
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}

    def state_type(self, parameter: torch.Tensor, numel: int) -> str:
        """See ``Kernel``. A state that is there already keeps its type, whatever the library was told since."""
        kept = (self._optimizer.state.get(parameter) or {}).get("state1")
        if kept is not None and kept.numel() == numel:
            return str(kept.dtype).removeprefix("torch.")
        config = self._config_of(parameter)
        return "uint8" if config["optim_bits"] == 8 and numel >= config["min_8bit_size"] else "float32"

    def _config_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The settings of a parameter, those of the library's ``GlobalOptimManager`` included."""
        groups = self._library.param_groups
        number, place = self._positions.get(id(parameter), (len(groups), 0))
        members = groups[number]["params"] if number < len(groups) else ()
        if not (place < len(members) and members[place] is parameter):
            self._positions = {id(p): (n, k) for n, group in enumerate(groups) for k, p in enumerate(group["params"])}
            number, place = self._positions[id(parameter)]
        return settings_of(self._library.get_config(number, place, groups[number]))

    def _rules(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int]
    ) -> tuple[Mapping[int, int], Sequence[Mapping[str, Any]]]:
        """See ``ElementwiseKernel``: a rule is what ``get_config`` of the library says of a parameter."""
        rules: dict[int, int] = {}
        settings: list[dict[str, Any]] = []
        for tensor in (tensor for chunk in chunks for tensor in chunk.owned if tensor.spec.index in groups):
            config = self._config_of(tensor.parameter)
            is_new = tensor.spec.index not in self._steps
            if is_new and self.state_type(tensor.parameter, tensor.spec.numel) != tensor.spec.types.states:
                raise EngineError(
                    f"parameter '{tensor.spec.name}' has a place for states of type {tensor.spec.types.states}, and "
                    "bitsandbytes was told of another number of bits since; call override_config before train() or "
                    "prepare()"
                )
            if config not in settings:
                settings.append(config)
            rules[tensor.spec.index] = settings.index(config)
        return rules, settings

    def _update(self, job: Job, share: Sequence[Segment]) -> None:
        for segment in share:
            (gradient,) = self._widened(segment.chunk, [segment.gradient])
            if job.factor is not None:
                gradient.mul_(job.factor)
            self._call(segment, job.settings[segment.rule], gradient)
            round_masters([segment.part(MASTER)], [segment.part("param")])

    def _call(self, segment: Segment, config: Mapping[str, Any], gradient: torch.Tensor) -> None:
        """Calls the function that the library's ``update_step`` calls, over a range."""
        from bitsandbytes import functional  # the optimizer comes from there

        given: dict[str, Any] = {name: config[name] for name in ("alpha", "eps", "lr", "weight_decay", "skip_zeros")}
        given |= dict(zip(("beta1", "beta2", "beta3"), (*config["betas"], 0.0), strict=False))
        given |= {"step": segment.step + 1, "state2": None, "g": gradient, "p": segment.part(MASTER)}
        given |= {name: segment.part(name) for name in self._states}
        update: Any = functional.optimizer_update_32bit
        if given["state1"].dtype is torch.uint8:
            update = functional.optimizer_update_8bit_blockwise
            given |= {"qmap2": None, "absmax2": None}
            for name in self._states:
                given[_scale_of(name)] = segment.part(_scale_of(name))
                given[_table_of(name)] = self._table(name, gradient.device)
        update(self._library.optimizer_name, **given)

    def _table(self, state: str, device: torch.device) -> torch.Tensor:
        """The values that the numbers of a state stand for."""
        name = _MAPS[state]
        if (name, device) not in self._tables:
            if name not in self._library.name2qmap:
                self._library.fill_qmap()
            self._tables[name, device] = self._library.name2qmap[name].to(device)
        return self._tables[name, device]

    # States

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """See ``Kernel``. It has the names and the order of the library's."""
        lists = tensor.chunk.lists
        step = self._steps.get(tensor.spec.index)
        if step is None:
            return {}
        places = self.state_places(tensor)
        state: dict[str, Any] = {"step": int(step)}
        for name in self._states:
            state[name] = places[name]
            if lists[name].dtype is torch.uint8:
                state[_table_of(name)] = self._table(name, lists[name].device)
        return state | places

    def state_places(self, tensor: ManagedParameter) -> dict[str, torch.Tensor]:
        """See ``Kernel``. They are the states, with their scales."""
        lists = tensor.chunk.lists
        places = {name: tensor.view(lists[name]) for name in self._states}
        if tensor.spec.types.states == "uint8":
            start, num = tensor.home_offset_numel // BLOCK_NUMEL, -(-tensor.own_numel // BLOCK_NUMEL)
            places |= {name: lists[name].narrow(0, start, num) for name in map(_scale_of, self._states)}
        return places


def _scale_of(state: str) -> str:
    return state.replace("state", "absmax")


def _table_of(state: str) -> str:
    return state.replace("state", "qmap")
