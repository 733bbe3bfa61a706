"""Keeps the managed parameters equal to the parameters of the model while the model changes.

[Note: following the model]
Users unfreeze layers, add and merge adapters, resize embeddings and replace modules. Before a forward and before a step
the engine compares the parameters that it manages with those of the model. A parameter that the model no longer has
becomes an ordinary parameter again, with its value, its gradient, and its state in the user's optimizer. A new
parameter gets a place in new chunks at the end of the chunk list, with its value, gradient and state; so does a
parameter that needs other chunk lists from now on. Other parameters are not touched, empty chunks are freed, and traces
are recorded anew.
"""

import dataclasses
import itertools
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence

import torch

from hf_patrickstar.checkpoint.first_values import FirstValues
from hf_patrickstar.checkpoint.weights import ChunkWeights
from hf_patrickstar.common.shortage import Shortage
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.layout.packing import ChunkSpec, Layout, Packer, Placement
from hf_patrickstar.layout.specs import ModuleSpec, TensorSpec
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.admission import check_compiled, check_modules, check_values
from hf_patrickstar.model.live_parameter import raw_grad, set_raw_data
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.hooks import ModelHooks
from hf_patrickstar.runtime.live_model import LiveModel
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter, ValuePlace
from hf_patrickstar.setup.decisions import Decisions, collect, with_state_types
from hf_patrickstar.setup.payloads import Payloads
from hf_patrickstar.units import format_need

logger = logging.getLogger(__name__)


def holders(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """The index of the first optimizer that holds a parameter, by the parameter's identity."""
    found: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), number)
    return found


