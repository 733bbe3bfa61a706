"""Moves chunks between their homes when what was recorded says where they cost least (PatrickStar section 8.2)."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.activations import Activations
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.schedule.estimate import Estimate, PlacementRules, left_device
from hf_patrickstar.schedule.margin import StepCost
from hf_patrickstar.schedule.offload import choose_offload, describe_offload, most_that_fit
from hf_patrickstar.schedule.placement import ChunkBytes, Lookups, plan_lookups
from hf_patrickstar.schedule.step_estimate import ChunkWork
from hf_patrickstar.schedule.trace import Shapes

logger = logging.getLogger(__name__)


class Placement:
    """Decides anew, when traces have come or changed, which chunks live in the device margin.

    Args:
        chunks: All chunks, by index.
        nbytes: The bytes of each, over all lists.
        ledger: Knows the limits.
        tracer: Has the traces.
        reserve: Makes the optimizer allocate its workspace on a tier where it will update chunks.
        rules: What is taken into account.
        fills_margin: Whether chunks may move to the margin; else the first placement stays for ever.
        activations: Have buffers on the host.

    Attributes:
        in_margin: Indices of the chunks that live in the margin: of those that the host has no room for, too.
        stays: Is held while an update is prepared and done, which writes to lists where they were: no home moves.
        nbytes: The bytes of each chunk, over all lists.
        reasons: What was decided last, a sentence each: about lookups, and about the margin.
        estimated: What a step costs as chunks live now, by the rates of the machine; ``None`` if it is not known.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        nbytes: Sequence[ChunkBytes],
        ledger: Ledger,
        tracer: Tracer,
        reserve: Callable[[Sequence[Chunk], Tier], None],
        rules: PlacementRules,
        fills_margin: bool,
        activations: Activations,
    ) -> None:
        self.in_margin: set[int] = set()
        self.stays = threading.Lock()
        self.reasons: dict[str, str] = {}
        self.estimated: StepCost | None = None
        self._chunks = chunks
        self.nbytes = list(nbytes)
        self._ledger = ledger
        self._tracer = tracer
        self._reserve = reserve
        self._rules = rules
        self._fills_margin = fills_margin
        self._activations = activations
        self._has_groups = any(chunk.is_group for chunk in chunks)
        self._seen_version = 0
        self._lookups: dict[int, str] = {}
        self._num_micro_batches = 1

    def update(
        self,
        make_room: Callable[..., None],
        num_micro_batches: int,
        *,
        is_estimated: bool = False,
        is_certain: bool = False,
    ) -> None:
        """Decides anew if a step was recorded since the last time; called between steps.

        Args:
            make_room: Makes room for chunks that move in; see ``Executor.make_room``.
            num_micro_batches: Micro-batches of the step that has ended.
            is_estimated: Whether the traces are those of a step that has not run yet.
            is_certain: Whether it takes what they say, to the byte: what has no room is then an error, before anything
                is computed.

        Raises:
            BudgetError: If that step has no room, however chunks are placed.
        """
        tracer = self._tracer
        if tracer.version == self._seen_version:
            return
        self._seen_version = tracer.version
        self._num_micro_batches = max(num_micro_batches, 1)
        if self._place_lookups():
            tracer.discard()  # the next step visits other chunks
        elif any(trace.kind.is_training for trace in tracer.traces.values()):
            if is_estimated and not self._has_groups:
                self.choose_offload()
            if self._fills_margin:
                if is_estimated and self._estimate().room_beside(self._at_home_on_device()) < 0:
                    self._leave_device("beside what else a step takes")
                self._fill_margin(make_room, is_certain=is_certain)
            self._estimate_cost()

    def choose_offload(self, agree: Callable[[int, int], int] | None = None) -> None:
        """Decides how many activations leave the device, for all micro-batches of training that are known.

        Args:
            agree: Makes one number of those of several processes: of each how many leave, and how many may.
        """
        estimate, at_home, current = self._estimate(), self._at_home_on_device(), frozenset(self.in_margin)

        def kept_with(num: int) -> frozenset[int] | None:
            """Chunks that stay on the device whatever happens; ``None`` if a step has no room beside them."""
            found = estimate.offloading(num)
            if not self._fills_margin:
                has_room = found.room_beside(at_home) >= 0 and found.host_room_beside(at_home) >= 0
                return at_home if has_room else None
            kept = at_home - current if found.room_beside(at_home) >= 0 else frozenset[int]()
            try:
                return kept if found.room_beside(kept | found.spilled(kept)) >= 0 else None
            except BudgetError:
                return None

        def cost_of(num: int) -> StepCost | None:
            kept, found = kept_with(num), estimate.offloading(num)
            if kept is None:
                return None
            margin = found.margin(kept, current) if self._fills_margin else None
            return found.cost(kept if margin is None else kept.union(margin.chunk_indices))

        def fits(num: int) -> bool:
            return kept_with(num) is not None

        asked, most = self._rules.offload, estimate.num_can_leave
        num, why = choose_offload(asked, most, cost_of, fits)
        if agree is not None:
            num = agree(num, most_that_fit(num, most, fits))
            self._seen_version = -1  # homes follow
        if num < max(trace.num_offloaded for trace in estimate.traces):
            self._activations.trim()
        self._tracer.offload(num)
        said = describe_offload(self._tracer.traces.values(), num, asked, why)
        logger.info("patrickstar: %s", said)
        self.reasons["activations"] = said

    def _estimate_cost(self) -> None:
        """Without lanes nothing waits for a copy beside computation, so there is nothing to estimate."""
        if self._rules.has_lanes:
            self.estimated = self._estimate().cost(self._at_home_on_device())

    def allow_margin(self, is_allowed: bool) -> None:
        """Tells whether chunks may move to the margin, now that an optimizer came.

        Args:
            is_allowed: As ``fills_margin`` of the constructor.
        """
        self._fills_margin = is_allowed

    def note_chunks(self, nbytes: Sequence[ChunkBytes]) -> None:
        """Takes note of chunks that came or went.

        Args:
            nbytes: The bytes of each, over all lists.
        """
        self.nbytes = list(nbytes)
        self.in_margin = {index for index in self.in_margin if not self._chunks[index].is_retired}
        self._seen_version = -1

    def prepare(self, shapes: Shapes, *, is_training: bool) -> bool:
        """Leaves the margin before a step is recorded that may need more memory than any before it.

        Args:
            shapes: Shapes of its inputs.
            is_training: Whether a backward belongs to it: then no evaluation tells what it needs.

        Returns:
            Whether any chunk has moved.
        """
        if not self.in_margin:
            return False
        known = (trace for trace in self._tracer.traces.values() if trace.kind.is_training or not is_training)
        if any(trace.covers(shapes) for trace in known):
            return False
        logger.info("patrickstar: larger inputs than any before, %s: the device margin is given up", list(shapes))
        return self.leave_margin()

    @property
    def may_leave_device(self) -> bool:
        """Whether chunks are at home on the device that may leave it."""
        return bool(self.in_margin) or (self._fills_margin and bool(self._at_home_on_device()))

    def leave_margin(self) -> bool:
        """Moves every chunk out of the margin that is not in use; whether any moved. It may be called in a step.

        If none is there, chunks leave that have been at home on the device from the start, because it seemed that
        everything fits, as far as the host has room.
        """
        self._seen_version = -1  # decide anew after this step, whether it is recorded or not
        if self.stays.locked():
            return False
        before = len(self.in_margin)
        self._move_out(set(self.in_margin))
        return len(self.in_margin) < before or self._leave_device("a step ran out of memory")

    def _leave_device(self, why: str) -> bool:
        leaving = [chunk for chunk in self._chunks if chunk.home is Tier.DEVICE and chunk.can_rehome]
        leaving = [chunk for chunk in leaving if chunk.spec.index not in self.in_margin]
        if not (self._fills_margin and leaving):
            return False
        num_moved = 0
        try:
            self._reserve(self._chunks, Tier.HOST)
            for chunk in leaving:
                chunk.move_home(Tier.HOST)
                num_moved += 1
        except BudgetError as error:
            logger.info("patrickstar: the host has no room for all that the device cannot hold: %s", error)
        said = left_device(num_moved, why)
        logger.info("patrickstar: %s", said)
        self.reasons["homes"] = said
        return num_moved > 0

    def _place_lookups(self) -> bool:
        """Decides by time which embeddings are worth being looked up on the CPU; whether any changed."""
        asked = [tensor for chunk in self._chunks for tensor in chunk.owned if tensor.lookup == "auto"]
        measured = {tensor.spec.index: tensor.lookup_nbytes // self._num_micro_batches for tensor in asked}
        if not any(measured.values()):
            return False
        room = self._estimate().room_beside(self._at_home_on_device())
        choice, reason = plan_lookups(
            {t.spec.index: Lookups(t.chunk.param_nbytes, measured[t.spec.index], t.spec.trainable) for t in asked},
            self._rules.machine,
            room,
        )
        self.settle_lookups(choice)
        logger.info("patrickstar: %s", reason)
        self.reasons["lookups"] = reason
        return any(tensor.lookup == "device" for tensor in asked)

    @property
    def lookups(self) -> dict[int, str]:
        """Where embeddings are looked up that were asked for; see ``KnownTraces``."""
        return dict(self._lookups)

    def settle_lookups(self, lookups: Mapping[int, str]) -> None:
        """Decides where embeddings are looked up.

        Args:
            lookups: ``"home"`` or ``"device"``, by the index of the parameter.
        """
        for chunk in self._chunks:
            for tensor in chunk.owned:
                if tensor.lookup == "auto" and tensor.spec.index in lookups:
                    tensor.lookup = self._lookups[tensor.spec.index] = lookups[tensor.spec.index]
                    if tensor.lookup == "device":
                        chunk.pin()  # from now on it moves

    def _at_home_on_device(self) -> frozenset[int]:
        return frozenset(chunk.spec.index for chunk in self._chunks if chunk.home is Tier.DEVICE)

    def _fill_margin(self, make_room: Callable[..., None], *, is_certain: bool) -> None:
        self.nbytes = [  # an accumulation list may have come since
            dataclasses.replace(nbytes, state_nbytes=chunk.state_nbytes)
            for nbytes, chunk in zip(self.nbytes, self._chunks, strict=True)
        ]
        try:
            kept, current = self._at_home_on_device() - self.in_margin, frozenset(self.in_margin)
            plan = self._estimate().margin(kept, current)
        except BudgetError as error:
            if is_certain:
                raise
            logger.info("patrickstar: chunks stay at home where they are: %s", error)
            return
        if plan is None:
            return
        wanted = set(plan.chunk_indices)
        if wanted != self.in_margin or "margin" not in self.reasons:
            logger.info("patrickstar: %s", plan.reason)
        self.reasons["margin"] = plan.reason
        if wanted == self.in_margin:
            return
        is_moving = True
        while is_moving:  # where either tier is full, chunks change places as room comes free
            before = set(self.in_margin)
            self._move_out(self.in_margin - wanted)
            self._move_in(make_room, [index for index in plan.chunk_indices if index not in self.in_margin])
            is_moving = self.in_margin not in (wanted, before)
        self._move_out(self.in_margin - wanted)

    def _estimate(self) -> Estimate:
        """What is known of a step as chunks are now."""
        on_host = [chunk for chunk in self._chunks if chunk.home is Tier.HOST and not chunk.is_retired]
        rules = self._rules
        if any(chunk.is_updated for chunk in on_host):
            rules = dataclasses.replace(rules, host_workspace_nbytes=0)  # it is there already
        homes_nbytes = sum(self.nbytes[chunk.spec.index].host_nbytes for chunk in on_host)
        return Estimate(
            list(self._tracer.traces.values()),
            self._num_micro_batches,
            self.nbytes,
            self._works(frozenset()),
            frozenset(chunk.spec.index for chunk in self._chunks if chunk.is_updated),
            self._has_groups,
            self._ledger.available(Tier.HOST) + homes_nbytes + self._activations.nbytes,
            self._ledger.limit(Tier.DEVICE, cautious=False),
            self._ledger.chunk_budget,
            rules,
        )

    def _works(self, at_home: frozenset[int]) -> list[ChunkWork]:
        """What a step does with each chunk if these are at home on the device."""
        looked_up = {t.spec.index for chunk in self._chunks for t in chunk.tensors if t.is_cpu_embedding}
        return [
            ChunkWork.of(
                chunk.spec,
                [(tensor.spec, tensor.own_numel) for tensor in chunk.tensors],
                looked_up,
                is_static=chunk.spec.index in at_home,
            )
            for chunk in self._chunks
        ]

    def _move_out(self, indices: set[int]) -> None:
        """Moves chunks to the host, as far as that has room: not those that it never had room for."""
        for index in sorted(indices):
            chunk = self._chunks[index]
            if not chunk.can_rehome or self._ledger.available(Tier.HOST) < self.nbytes[index].host_nbytes:
                continue
            try:
                self._reserve(self._chunks, Tier.HOST)
                chunk.move_home(Tier.HOST)
            except BudgetError as error:
                logger.info("patrickstar: the host has no room for a chunk of the device margin: %s", error)
                return
            self.in_margin.discard(index)

    def _move_in(self, make_room: Callable[..., None], indices: Sequence[int]) -> None:
        try:
            if indices:
                self._reserve(self._chunks, Tier.DEVICE)
        except BudgetError as error:
            logger.info("patrickstar: no room for the optimizer's workspace in the device margin: %s", error)
            return
        for index in indices:
            if not self._chunks[index].can_rehome:
                continue  # of a forward that was interrupted; there will be another time
            try:
                make_room(self.nbytes[index].device_nbytes, keep_margin=True)
                self._chunks[index].move_home(Tier.DEVICE)
            except BudgetError as error:  # something that no trace knows of is there; what moved in is enough
                logger.info("patrickstar: the device margin is smaller than recorded: %s", error)
                break
            self.in_margin.add(index)
