import json

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.schedule.trace import Trace, Visit, input_shapes, trace_key


def make_trace(shapes=(), visits=()):
    return Trace("t", (8, 8, 8), visits, (shapes,))


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ([1], 1),
        ([2], 2),
        ([3], 3),
        ([4], 4),
        ([5, 6], 6),
        ([7, 8], 8),
        ([9, 10, 11, 12], 12),
        ([13, 16], 16),
        ([17, 24], 24),
        ([25, 32], 32),
        ([385, 512], 512),
        ([513, 768], 768),
    ],
)
def test_sizes_are_rounded_up_to_buckets(sizes, bucket):
    assert {trace_key("training", ((size,),)) for size in sizes} == {f"training/{bucket}"}


def test_a_bucket_holds_no_more_than_half_as_much_again():
    for size in range(1, 2000):
        bucket = int(trace_key("t", ((size,),)).removeprefix("t/"))
        assert size <= bucket
        assert bucket == size or 2 * bucket < 3 * size + 2


@pytest.mark.parametrize(
    ("shapes", "key"),
    [
        ((), "evaluation"),
        (((5, 9),), "evaluation/6x12"),
        (((5, 9), (5, 9), (6, 12)), "evaluation/6x12"),
        (((5, 9), (5, 3)), "evaluation/6x12,6x3"),
        (((5, 3), (5, 9)), "evaluation/6x3,6x12"),
        (((0,),), "evaluation/1"),
    ],
)
def test_a_key_names_the_kind_and_every_bucket_once(shapes, key):
    assert trace_key("evaluation", shapes) == key


@pytest.mark.parametrize(
    ("shapes", "is_covered"),
    [
        (((4, 10), (4,)), True),
        (((3, 10), (2,)), True),
        (((1, 1), (1,)), True),
        (((5, 10), (4,)), False),
        (((4, 11), (4,)), False),
        (((3, 11), (4,)), False),
        (((4, 10), (5,)), False),
        (((4, 10),), False),
        (((4, 10), (4,), (4,)), False),
        (((4, 10), (4, 1)), False),
        (((4,), (4, 10)), False),
        ((), False),
    ],
)
def test_a_trace_covers_inputs_that_are_no_larger_in_any_size(shapes, is_covered):
    assert make_trace(((4, 10), (4,))).covers(shapes) == is_covered


def test_a_trace_without_shapes_covers_only_steps_without():
    assert make_trace().covers(())
    assert not make_trace().covers(((1,),))


def test_the_most_that_others_ever_took():
    assert make_trace(visits=(Visit(0, (), 5), Visit(1, (), 9), Visit(0, (), 7))).non_model_peak_nbytes == 9
    assert make_trace().non_model_peak_nbytes == 0


def test_shapes_of_tensors_become_plain_numbers():
    assert input_shapes([[4, 10], (True,)]) == ((4, 10), (1,))


def test_there_and_back_as_json():
    trace = Trace(
        "training/4x12", (8, 0, 2**40), (Visit(2, (0, 1), 2**33), Visit(0), Visit(1, (), 7)), (((4, 11), ()),)
    )
    text = trace.to_json()
    assert json.loads(text) == {
        "key": "training/4x12",
        "chunk_nbytes": [8, 0, 2**40],
        "shapes": [[[4, 11], []]],
        "visits": [[2, 2**33, 0, 1], [0, 0], [1, 7]],
    }
    assert Trace.from_json(text) == trace


def test_a_trace_of_nothing_as_json():
    assert Trace.from_json(Trace("t", (), ()).to_json()) == Trace("t", (), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"visits": [[]]}, "this is not a trace: IndexError"),
        ({"visits": [[0]]}, "this is not a trace: IndexError"),
        ({"visits": [0]}, "this is not a trace: TypeError"),
        ({"visits": [[0, "many"]]}, "this is not a trace: ValueError"),
        ({"shapes": None}, "this is not a trace: TypeError"),
        ({"visits": [[0, 0], [1, 0]]}, "trace 't', moment 1: chunk 1 of 1"),
        ({"visits": [[0, 0, -1]]}, "trace 't', moment 0: chunk -1 of 1"),
        ({"visits": [[0, 0, 0, 1]]}, "trace 't', moment 0: chunk 1 of 1"),
    ],
)
def test_bad_values(change, message):
    text = json.dumps({"key": "t", "chunk_nbytes": [1], "shapes": [], "visits": [[0, 0]]} | change)
    if message is None:
        Trace.from_json(text)
        return
    with pytest.raises(ConfigError, match=message):
        Trace.from_json(text)


@pytest.mark.parametrize("text", ["nonsense", "[]", "7", '{"key": "t", "chunk_nbytes": [1], "visits": []}'])
def test_bad_text(text):
    with pytest.raises(ConfigError, match="this is not a trace"):
        Trace.from_json(text)
