import typing

from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    ChunkVisited,
    Event,
    GradientStored,
    MessageExchanged,
    MicroBatchRepeated,
    ModelDecided,
    SlicesGathered,
    SlicesReduced,
    StepDiverged,
    StepFinished,
    StepRecorded,
    ValueRestored,
)
from hf_patrickstar.report.statistics import Statistics


def summary_of(*events):
    statistics = Statistics()
    for event in events:
        statistics.record(event)
    return statistics.summary()


NOTHING = {
    "host_to_device_nbytes": 0,
    "device_to_host_nbytes": 0,
    "chunk_loads": 0,
    "prefetches": 0,
    "chunk_evictions": 0,
    "chunk_invalidations": 0,
    "chunk_moves": 0,
    "moved_home_to_device_nbytes": 0,
    "moved_home_to_host_nbytes": 0,
    "steps": 0,
    "skipped_steps": 0,
    "diverged_steps": 0,
    "recorded_steps": 0,
    "chunk_hits": 0,
    "late_prefetches": 0,
    "waiting_seconds": 0,
    "loading_seconds": 0,
    "retries": 0,
    "all_gathers": 0,
    "reduce_scatters": 0,
    "sent_nbytes": 0,
    "messages": 0,
}


def test_nothing_happened():
    assert summary_of() == NOTHING


def test_every_event_has_its_place():
    events = [
        (ModelDecided("124 M parameters"), {}),
        (ChunkLoaded(0, 7, waited_s=0.5), {"host_to_device_nbytes": 7, "chunk_loads": 1, "loading_seconds": 0.5}),
        (ChunkLoaded(0, 7), {"host_to_device_nbytes": 7, "chunk_loads": 1}),
        (ChunkLoaded(0, 7, ahead=True), {"host_to_device_nbytes": 7, "chunk_loads": 1, "prefetches": 1}),
        (ChunkRehomed(0, True, 7), {"chunk_moves": 1, "moved_home_to_device_nbytes": 7}),
        (ChunkRehomed(0, False, 7), {"chunk_moves": 1, "moved_home_to_host_nbytes": 7}),
        (ChunkEvicted(0, 7), {"chunk_evictions": 1}),
        (ChunkInvalidated(0, 7), {"chunk_invalidations": 1}),
        (GradientStored(0, 1, 7), {"device_to_host_nbytes": 7}),
        (ValueRestored(0, 1, 7), {"host_to_device_nbytes": 7}),
        (ChunkVisited(0, True), {"chunk_hits": 1}),
        (ChunkVisited(0, False), {}),
        (ChunkVisited(0, False, 0.5), {"late_prefetches": 1, "waiting_seconds": 0.5}),
        (ChunkVisited(0, False, 0.0), {"late_prefetches": 1}),
        (StepFinished(1, skipped=False), {"steps": 1}),
        (StepFinished(0, skipped=True), {"skipped_steps": 1}),
        (StepRecorded("training"), {"recorded_steps": 1}),
        (StepDiverged("training"), {"diverged_steps": 1}),
        (MicroBatchRepeated(1), {"retries": 1}),
        (MicroBatchRepeated(1, is_defragmented=True), {"retries": 1}),
        (SlicesGathered(7), {"all_gathers": 1, "sent_nbytes": 7}),
        (SlicesReduced(7), {"reduce_scatters": 1, "sent_nbytes": 7}),
        (MessageExchanged(), {"messages": 1}),
    ]
    assert {type(event) for event, _ in events} == set(typing.get_args(Event))
    for event, expected in events:
        assert summary_of(event) == NOTHING | expected, event


def test_a_step():
    assert summary_of(
        ChunkLoaded(0, 100),
        ChunkLoaded(1, 50),
        ChunkEvicted(0, 100),
        ChunkLoaded(0, 100, ahead=True),
        GradientStored(0, 0, 60),
        GradientStored(0, 1, 0),
        ValueRestored(0, 0, 30),
        ChunkInvalidated(0, 100),
        ChunkRehomed(1, True, 400),
        StepFinished(1, skipped=False),
        StepFinished(1, skipped=True),
        StepFinished(2, skipped=False),
        ChunkVisited(0, False, 0.5),
        ChunkVisited(1, False, 0.25),
        SlicesGathered(20),
        SlicesReduced(3),
    ) == NOTHING | {
        "host_to_device_nbytes": 280,
        "device_to_host_nbytes": 60,
        "chunk_loads": 3,
        "prefetches": 1,
        "chunk_evictions": 1,
        "chunk_invalidations": 1,
        "chunk_moves": 1,
        "moved_home_to_device_nbytes": 400,
        "moved_home_to_host_nbytes": 0,
        "steps": 2,
        "skipped_steps": 1,
        "late_prefetches": 2,
        "waiting_seconds": 0.75,
        "all_gathers": 1,
        "reduce_scatters": 1,
        "sent_nbytes": 23,
    }


def test_a_summary_is_a_snapshot():
    statistics = Statistics()
    before = statistics.summary()
    statistics.record(ChunkLoaded(0, 7))
    assert before == NOTHING
    assert statistics.summary()["chunk_loads"] == 1
