from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    GradientStored,
    StepFinished,
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
}


def test_nothing_happened():
    assert summary_of() == NOTHING


def test_every_event_has_its_place():
    events = [
        (ChunkLoaded(0, 7), {"host_to_device_nbytes": 7, "chunk_loads": 1}),
        (ChunkLoaded(0, 7, ahead=True), {"host_to_device_nbytes": 7, "chunk_loads": 1, "prefetches": 1}),
        (ChunkRehomed(0, True, 7), {"chunk_moves": 1, "moved_home_to_device_nbytes": 7}),
        (ChunkRehomed(0, False, 7), {"chunk_moves": 1, "moved_home_to_host_nbytes": 7}),
        (ChunkEvicted(0, 7), {"chunk_evictions": 1}),
        (ChunkInvalidated(0, 7), {"chunk_invalidations": 1}),
        (GradientStored(0, 1, 7), {"device_to_host_nbytes": 7}),
        (ValueRestored(0, 1, 7), {"host_to_device_nbytes": 7}),
        (StepFinished(1, skipped=False), {"steps": 1}),
        (StepFinished(0, skipped=True), {"skipped_steps": 1}),
    ]
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
    ) == {
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
    }


def test_a_summary_is_a_snapshot():
    statistics = Statistics()
    before = statistics.summary()
    statistics.record(ChunkLoaded(0, 7))
    assert before == NOTHING
    assert statistics.summary()["chunk_loads"] == 1
