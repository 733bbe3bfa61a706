"""Which chunks are in use at a recorded visit, and how many have to be asked for that."""

from types import SimpleNamespace

import pytest

from hf_patrickstar.runtime.in_use import ChunksInUse
from hf_patrickstar.runtime.tracer import Tracer


class Asked:
    """A chunk that counts how often it is asked."""

    def __init__(self, index):
        self.spec = SimpleNamespace(index=index)
        self.is_held = False
        self.num_asked = 0

    @property
    def is_in_use(self):
        self.num_asked += 1
        return self.is_held


@pytest.fixture
def chunks():
    return [Asked(index) for index in range(50)]


@pytest.fixture
def tracer():
    gauges = SimpleNamespace(take_non_model_peak=lambda: 0, take_gradient_peak=lambda: 0)
    return Tracer([16] * 50, gauges, SimpleNamespace(agree_on_trace=lambda trace: trace), lambda event: None)


@pytest.fixture
def in_use(chunks, tracer):
    return ChunksInUse(SimpleNamespace(computable=chunks), tracer)


def visit(tracer, in_use, chunk):
    tracer.visit(chunk.spec.index, in_use.at_visit, chunk)
    return list(tracer.step.visits[-1][1])


def test_a_chunk_that_was_visited_is_in_use_until_nobody_holds_it(chunks, tracer, in_use):
    tracer.begin("training")
    visit(tracer, in_use, chunks[3])
    chunks[3].is_held = True
    assert visit(tracer, in_use, chunks[5]) == [3]
    chunks[5].is_held = True
    assert visit(tracer, in_use, chunks[1]) == [3, 5]
    assert visit(tracer, in_use, chunks[5]) == [3], "all others, that is"
    chunks[3].is_held = False
    assert visit(tracer, in_use, chunks[2]) == [5]
    chunks[5].is_held = False
    assert visit(tracer, in_use, chunks[3]) == []


def test_only_the_first_visit_of_a_step_asks_all(chunks, tracer, in_use):
    chunks[7].is_held = chunks[40].is_held = True
    tracer.begin("training")
    assert visit(tracer, in_use, chunks[0]) == [7, 40], "as somebody held them before"
    assert all(chunk.num_asked == 1 for chunk in chunks[1:])
    for number in range(1, 30):
        assert visit(tracer, in_use, chunks[number]) == sorted({7, 40} - {number})
    assert sum(chunk.num_asked for chunk in chunks) < 49 + 3 * 29
    assert chunks[49].num_asked == 1


@pytest.mark.parametrize("is_nested", [False, True])
def test_another_step_asks_all_again(is_nested, chunks, tracer, in_use):
    tracer.begin("training")
    visit(tracer, in_use, chunks[0])
    if is_nested:
        tracer.begin_nested_evaluation("evaluation", ())
        chunks[9].is_held = True  # nobody has to be told of its visit
        tracer.end_nested_evaluation()
    else:
        chunks[9].is_held = True
        tracer.begin("training")
    assert visit(tracer, in_use, chunks[1]) == [9]


def test_a_chunk_that_is_gathered_for_others_is_asked(chunks, tracer, in_use):
    tracer.begin("training")
    visit(tracer, in_use, chunks[0])
    chunks[9].is_held = True
    in_use.note(chunks[9])
    assert visit(tracer, in_use, chunks[1]) == [9]
    chunks[9].is_held = False
    assert visit(tracer, in_use, chunks[2]) == []
