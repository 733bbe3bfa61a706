"""Moves chunks between their homes when what was recorded says where they cost least (PatrickStar section 8.2)."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.activations import Activations
from hf_patrickstar.runtime.chunk import Chunk, Device
from hf_patrickstar.runtime.evictor import Evictor
from hf_patrickstar.runtime.steps import Steps
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.margin import StepCost
from hf_patrickstar.schedule.offload import describe_offload
from hf_patrickstar.schedule.placement import ChunkBytes, Lookups, plan_lookups
from hf_patrickstar.schedule.step_estimate import ChunkWork, num_rows
from hf_patrickstar.schedule.trace import Shapes
from hf_patrickstar.units import format_nbytes

logger = logging.getLogger(__name__)

_LARGE_LOGITS = 16
"""Logits are worth a word if they take at least that part of the device, and make a step longer by ``_WORTH``."""
_WORTH = 1.05


class HomeMover(Evictor):
    """Asks anew where chunks live when traces have come or changed (``Estimate.settled``), and moves them there.

    Args:
        device: The device.
        steps: Has the traces.
        estimate: What was known when chunks were allocated.
        margin: Chunks that live in the margin from the start: the host has no room for them.
        activations: Have buffers on the host.
        reserve: See ``Evictor``.
        advise: See ``Evictor``.

    Attributes:
        estimated: What a step costs as chunks live now, by the rates of the machine; ``None`` if it is not known.
        logits: The chunk of an output embedding whose loss could be computed in chunks of tokens, and the bytes that
            the loss takes for a token.
    """

    def __init__(
        self,
        device: Device,
        steps: Steps,
        estimate: Estimate,
        margin: Iterable[int],
        activations: Activations,
        reserve: Callable[[Sequence[Chunk], Tier], None],
        advise: Callable[[], str],
    ) -> None:
        super().__init__(
            device, steps, estimate.nbytes, margin, moves_homes=estimate.moves_homes, reserve=reserve, advise=advise
        )
        self.estimated: StepCost | None = None
        self.logits: tuple[int, int] | None = None
        self._first = estimate
        self._activations = activations
        self._seen_version = 0
        self._lookups: dict[int, str] = {}
        self._num_micro_batches = 1

    def update_homes(self, num_micro_batches: int, *, is_estimated: bool = False, is_certain: bool = False) -> None:
        """Decides anew if a step was recorded since the last time; called between steps.

        Args:
            num_micro_batches: Micro-batches of the step that has ended.
            is_estimated: Whether the traces are those of a step that has not run yet.
            is_certain: Whether it takes what they say, to the byte: what has no room is then an error, before anything
                is computed.

        Raises:
            BudgetError: If that step has no room, however chunks are placed.
        """
        steps = self._steps
        self._look_at_disk()
        if steps.version == self._seen_version and not self.has_left_margin:
            return
        self._seen_version, self.has_left_margin = steps.version, False
        self._num_micro_batches = max(num_micro_batches, 1)
        if self._place_lookups():
            steps.discard()  # the next step visits other chunks
        elif any(trace.kind.is_training for trace in steps.traces.values()):
            if is_estimated and not self._first.has_groups:
                self.choose_offload()
            try:
                self._settle(may_leave=is_estimated)
            except BudgetError as error:
                if is_certain:
                    raise
                logger.info("patrickstar: chunks stay at home where they are: %s", error)
            if self._first.has_lanes:  # else nothing waits for a copy beside computation
                self.estimated = self._estimate().cost(self.homes)
                self._advise_on_loss()

    def _look_at_disk(self) -> None:
        """Says once if the drive is much slower than decisions assume."""
        counts, machine = self._device.counts, self._first.machine
        rate = (counts.disk_read_nbytes + counts.disk_written_nbytes) / max(counts.disk_seconds, 1e-9)
        if counts.disk_seconds > 10 and 2 * rate < machine.disk_bandwidth and "drive" not in self.reasons:
            self.reasons["drive"] = (
                f"the disk reads and writes {rate / 1e9:.3g} GB/s, and not {machine.disk_bandwidth / 1e9:.3g} as rates "
                f"of '{machine.name}' say: use a faster drive, or several, for disk_path, or larger batches"
            )
            logger.warning("patrickstar: %s", self.reasons["drive"])

    def _advise_on_loss(self) -> None:
        """Says once if a step would be faster without whole logits."""
        if self.logits is None or self.estimated is None:
            return
        (head, row_nbytes), self.logits, estimate = self.logits, None, self._estimate()
        rows = [num_rows(trace.shapes[0]) for trace in estimate.traces if trace.kind.is_training]
        saved = row_nbytes * max(rows)
        if saved < estimate.device_nbytes / _LARGE_LOGITS or not self._device.moves:
            return
        without = estimate.without_logits(head, row_nbytes).cost_when_settled(self.homes)
        if without is None:
            return
        work = estimate.works[head]
        again = estimate.machine.kernel_ns(2 * sum(rows) * work.matrix_numel, 0, work.dtype)
        gain = self.estimated.duration_ns / (without.duration_ns + again)
        if gain > _WORTH:
            self.reasons["loss"] = (
                f"chunked_loss=true would make a step about {gain:.3g} times as fast: logits take "
                f"{format_nbytes(saved)} of the device, where chunks could be. Losses would differ in the last digits"
            )
            logger.info("patrickstar: %s", self.reasons["loss"])

    def choose_offload(self, agree: Callable[[int, int], int] | None = None) -> None:
        """Decides how many activations leave the device, for all micro-batches of training that are known.

        Args:
            agree: Makes one number of those of several processes: of each how many leave, and how many may.
        """
        estimate = self._estimate()
        num, most, why = estimate.choose_offload(self.homes, are_made=True)
        if agree is not None:
            num = agree(num, most)
            self._seen_version = -1  # homes follow
        if num < max(trace.num_offloaded for trace in estimate.traces):
            self._activations.trim()
        self._steps.offload(num)
        said = describe_offload(self._steps.traces.values(), num, estimate.offload, why)
        logger.info("patrickstar: %s", said)
        self.reasons["activations"] = said

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
        known = (trace for trace in self._steps.traces.values() if trace.kind.is_training or not is_training)
        if any(trace.covers(shapes) for trace in known):
            return False
        logger.info("patrickstar: larger inputs than any before, %s: the device margin is given up", list(shapes))
        return self.leave_margin()

    def _place_lookups(self) -> bool:
        """Decides by time which embeddings are worth being looked up on the CPU; whether any changed."""
        asked = [tensor for chunk in self._chunks for tensor in chunk.owned if tensor.lookup == "auto"]
        measured = {tensor.spec.index: tensor.lookup_nbytes // self._num_micro_batches for tensor in asked}
        if not any(measured.values()):
            return False
        estimate = self._estimate()
        choice, reason = plan_lookups(
            {t.spec.index: Lookups(t.chunk.param_nbytes, measured[t.spec.index], t.spec.trainable) for t in asked},
            estimate.machine,
            estimate.room_beside(self.homes.device),
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

    def _settle(self, *, may_leave: bool) -> None:
        """Moves chunks to where they are to live from now on."""
        now = self.homes
        wanted = self._estimate().with_disk(now, are_made=True).settled(now, may_leave=may_leave)
        for name, reason in wanted.reasons.items():
            if name not in self.reasons or wanted.device != now.device:
                logger.info("patrickstar: %s", reason)
        self.reasons.update(wanted.reasons)
        self.in_margin = {*wanted.margin, *(self.in_margin - wanted.device)} & now.device
        self._move_states(wanted.disk - now.disk - now.device, Tier.DISK)
        before = None
        while before != now.device:  # where either tier is full, chunks change places as room comes free
            before = now.device
            self.move_out(now.device - wanted.device)
            self._move_in([index for index in wanted.margin if index not in self.in_margin])
            now = self.homes
        self._move_states(now.disk - wanted.disk, Tier.HOST)
        self._stream(wanted.streamed - now.device, wanted.tile_part)

    def _move_states(self, indices: frozenset[int], tier: Tier) -> None:
        """Moves masters and states of chunks on the host to the disk or back, as far as there is room."""
        try:
            for index in sorted(indices):
                self._chunks[index].move_home(Tier.HOST, tier)
        except BudgetError as error:
            logger.info("patrickstar: masters and states stay where they are: %s", error)

    def _stream(self, indices: frozenset[int], tile_part: int) -> None:
        """Updates these chunks on the device from now on; see [Note: updates over the bus]."""
        before = {chunk for chunk in self._chunks if chunk.is_streamed}
        now = {chunk for chunk in self._chunks if chunk.spec.index in indices}
        if now == before and tile_part == self._chunks[0].tile_part:
            return
        for chunk in before | {chunk for chunk in now if chunk.is_on_disk}:
            chunk.wait_for_update()  # slots may go, or change; the ring asks which chunks these are
        for chunk in self._chunks:
            chunk.is_streamed, chunk.tile_part = chunk in now, tile_part
        try:
            if now:
                self.make_room(self._first.slots_nbytes[tile_part], keep_margin=True)
            self._reserve(self._chunks, Tier.HOST)
        except BudgetError as error:
            self.reasons["updates"] = f"updates: none over the bus, for which the device has no room: {error}"
            logger.info("patrickstar: %s", self.reasons["updates"])
            for chunk in now:
                chunk.is_streamed = False
            self._reserve(self._chunks, Tier.HOST)  # gives slots back that another optimizer has got
        for chunk in now - before:
            if chunk.is_streamed:
                chunk.pin()

    def _estimate(self) -> Estimate:
        """What is known of a step as chunks are now."""
        self.nbytes = [  # an accumulation list may have come since
            dataclasses.replace(nbytes, state_nbytes=chunk.state_nbytes, is_on_disk=chunk.is_on_disk)
            for nbytes, chunk in zip(self.nbytes, self._chunks, strict=True)
        ]
        on_host = [chunk for chunk in self._chunks if chunk.home is Tier.HOST and not chunk.is_retired]
        looked_up = {t.spec.index for chunk in self._chunks for t in chunk.tensors if t.is_cpu_embedding}
        is_reserved = any(chunk.is_updated for chunk in on_host)
        homes_nbytes = sum(self.nbytes[chunk.spec.index].host_nbytes for chunk in on_host)
        return dataclasses.replace(
            self._first,
            traces=list(self._steps.traces.values()),
            num_micro_batches=self._num_micro_batches,
            nbytes=self.nbytes,
            works=[
                ChunkWork.of(chunk.spec, [(tensor.spec, tensor.own_numel) for tensor in chunk.tensors], looked_up)
                for chunk in self._chunks
            ],
            updated=frozenset(chunk.spec.index for chunk in self._chunks if chunk.is_updated),
            host_nbytes=self._ledger.available(Tier.HOST) + homes_nbytes + self._activations.nbytes,
            device_nbytes=self._ledger.limit(Tier.DEVICE, cautious=False),
            host_workspace_nbytes=0 if is_reserved else self._first.host_workspace_nbytes,
            moves_homes=self.moves_homes,
        )

    def _move_in(self, indices: Sequence[int]) -> None:
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
                self.make_room(self.nbytes[index].device_nbytes, keep_margin=True)
                self._chunks[index].move_home(Tier.DEVICE)
            except BudgetError as error:  # something that no trace knows of is there; what moved in is enough
                logger.info("patrickstar: the device margin is smaller than recorded: %s", error)
                break
            self.in_margin.add(index)
