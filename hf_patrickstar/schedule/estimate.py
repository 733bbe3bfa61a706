"""What a step will cost, and which chunks are worth a home in the device margin: from traces and numbers alone."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.bounds import streaming_ns
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.margin import AS_FAST, StepCost, fill_margin, in_order, needed_nbytes, plan_margin
from hf_patrickstar.schedule.move_plan import chunkable_nbytes, repeated_plans
from hf_patrickstar.schedule.offload import Asked, choose_offload, least_that_fit, most_that_fit
from hf_patrickstar.schedule.placement import FIRST_HOMES, ChunkBytes, Homes, Tiers, least_on_disk, spill, too_small
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import TILE_NUMEL, TILE_PARTS, Load, Send
from hf_patrickstar.schedule.step_estimate import ChunkWork, estimate_script, num_rows, steps_of
from hf_patrickstar.schedule.trace import Trace

_COPYING = (Lane.TO_DEVICE, Lane.TO_HOST, Lane.GATHERS, Lane.REDUCTIONS)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What decides where chunks live: the same numbers before chunks are allocated as while they move.

    Attributes:
        traces: The traces, of training and others.
        num_micro_batches: Micro-batches of a step.
        nbytes: The bytes of each chunk, over all lists.
        works: What a step does with each chunk.
        updated: Chunks that the optimizer changes.
        has_groups: Whether several processes share the chunks.
        host_nbytes: Bytes of the host for chunks that are at home there, for the optimizer's scratch space for them,
            and for activations.
        device_nbytes: Bytes of the device for chunks and non-model data.
        chunk_nbytes: Bytes of it that chunks may take, or ``None`` for all.
        workspace_nbytes: Bytes of scratch space on the device: what the optimizer needs if it updates chunks there, and
            what slices of gradients of other processes arrive in.
        host_workspace_nbytes: Bytes of it that the optimizer needs on the host, and that are not there yet.
        prefetch_depth: Chunks that are brought in ahead.
        policy: The name of the policy by which copies leave.
        machine: Its rates decide what takes the least time.
        has_lanes: Whether copies run beside computation; else the time of a step is the sum of all.
        overlaps_update: Whether the host updates chunks beside the next forward.
        offload: Which activations leave the device between forward and backward; see ``choose_offload``.
        moves_homes: Whether chunks find other homes once a step is known.
        updates: Where chunks on the host are updated: the setting, or ``"faster"``: each where it is done first.
        streaming: The indices of the optimizers that can update chunks over the bus.
        slots_nbytes: Bytes of scratch space that the device needs if it updates any of them, by the part of a tile.
        disk_nbytes: Bytes of the disk for masters and optimizer states.
    """

    traces: Sequence[Trace]
    num_micro_batches: int
    nbytes: Sequence[ChunkBytes]
    works: Sequence[ChunkWork]
    updated: frozenset[int]
    has_groups: bool
    host_nbytes: int
    device_nbytes: int
    chunk_nbytes: int | None
    workspace_nbytes: int
    host_workspace_nbytes: int
    prefetch_depth: int
    policy: str
    machine: Machine
    has_lanes: bool
    overlaps_update: bool
    offload: Asked = "auto"
    moves_homes: bool = True
    updates: str = "host"
    streaming: frozenset[int] = frozenset({0})
    slots_nbytes: Mapping[int, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TILE_PARTS, 0))
    disk_nbytes: int = 0

    @property
    def has_training(self) -> bool:
        """Whether a step of training is known."""
        return any(trace.kind.is_training for trace in self.traces)

    @property
    def unusable_nbytes(self) -> int:
        """Bytes of the device that chunks may not take even where non-model data leaves them."""
        return 0 if self.chunk_nbytes is None else max(self.device_nbytes - self.chunk_nbytes, 0)

    # Activations that leave

    @property
    def num_can_leave(self) -> int:
        """How many activations can leave the device between forward and backward, at most."""
        return max((len(trace.activations) for trace in self.traces), default=0)

    @property
    def host_nbytes_for_chunks(self) -> int:
        """Bytes of the host that activations leave to chunks."""
        return self.host_nbytes - max((trace.offloaded_nbytes for trace in self.traces), default=0)

    @property
    def on_disk(self) -> frozenset[int]:
        """Chunks whose masters and states are on the disk, unless they are at home on the device."""
        return frozenset(chunk.chunk_index for chunk in self.nbytes if chunk.is_on_disk)

    def with_disk(self, homes: Homes, *, are_made: bool) -> "Estimate":
        """The same with as few states on the disk as leave a step room, of the chunks that forward needs last.

        Args:
            homes: See ``choose_offload``.
            are_made: Likewise.
        """
        # What updates over the bus need at least stays free: the device may be full else.
        spare = self.slots_nbytes[TILE_PARTS[-1]] if self.updates == "auto" and self.overlaps_update else 0

        def find(nbytes: Sequence[ChunkBytes]) -> Homes | None:
            made = dataclasses.replace(self, nbytes=nbytes, workspace_nbytes=self.workspace_nbytes + spare)
            return made.homes_with_room(homes, are_made=are_made)

        if not (self.disk_nbytes and self.has_training):
            return self
        order = in_order(range(len(self.nbytes)), self.traces)[::-1]
        found = least_on_disk(self.nbytes, order, self.disk_nbytes, find)
        return self if found is None else dataclasses.replace(self, nbytes=found[0])

    def offloading(self, num: int) -> "Estimate":
        """The same if so many activations leave the device."""
        return dataclasses.replace(self, traces=[trace.offloading(num) for trace in self.traces])

    def without_logits(self, head: int, row_nbytes: int) -> "Estimate":
        """The same, as far as anybody can tell without another trace, if logits were never whole.

        Args:
            head: The chunk of the output embedding.
            row_nbytes: Bytes of the device that the loss takes for a token.
        """
        traces = []
        for made in self.traces:
            nbytes = [visit.non_model_nbytes for visit in made.visits]
            if made.kind.is_training and made.forward_ends:
                places = [moment for moment, visit in enumerate(made.visits) if visit.chunk_index == head]
                first = max((moment for moment in places if moment < made.forward_ends[-1]), default=len(nbytes))
                last = min((moment for moment in places if moment > first), default=len(nbytes))
                saved = row_nbytes * num_rows(made.shapes[0])
                for moment in range(max(first, 1), last):
                    nbytes[moment] = min(nbytes[moment], max(nbytes[moment] - saved, nbytes[first - 1]))
            traces.append(made.with_non_model_nbytes(nbytes))
        return dataclasses.replace(self, traces=traces)

    # Homes

    def spilled(self, kept: frozenset[int]) -> frozenset[int]:
        """Decides which chunks are at home on the device because the host has no room for them.

        Args:
            kept: Chunks that are at home on the device whatever happens.

        Raises:
            BudgetError: If none were found with which the device has room for every moment of the traces.
        """
        chunks = [chunk for chunk in self.nbytes if chunk.chunk_index not in kept]
        needs, device = self._needs(kept, self.unusable_nbytes), self.device_nbytes
        if self.has_groups:
            needs = [(nbytes, frozenset()) for nbytes, _ in needs]
        device -= sum(self.nbytes[index].device_nbytes for index in kept)
        workspace = self.host_workspace_nbytes, self.workspace_nbytes
        tiers = Tiers(self.host_nbytes_for_chunks, device, needs, *workspace, self.disk_nbytes)
        if tiers.on_host(chunks) <= tiers.host_nbytes:
            return frozenset()
        found = spill(chunks, tiers, in_order(range(len(self.nbytes)), self.traces))
        if found is None:
            raise BudgetError(too_small(chunks, tiers, self.host_nbytes - self.host_nbytes_for_chunks))
        return found

    def margin(self, kept: frozenset[int], current: frozenset[int] = frozenset()) -> tuple[tuple[int, ...], str] | None:
        """Decides which chunks are to live in the margin: those that the host cannot hold, and others worth it.

        Args:
            kept: Chunks that are at home on the device whatever happens.
            current: Chunks that live there now: they stay where the host has no room for all, if they may. Full tiers
                have no room to exchange chunks.

        Returns:
            The chunks, the first to move in first, and why; or ``None`` if no chunk may move.

        Raises:
            BudgetError: As for ``spilled``.
        """
        movable = [index for index, work in enumerate(self.works) if work.may_move and index not in kept]
        if not movable:
            return None
        for is_ahead in (True, False):  # room for what is brought in ahead is given up where the host needs it
            candidates = self._candidates(movable, kept, is_ahead=is_ahead)
            least = self._least_in_margin(candidates, kept, current)
            if least is not None:
                return self._plan_margin(movable, candidates, kept, least)
        spilled = current if self._may_stay(current, kept) else self.spilled(kept)
        movable, kept = [index for index in movable if index not in spilled], kept | spilled
        margin, why = self._plan_margin(movable, self._candidates(movable, kept), kept)
        reason = f"the host has no room for {len(spilled)} chunks, which live on the device; beside them {why}"
        return (*in_order(spilled, self.traces), *margin), reason

    def _candidates(self, movable: Sequence[int], kept: frozenset[int], *, is_ahead: bool = True) -> tuple[int, ...]:
        """What the margin has room for, beside chunks that are kept on the device; see ``fill_margin``.

        Args:
            movable: Chunks that may live there.
            kept: Chunks that are at home on the device whatever happens.
            is_ahead: Whether room is kept for a chunk that is brought in ahead.
        """
        is_ahead = is_ahead and self.prefetch_depth > 0
        prefetched = [is_ahead * (work.gradient_nbytes + work.sent_nbytes) for work in self.works]
        chunks, device_nbytes = [self.nbytes[index] for index in movable], self.device_nbytes - self._fixed_nbytes(kept)
        return fill_margin(
            chunks, self.traces, device_nbytes, prefetched, kept, self.unusable_nbytes, copies_stay=self.has_groups
        )

    def _plan_margin(
        self, movable: Sequence[int], candidates: Sequence[int], kept: frozenset[int], least: int = 0
    ) -> tuple[tuple[int, ...], str]:
        chunks, name = [self.nbytes[index] for index in movable], self.machine.name

        def cost_of(inside: frozenset[int]) -> StepCost | None:
            return self.cost(Homes(inside | kept, streamed=self.streamed(inside | kept)))

        return plan_margin(chunks, candidates, cost_of, name, least)

    def _least_in_margin(self, candidates: Sequence[int], kept: frozenset[int], current: frozenset[int]) -> int | None:
        """How many candidates have to live in the margin so that the host has room for all else; ``None`` if too few.

        Chunks that live there now and are no candidates change places with others, for which some of the host is free.
        """
        exchanged = [self.nbytes[index].host_nbytes for index in current.difference(candidates)]
        need = self._on_host(kept) + self.host_workspace_nbytes
        left = need - self.host_nbytes_for_chunks + 2 * max(exchanged, default=0)
        for count, index in enumerate([*candidates, None]):
            if left <= 0:
                return count
            left -= 0 if index is None else self.nbytes[index].host_nbytes
        return None

    def _may_stay(self, current: frozenset[int], kept: frozenset[int]) -> bool:
        """Whether the host needs that chunks live on the device, and those that do are enough, and have room."""
        room = self.host_nbytes_for_chunks - self.host_workspace_nbytes
        return self._on_host(kept | current) <= room < self._on_host(kept) and self.room_beside(kept | current) >= 0

    def room_beside(self, at_home: frozenset[int]) -> int:
        """Bytes of the device that no moment of the traces needs, if these chunks are at home there.

        Args:
            at_home: Chunks that are at home on the device.
        """
        needs = self._needs(at_home, self.unusable_nbytes)
        return self.device_nbytes - self._fixed_nbytes(at_home) - max((nbytes for nbytes, _ in needs), default=0)

    def fullest(self, at_home: frozenset[int]) -> tuple[int, int]:
        """Bytes of non-model data, and of chunks, on the device at the moment that needs most.

        Args:
            at_home: Chunks that are at home on the device.
        """
        nbytes, in_use = max(self._needs(at_home, 0), key=operator.itemgetter(0))
        chunks = sum(self.traces[0].chunk_nbytes[index] for index in in_use)
        return nbytes - chunks, chunks + self._fixed_nbytes(at_home)

    def host_room_beside(self, at_home: frozenset[int]) -> int:
        """Bytes of the host that neither activations nor chunks take, if these chunks are at home on the device.

        Args:
            at_home: Chunks that are at home on the device.
        """
        updates = any(chunk.state_nbytes for chunk in self.nbytes if chunk.chunk_index not in at_home)
        return self.host_nbytes_for_chunks - self._on_host(at_home) - (self.host_workspace_nbytes if updates else 0)

    def _on_host(self, at_home: frozenset[int]) -> int:
        """Bytes of the host that chunks take, if these are at home on the device."""
        return sum(chunk.host_nbytes for chunk in self.nbytes if chunk.chunk_index not in at_home)

    # Decisions

    def first(self, homes: Homes) -> Homes:
        """Decides where chunks are allocated, now that it is known what a step takes.

        Args:
            homes: What was decided before.

        Raises:
            BudgetError: As for ``spilled``.
        """
        leaves = any(trace.num_offloaded for trace in self.traces)
        if not self.has_training or not (homes.margin or leaves or homes.disk or self.on_disk):
            return homes
        kept, reasons = homes.kept, homes.reasons
        found = self.spilled(kept)
        if leaves and kept and self.moves_homes and self.room_beside(kept | found) < 0:
            # A first step without a plan would not let activations leave.
            reasons, kept = {FIRST_HOMES: _left_device(len(kept))}, frozenset()
            found = self.spilled(kept)
        device = kept | found
        disk = self.on_disk - device
        if (device, disk) == (homes.device, homes.disk):
            return homes
        return Homes(device, tuple(sorted(found)), reasons, disk=disk)

    def settled(self, homes: Homes, *, may_leave: bool = True) -> Homes:
        """Decides where chunks live, and are updated, from now on; see ``_settled``."""
        found = self._settled(homes, may_leave=may_leave)
        if self.updates != "auto" or not self.overlaps_update:
            return found
        why, faster = "nothing is faster over the bus", dataclasses.replace(self, updates="faster")
        before = self.cost(found) if faster.streamed(found.device) else None
        for part in TILE_PARTS if before else ():
            workspace, better, after = self.workspace_nbytes + self.slots_nbytes[part], found, None
            with contextlib.suppress(BudgetError):
                faster = dataclasses.replace(faster, workspace_nbytes=workspace)
                better = dataclasses.replace(faster._settled(homes, may_leave=may_leave), tile_part=part)
                after = faster.cost(better)
            if before and after and after.duration_ns * AS_FAST < before.duration_ns:
                found, why = better, f"a step takes {after.seconds / before.seconds:.2f} of the time without the bus"
                break
        return dataclasses.replace(found, reasons={**found.reasons, **self._describe_updates(found, why)})

    def _describe_updates(self, homes: Homes, why: str) -> dict[str, str]:
        total = sum(work.own_numel for work in self.works)
        there, over_bus, disk = (
            sum(self.works[index].own_numel for index in indices) / max(total, 1)
            for indices in (homes.device, homes.streamed - homes.disk, homes.disk)
        )
        shares = {"resident": there, "on the host": 1 - there - over_bus - disk, "over the bus": over_bus}
        shares["from the disk, on the device" if homes.streamed & homes.disk else "from the disk, on the host"] = disk
        said = ", ".join(f"{share:.0%} {place}".replace("%", " %") for place, share in shares.items() if share > 0)
        return {"updates": f"updates: {said}: {why} by the rates of '{self.machine.name}'"} if there < 1 else {}

    def streamed(self, at_home: frozenset[int]) -> frozenset[int]:
        """Chunks that are updated on the device, though they are at home on the host.

        In the order of the next forward, each goes to whichever would be done with it first: the host, or the bus.

        Args:
            at_home: Chunks that are at home on the device.
        """
        if self.updates not in ("device", "faster"):
            return frozenset()
        works, found = self.works, set[int]()
        own = [(index, work) for index, work in enumerate(works) if work.optimizer_index in self.streaming]
        moving = frozenset(index for index, work in own if work.own_numel and work.may_move) - at_home
        if self.updates == "device":
            return moving
        loads = self.loads(at_home, moving)
        visited = {index for trace in self.traces if trace.kind.is_training for index in trace.visited}
        on_host = on_bus = 0
        disk, updating = moving & self.on_disk, [work.update_nbytes * work.own_numel for work in works]
        host_ns = self.machine.host_ns(0, sum(updating[index] for index in disk))
        if host_ns > self.machine.disk_ns(2 * sum(self.nbytes[index].disk_nbytes for index in disk)):
            found |= disk  # all of them, whose tiles are in one ring
        for index in in_order(moving - disk, self.traces):
            host = on_host + self.machine.host_ns(0, updating[index])
            bus = on_bus + streaming_ns(loads[index], self.machine, works[index].update_nbytes)
            if index in visited and bus < host:
                on_bus = bus
                found.add(index)
            else:
                on_host, on_bus = host, on_bus + self.machine.copy_ns(loads[index].nbytes, to_device=True)
        return frozenset(found)

    def _settled(self, homes: Homes, *, may_leave: bool) -> Homes:
        """Decides where chunks live from now on.

        Where a step has no room beside those that are on the device, all leave that the host has room for; then the
        margin is filled.

        Args:
            homes: Where they live now.
            may_leave: Whether those may leave that have been on the device from the start. A step that has run had room
                beside them, whatever the traces of others say.

        Raises:
            BudgetError: As for ``spilled``.
        """
        if not self.moves_homes:
            return dataclasses.replace(homes, reasons={}, streamed=self.streamed(homes.device))
        kept, reasons = self._staying(homes) if may_leave else homes.kept, {}
        if kept != homes.kept:
            reasons["homes"] = _left_device(len(homes.kept))
        found = self.margin(kept, frozenset(homes.margin))
        margin = homes.margin
        if found is not None:
            margin, reasons["margin"] = found
        device = kept.union(margin)
        return Homes(device, margin, reasons, self.streamed(device), disk=self.on_disk - device)

    def choose_offload(self, homes: Homes, *, are_made: bool) -> tuple[int, int, str]:
        """Decides how many activations leave the device between forward and backward.

        Args:
            homes: Where chunks live.
            are_made: Whether they live there already; else what leaves decides where they are allocated.

        Returns:
            How many of each micro-batch of training leave, how many may, and why, as a clause.
        """
        begun = functools.cache(functools.partial(self._begun, homes, are_made=are_made))

        def cost_of(num: int) -> StepCost | None:
            if (found := begun(num)) is None:
                return None
            leaving, first = found
            return leaving.cost(leaving.settled(first))

        def fits(num: int) -> bool:
            return begun(num) is not None

        num, why = choose_offload(self.offload, self.num_can_leave, cost_of, fits)
        return num, (most_that_fit(num, self.num_can_leave, fits) if self.has_groups else num), why

    def _begun(self, homes: Homes, num: int, *, are_made: bool) -> "tuple[Estimate, Homes] | None":
        """What a step begins with if so many activations leave; ``None`` if it has no room then."""
        leaving = self.offloading(num).with_disk(homes, are_made=are_made)
        found = leaving.homes_with_room(homes, are_made=are_made)
        return None if found is None else (leaving, found)

    def homes_with_room(self, homes: Homes, *, are_made: bool = False) -> Homes | None:
        """Homes that a step begins with, of which those leave the device that may if it has no room beside them.

        Args:
            homes: See ``choose_offload``.
            are_made: Likewise.

        Returns:
            The homes; ``None`` if the step has no room however chunks are placed.
        """
        try:
            found = homes if are_made else self.first(homes)
            device = found.device
            if not self.moves_homes:
                return found if self.room_beside(device) >= 0 and self.host_room_beside(device) >= 0 else None
            kept = self._staying(found)
            return found if self.room_beside(kept | self.spilled(kept)) >= 0 else None
        except BudgetError:
            return None

    def with_least_offload(self, homes: Homes) -> "tuple[Estimate, Homes] | None":
        """The fewest activations that leave, and the first homes, with which a step has room; ``None`` without any.

        Args:
            homes: What was decided before a step was known.
        """
        begun = functools.cache(functools.partial(self._begun, homes, are_made=False))
        most = 0 if self.offload is False else self.num_can_leave
        num = 0 if begun(0) is not None else least_that_fit(most, lambda num: begun(num) is not None)
        return None if num is None else begun(num)

    def _staying(self, homes: Homes) -> frozenset[int]:
        """Chunks that stay on the device whatever happens: none if a step has no room beside all that are there."""
        kept = homes.kept
        return kept if not kept or self.room_beside(homes.device) >= 0 else frozenset()

    def cost_when_settled(self, homes: Homes) -> StepCost | None:
        """What a step will cost when homes are settled; ``None`` if that is not known.

        Without traces nothing is known of the inputs, and without lanes no machine's rates tell what a step takes.

        Args:
            homes: Where chunks live before.
        """
        if not self.has_lanes or not self.has_training:
            return None
        with contextlib.suppress(BudgetError):  # the inputs may be smaller than those that were planned
            homes = self.settled(homes)
        return self.cost(homes)

    def cost(self, homes: Homes) -> StepCost | None:
        """What one step of each bucket of inputs costs.

        Args:
            homes: Where chunks live and are updated.

        Returns:
            The sum over all buckets, or ``None`` if a step has no room.
        """
        at_home, streamed = homes.device, homes.streamed
        fixed = self._fixed_nbytes(at_home)
        free = self.device_nbytes - fixed
        most = None if self.chunk_nbytes is None else self.chunk_nbytes - fixed
        loads = self.loads(at_home, streamed, homes.tile_part)
        static = frozenset[int]() if self.has_groups else at_home
        steps = steps_of([trace for trace in self.traces if trace.kind.is_training], self.num_micro_batches)
        duration_ns = moved = copying_ns = updating_ns = 0
        for traces in steps:
            try:
                plans = repeated_plans(
                    traces,
                    [chunkable_nbytes(trace, free, most) for trace in traces],
                    self.policy,
                    dropped_after=self.updated,
                    static=static,
                    prefetch_depth=self.prefetch_depth,
                    repetitions=1,
                )
            except BudgetError:
                return None
            disk = {index: 2 * self.nbytes[index].disk_nbytes for index in self.on_disk}
            script = estimate_script(traces, self.works, at_home, streamed, disk, overlaps_update=self.overlaps_update)
            timeline = replay(script, plans, loads, self.machine)
            duration_ns += timeline.duration_ns if self.has_lanes else sum(timeline.busy_ns().values())
            critical = timeline.critical_ns()
            copying_ns += sum(critical[lane] for lane in _COPYING)
            updating_ns += critical[Lane.HOST_WORK] + critical[Lane.DISK]
            loaded = (loads[index] for plan in plans for actions in plan.moments for index in actions.load)
            moved += sum(load.sent_nbytes + load.nbytes * (not load.is_here) for load in loaded)
            moved += sum(entry.nbytes for entry in script if isinstance(entry, Send))
            moved += sum(sum(load.states_nbytes) - load.nbytes for load in loads if load.states_nbytes)
            moved += 2 * sum(trace.offloaded_nbytes for trace in traces)
        return StepCost(duration_ns, moved, copying_ns, updating_ns, max(len(steps), 1))

    def loads(self, at_home: frozenset[int], streamed: frozenset[int], tile_part: int = 1) -> list[Load]:
        """What it takes to load each chunk.

        Args:
            at_home: Chunks that are at home on the device.
            streamed: Chunks that are updated when they are loaded.
            tile_part: See ``Homes``.
        """
        found, tile_numel = [], TILE_NUMEL // tile_part
        for index, (work, nbytes) in enumerate(zip(self.works, self.nbytes, strict=True)):
            states, num_tiles = tuple[int, ...](), 0
            if index in streamed - self.on_disk:  # what is in no parameter does not cross
                summed = work.summed_nbytes if self.num_micro_batches > 1 else 0
                lists, own = nbytes.state_nbytes - summed, work.own_numel / work.chunk_numel
                ways = lists + (summed or work.gradient_nbytes), lists + work.gradient_nbytes
                states, num_tiles = tuple(round(way * own) for way in ways), -(-work.own_numel // tile_numel)
            found.append(Load(work.gradient_nbytes, work.sent_nbytes, index in at_home, states, num_tiles))
        return found

    def _needs(self, at_home: frozenset[int], unusable_nbytes: int) -> list[tuple[int, frozenset[int]]]:
        """What the device must have room for; with several processes a chunk at home there needs a copy, too."""
        return needed_nbytes(self.traces, frozenset() if self.has_groups else at_home, unusable_nbytes)

    def _fixed_nbytes(self, at_home: frozenset[int]) -> int:
        """Bytes of the device that are no copies of chunks."""
        return self.workspace_nbytes + sum(self.nbytes[index].device_nbytes for index in at_home)


def _left_device(num_chunks: int) -> str:
    """What is said where so many chunks leave the device that were at home there from the start."""
    return f"{num_chunks} chunks left the device, where not everything fits after all: beside what else a step takes"