def check_optimizers(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuses an optimizer that was made for another model.

    Raises:
        EngineError: If one has none of the model's parameters.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise EngineError(
                f"of the parameters of the {type(optimizer).__name__} not one is the model's "
                f"({type(model).__name__}); make the optimizer from model.parameters()"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """The difference between the model's parameters and the managed ones.

    Attributes:
        specs: The specs of the model's parameters, in model order; parameters that stay keep their index.
        modules: The modules that own the parameters, by positions in ``specs``.
        parameters: The parameters, in the same order.
        new: Positions of the parameters that need a place in a new chunk.
        gone: Managed parameters that the model no longer has, or that were given another shape.
    """

    specs: list[TensorSpec]
    modules: list[ModuleSpec]
    parameters: list[torch.nn.Parameter]
    new: list[int]
    gone: list[ManagedParameter]


@dataclasses.dataclass(eq=False)
class Membership:
    """Follows changes of the model; see [Note: following the model].

    Attributes:
        model: The model.
        manager: The manager of the model's chunks.
        hooks: The model's hooks.
        live: Lets its parameters and modules answer.
        weights: Reads the model's parameters.
        payloads: Makes chunks and managed parameters.
        optimizers: The optimizers over chunks; the list may grow.
        collectives: The processes that share the model data.
        decisions: The decisions with which the engine was made.
        layout: Where each parameter is.
    """

    model: torch.nn.Module
    manager: ChunkManager
    hooks: ModelHooks
    live: LiveModel
    weights: ChunkWeights
    payloads: Payloads
    optimizers: Sequence[ChunkedOptimizer]
    collectives: Collectives
    decisions: Decisions

    def __post_init__(self) -> None:
        self._next_index = len(self.decisions.tensors)
        self.layout: Layout = self.decisions.choice.layout

    @torch.no_grad()
    def follow(self, *, is_training: bool) -> bool:
        """Adapts the engine to changes of the model, if there are any; with several processes all call it together.

        Args:
            is_training: Whether gradients will be computed. Only then is a frozen parameter with ``requires_grad=True``
                unfrozen, since users switch adapters on for evaluations too.

        Returns:
            Whether anything may have changed.

        Raises:
            BudgetError: If there is no room for new parameters; nothing has changed then.
            EngineError: If a new parameter cannot be managed.
            ConfigError: If a new module cannot, or the model was compiled as a whole.
        """
        if not (self.hooks.may_have_changed(is_training) or self.manager.has_new_groups) or _is_functional_call():
            return False
        self._follow(is_training)
        return True

    @unseen()
    def _follow(self, is_training: bool) -> None:
        change = self._compare(is_training)
        if change.new or change.gone:
            with self.manager.gradients.lock:  # other threads may read parameters
                self._adapt(change)
        elif any(self.manager.by_index[spec.index].spec != spec for spec in change.specs):
            self._rename(change)
        self.hooks.refresh()
        self.live.refresh()
        self.manager.has_new_groups = False

    def _compare(self, is_training: bool) -> _Change:
        manager = self.manager
        check_modules(self.model)
        chunks = [chunk for chunk in manager.chunks if not chunk.is_retired]
        check_compiled(self.model, sum(not chunk.is_static for chunk in chunks), len(chunks))
        for swapped in [tensor for tensor in manager.tensors if not tensor.is_ours]:
            manager.writes.give_up_swapped(swapped)
        held = holders(item.inner for item in self.optimizers)
        specs, modules, parameters = collect(self.model, held, manager.find)
        specs = self.decisions.precision.assign(self.model, specs, parameters)
        specs = with_state_types(specs, parameters, [item.kernel for item in self.optimizers])
        found: list[TensorSpec] = []
        new: list[int] = []
        for place, (spec, parameter) in enumerate(zip(specs, parameters, strict=True)):
            tensor = manager.find(parameter)
            if tensor is None or self._must_move(tensor, spec, is_training):
                new.append(place)
                found.append(dataclasses.replace(spec, index=self._next_index + len(new) - 1))
            else:
                own = {name: getattr(tensor.spec, name) for name in ("index", "trainable", "optimizer_index", "types")}
                found.append(dataclasses.replace(spec, **own))
        present = {id(parameter) for parameter in parameters}
        gone = [t for t in manager.tensors if t.place is ValuePlace.GIVEN_UP or id(t.parameter) not in present]
        return _Change(found, modules, parameters, new, gone)

    @staticmethod
    def _must_move(tensor: ManagedParameter, spec: TensorSpec, is_training: bool) -> bool:
        """Whether a parameter needs other lists than its chunk has."""
        if spec.trainable and not tensor.spec.trainable:
            return is_training
        return spec.trainable and spec.optimizer_index >= 0 and spec.optimizer_index != tensor.spec.optimizer_index

    def _rename(self, change: _Change) -> None:
        by_index = self.manager.by_index
        for spec in change.specs:
            by_index[spec.index].spec = spec
        self.manager.parameters.index([by_index[spec.index] for spec in change.specs])

    # Adapting

    def _adapt(self, change: _Change) -> None:
        manager = self.manager
        for place in change.new:
            check_values([change.specs[place].name], [change.parameters[place]])
        manager.begin_change()
        layout, chunks = self._allocate(change)
        for tensor in change.gone:
            self._give_back(tensor)
        text = f"{len(change.new)} parameters are new or need other lists, {len(change.gone)} are gone"
        logger.info("patrickstar: the model has changed: %s; %d chunks were added", text, len(chunks))
        placements = {placement.tensor_index: placement for placement in layout.placements}
        parameters = {change.specs[place].index: change.parameters[place] for place in change.new}
        made: dict[int, ManagedParameter] = {}
        for chunk in chunks:
            for index in chunk.spec.tensor_indices:
                spec = next(spec for spec in change.specs if spec.index == index)
                made[index] = self._take_in(spec, parameters[index], placements[index], chunk)
        self._next_index += len(change.new)
        tensors = [made.get(spec.index) or manager.by_index[spec.index] for spec in change.specs]
        for spec, tensor in zip(change.specs, tensors, strict=True):
            tensor.spec = spec
        manager.parameters.index(tensors)
        manager.end_change(self.payloads.nbytes_of(chunk.spec for chunk in manager.chunks))
        self._update_layout()

    def _pack(self, specs: Sequence[TensorSpec], *, apart: bool) -> Layout:
        """Packs parameters into new chunks, with indices after those of the present chunks.

        Args:
            specs: The parameters.
            apart: Whether each module gets its own chunks, so that as few chunks as possible are needed at once.
        """
        first, pieces = len(self.manager.chunks), [list(specs)]
        if apart:
            pieces = [list(own) for _, own in itertools.groupby(specs, key=lambda spec: spec.owners[:1])]
        world_size, chunk_numel = self.collectives.world_size, self.decisions.choice.layout.chunk_numel
        splits = world_size > 1 and self.payloads.splits_tensors
        chunks: list[ChunkSpec] = []
        placements: list[Placement] = []
        for piece in pieces:
            local = [dataclasses.replace(spec, index=place) for place, spec in enumerate(piece)]
            layout = Packer(local, world_size=world_size, splits=splits).layout(chunk_numel)
            begin = first + len(chunks)
            placements += [
                Placement(piece[found.tensor_index].index, begin + found.chunk_index, found.offset_numel)
                for found in layout.placements
            ]
            for chunk in layout.chunks:
                indices = tuple(piece[place].index for place in chunk.tensor_indices)
                chunks.append(dataclasses.replace(chunk, index=begin + chunk.index, tensor_indices=indices))
        return Layout(tuple(specs), tuple(chunks), tuple(placements), chunk_numel)

    def _allocate(self, change: _Change) -> tuple[Layout, list[Chunk]]:
        """Packs new parameters and allocates their chunks, on all processes or on none.

        Raises:
            BudgetError: If there is no room; nothing has changed then.
        """
        chunks = list[Chunk]()
        specs, error = [change.specs[place] for place in change.new], None
        layout = self._pack(specs, apart=False)
        try:
            self._check_working_sets(layout, change)
        except BudgetError as too_large:
            error = too_large
        if not self._agree(error is None):
            layout, error = self._pack(specs, apart=True), None
        try:
            self._check_working_sets(layout, change)
            self._fill(chunks, layout, change)
            self.payloads.reserve_anew([*self.manager.chunks, *chunks])
        except BudgetError as too_large:
            error = too_large
        if not self._agree(error is None):
            for chunk in chunks:
                chunk.retire(self.manager.device.pool)
            self.payloads.reserve_anew(self.manager.chunks)
            raise error or BudgetError(
                "another process has no room for parameters of the model that are new; look at its own error"
            )
        self.manager.add_chunks(chunks)
        return layout, chunks

    def _agree(self, is_possible: bool) -> bool:
        """Whether something is possible on all processes."""
        return all(found[0] for found in self.collectives.exchange([int(is_possible)], "places new parameters"))

    def _fill(self, chunks: list[Chunk], layout: Layout, change: _Change) -> None:
        """Allocates the chunks of a layout, on the device if all other chunks live there and these fit."""
        manager = self.manager
        need = sum(found.device_nbytes for found in self.payloads.nbytes_of(layout.chunks))
        is_static = all(chunk.is_static for chunk in manager.chunks if chunk.tensors)
        is_static = is_static and need <= manager.ledger.available(Tier.DEVICE)
        with_gradients = {change.specs[p].index for p in change.new if self._brings_gradient(change.parameters[p])}
        for spec in layout.chunks:
            chunk = self.payloads.make_chunk(spec, Tier.DEVICE if is_static else Tier.HOST)
            chunks.append(chunk)
            if not with_gradients.isdisjoint(spec.tensor_indices):
                manager.gradients.reserve(chunk)

    def _brings_gradient(self, parameter: torch.nn.Parameter) -> bool:
        tensor = self.manager.find(parameter)
        return (tensor is not None and tensor.has_gradient) or raw_grad(parameter) is not None

    def _check_working_sets(self, layout: Layout, change: _Change) -> None:
        """Makes sure that every module's chunks fit the device together."""
        manager, ledger = self.manager, self.manager.ledger
        sizes = {chunk.spec.index: chunk.copy_nbytes for chunk in manager.chunks}
        sizes |= {spec.index: spec.nbytes for spec in layout.chunks}
        places = {tensor.spec.index: tensor.chunk.spec.index for tensor in manager.tensors}
        places |= {placement.tensor_index: placement.chunk_index for placement in layout.placements}
        limits = ledger.limits(Tier.DEVICE)
        for module in change.modules:
            chunks = {places[change.specs[place].index] for place in module.tensor_indices}
            need = sum(sizes[index] for index in chunks)
            if need > min(limit.nbytes for limit in limits):
                short = Shortage((limit, need) for limit in limits)
                raise BudgetError(
                    f"{short.subject} for module '{module.name}' ({module.class_name}), which is new or has changed: "
                    f"its chunks need {format_need(need)} on the compute device at once, "
                    f"{format_need(min(limit.nbytes for limit in limits))} are available for chunks. "
                    + short.advise(
                        "make the change before the model is prepared (before Trainer.train() is called): chunk sizes "
                        "are chosen for the model as it is then"
                    )
                )

    def _give_back(self, tensor: ManagedParameter) -> None:
        """Makes a parameter an ordinary one, with its value, gradient and state of the optimizer."""
        manager = self.manager
        optimizer = self._optimizer_of(tensor)
        if optimizer is not None:
            optimizer.give_back_state(tensor)
        if tensor.place is not ValuePlace.GIVEN_UP:
            gradient = raw_grad(tensor.parameter)  # from a graph older than its place for one
            if tensor.has_gradient:
                gradient = manager.read_gradient(tensor, tensor.original_dtype).to(tensor.placeholder.device)
            value = self.weights.read(tensor).to(tensor.placeholder.device)
            self.hooks.release(tensor)
            set_raw_data(tensor.parameter, value)
            tensor.unbind()
            tensor.parameter.grad = gradient
        manager.remove(tensor)

    def _take_in(
        self, spec: TensorSpec, parameter: torch.nn.Parameter, placement: Placement, chunk: Chunk
    ) -> ManagedParameter:
        """Moves a parameter into its place in a chunk, with its value, gradient and optimizer state."""
        manager = self.manager
        before = manager.find(parameter)
        if before is not None:
            self._give_back(before)
        gradient, parameter.grad = parameter.grad, None
        tensor = self.payloads.make_tensor(spec, parameter, placement.offset_numel)
        chunk.add(tensor)
        values = FirstValues([tensor], self.collectives, self.weights.piece_numel)
        self.hooks.attach_tensor(tensor)
        values.move_in((), self.live.bind)
        optimizer = self._optimizer_of(tensor)
        if optimizer is not None:
            optimizer.take_inner_state(tensor)
        if gradient is not None and spec.trainable:
            manager.gradient_mirrors.assign(tensor, gradient)
        return tensor

    def _optimizer_of(self, tensor: ManagedParameter) -> ChunkedOptimizer | None:
        spec = tensor.chunk.spec
        return self.optimizers[spec.optimizer_index] if spec.is_updated else None

    def _update_layout(self) -> None:
        tensors = self.manager.tensors
        specs = tuple(tensor.spec for tensor in tensors)
        chunks = tuple(chunk.spec for chunk in self.manager.chunks if chunk.tensors)
        placements = tuple(Placement(t.spec.index, t.chunk.spec.index, t.offset_numel) for t in tensors)
        self.layout = Layout(specs, chunks, placements, self.layout.chunk_numel)


def _is_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` has put other tensors in place of the parameters for one call."""
    code = torch.nn.utils.stateless._functional_call.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(sys._getframe(1)))
