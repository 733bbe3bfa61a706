"""Where tensors lie, in examples by hand; tests/property has laws of all layouts."""

import pytest
from support.spec_builders import make_modules, make_tensors, pack, placed

from hf_patrickstar.errors import ConfigError

LAYOUTS = {
    # Tensors, chunk size, settings -> chunk and offset of each, and elements of each chunk.
    "chunks are filled in model order": ((64, 64, 128, 64), 128, {}, [(0, 0), (0, 64), (1, 0), (2, 0)], [128, 128, 64]),
    "offsets are aligned": ((1, 65, 10), 256, {}, [(0, 0), (0, 64), (0, 192)], [256]),
    "a larger tensor is alone": ((64, 300, 64), 128, {}, [(0, 0), (1, 0), (0, 64)], [128, 320]),
    "an empty tensor": ((64, 0, 64), 128, {}, [(0, 0), (0, 64), (0, 64)], [128]),
    "nothing": ((), 64, {}, [], []),
    "a size is rounded up": ((64, 64), 100, {}, [(0, 0), (0, 64)], [128]),
    "frozen tensors apart": ((64,) * 4, 128, {"frozen": {1, 3}}, [(0, 0), (1, 0), (0, 64), (1, 64)], [128, 128]),
    "on the host": ((100, 64, 64), 256, {"on_host": {0, 2}}, [(0, 0), (1, 0), (2, 0)], [128, 64, 64]),
    # Two processes: offsets are in the group, whose second half belongs to the second process.
    "the first bin with room": (
        *((64, 64, 128, 64, 64), 192, {"world_size": 2}),
        *([(0, 0), (0, 64), (0, 192), (0, 128), (0, 320)], [384]),
    ),
    "the last group is cut and spread anew": (
        *((64, 192, 64), 1024, {"world_size": 2}, [(0, 192), (0, 0), (0, 256)], [384]),
    ),
    "a larger tensor makes larger bins": ((64, 320, 256), 128, {"world_size": 2}, [(0, 0), (0, 320), (0, 64)], [640]),
    "a tensor that is spread": ((64, 1000), 256, {"world_size": 4, "splits": True}, [(0, 0), (1, 0)], [256, 1024]),
}


@pytest.mark.parametrize(("numels", "chunk_numel", "settings", "places", "capacities"), LAYOUTS.values(), ids=LAYOUTS)
def test_places_of_tensors(numels, chunk_numel, settings, places, capacities):
    given = dict(settings)
    tensors = make_tensors(*numels, frozen=given.pop("frozen", ()))
    layout = pack(tensors, chunk_numel, frozenset(given.pop("on_host", ())), **given)
    assert placed(layout) == (places, capacities)
    assert layout.utilisation == (sum(numels) / sum(capacities) if capacities else 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_numel": 0}, "chunk_numel: expected a positive number of elements, got 0"),
        ({"world_size": -1}, "world_size: expected a positive number of processes, got -1"),
        ({"world_size": 2, "on_host": frozenset({0})}, "cpu_embedding: not supported with 2 processes"),
    ],
)
def test_what_cannot_be_packed_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        pack(make_tensors(64), **{"chunk_numel": 64, **settings})


def test_the_working_set_is_that_of_the_module_with_most_bytes_and_counts_each_chunk_once():
    layout, modules = pack(make_tensors(64, 64, 128), 128), make_modules((0, 1), (1, 2), (2,))
    assert layout.working_set_nbytes(modules) == (512, modules[1])
    assert layout.working_set_nbytes(modules[:1]) == (256, modules[0])
    never_moves = pack(make_tensors(640, 64), 64, on_host=frozenset({0}))
    assert never_moves.working_set_nbytes(make_modules((0,), (1,)))[0] == 128
    assert pack([], 64).working_set_nbytes([]) == (0, None)
