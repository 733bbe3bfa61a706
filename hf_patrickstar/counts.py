"""What an engine counts, as plain numbers: the runtime adds to them, logs and pages show them."""

import dataclasses
import time


@dataclasses.dataclass
class Counts:
    """What one engine has done since it was made.

    Attributes:
        host_to_device_nbytes: Bytes of parameters and activations that were copied to the device.
        device_to_host_nbytes: Bytes of gradients and activations that were copied to the host.
        chunk_visits: How often a chunk was needed on the device, in a model whose chunks move.
        chunk_loads: How often a chunk was copied to the device.
        chunk_evictions: How often a copy was dropped for want of room.
        chunk_invalidations: How often a copy was dropped because the optimizer had changed its home.
        chunk_hits: Visits to a chunk that moves and was there already, so that nobody had to wait for it.
        prefetches: Loads that were started before the chunk was needed.
        late_prefetches: Those of them that had not arrived when the chunk was needed.
        waiting_seconds: How long the host waited for late prefetches.
        loading_seconds: How long the host was busy with loads that had not been started ahead.
        computing_seconds: Seconds of the host from the begin of an outermost forward of training to the end of its
            backward.
        settling_seconds: Seconds from there to the begin of the optimizer's step.
        updating_seconds: Seconds of steps of optimizers.
        chunk_moves: How often a chunk moved its home.
        moved_home_to_device_nbytes: Bytes, of all lists, of chunks that moved their home to the device.
        moved_home_to_host_nbytes: The same for moves to the host.
        offloaded_nbytes: Bytes of activations that left the device.
        disk_read_nbytes: Bytes of masters and optimizer states that updates read from the disk.
        disk_written_nbytes: Those that they wrote there.
        disk_seconds: Seconds in which they did so.
        all_gathers: All-gathers of parameters.
        reduce_scatters: Reduce-scatters of gradients.
        sent_nbytes: Bytes that this process sent in both: one slice to every other process, as many as in a ring.
        messages: Short messages in which processes agree.
        steps: Steps of optimizers.
        skipped_steps: Steps that were dropped because gradients had overflowed.
        recorded_steps: Steps that were recorded.
        diverged_steps: Steps that differed from their trace, and went on without a plan.
        retries: Micro-batches that were repeated because the device had run out of memory.
        begun_s: When the engine was made, by ``time.perf_counter``; no count.
        log: If it is a list, what is done to chunks is appended in its order, each with the number of the chunk:
            ``visit``, ``load``, ``load ahead``, ``evict``, ``drop``, ``move home`` and ``gradient``, and ``step``
            with that of the step; no count.
    """

    host_to_device_nbytes: int = 0
    device_to_host_nbytes: int = 0
    chunk_visits: int = 0
    chunk_loads: int = 0
    chunk_evictions: int = 0
    chunk_invalidations: int = 0
    chunk_hits: int = 0
    prefetches: int = 0
    late_prefetches: int = 0
    waiting_seconds: float = 0
    loading_seconds: float = 0
    computing_seconds: float = 0
    settling_seconds: float = 0
    updating_seconds: float = 0
    chunk_moves: int = 0
    moved_home_to_device_nbytes: int = 0
    moved_home_to_host_nbytes: int = 0
    offloaded_nbytes: int = 0
    disk_read_nbytes: int = 0
    disk_written_nbytes: int = 0
    disk_seconds: float = 0
    all_gathers: int = 0
    reduce_scatters: int = 0
    sent_nbytes: int = 0
    messages: int = 0
    steps: int = 0
    skipped_steps: int = 0
    recorded_steps: int = 0
    diverged_steps: int = 0
    retries: int = 0

    def __post_init__(self) -> None:
        self.begun_s = time.perf_counter()
        self.log: list[tuple[str, int]] | None = None
