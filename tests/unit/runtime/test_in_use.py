"""Which chunks are in use at a recorded visit, and how many have to be asked for that."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.runtime.in_use import ChunksInUse
from hf_patrickstar.runtime.tracer import Tracer

pytestmark = pytest.mark.usefixtures("recorded")


class Asked:
    """A chunk that counts how often it is asked."""

    def __init__(self, index):
        self.spec = SimpleNamespace(index=index)
        self.is_held = False
        self.arrival = None
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
    return Tracer(
        [16] * 50, gauges, SimpleNamespace(agree_on_trace=lambda trace: trace, is_alone=True), lambda event: None
    )


@pytest.fixture
def values():
    return SimpleNamespace(num_looks=0)


@pytest.fixture
def in_use(chunks, tracer, values):
    return ChunksInUse(SimpleNamespace(computable=chunks), tracer, values)


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
    in_use.add(chunks[9])
    assert visit(tracer, in_use, chunks[1]) == [9]
    chunks[9].is_held = False
    assert visit(tracer, in_use, chunks[2]) == []


def test_a_gather_that_is_under_way_may_begin_later_to_look_into_its_chunk(chunks, tracer, in_use):
    tracer.begin("training")
    visit(tracer, in_use, chunks[0])
    chunks[9].arrival = object()
    in_use.add(chunks[9])
    assert visit(tracer, in_use, chunks[1]) == []
    chunks[9].is_held = True
    assert visit(tracer, in_use, chunks[2]) == [9]
    chunks[9].is_held, chunks[9].arrival = False, None
    assert visit(tracer, in_use, chunks[3]) == []


def test_all_are_asked_where_somebody_has_looked_into_a_chunk(chunks, tracer, in_use, values):
    tracer.begin("training")
    visit(tracer, in_use, chunks[0])
    chunks[9].is_held = True
    values.num_looks += 1
    assert visit(tracer, in_use, chunks[1]) == [9]
    num_asked = chunks[49].num_asked
    assert visit(tracer, in_use, chunks[2]) == [9]
    assert chunks[49].num_asked == num_asked


class Averages(nn.Module):
    """Moves some parameters towards others in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = (nn.ModuleList([nn.Linear(16, 16) for _ in range(6)]) for _ in range(2))
        self.slow.requires_grad_(False)

    def forward(self, x):
        for layer in (*self.slow, *self.fast):
            x = torch.tanh(layer(x))
        with torch.no_grad():
            for ours, theirs in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        for layer in self.slow:
            x = x + layer(x)
        return x.sum()


@pytest.mark.parametrize("settings", [{"device_budget": 2**20}, {}])
def test_no_chunk_that_is_in_use_is_missed_where_forward_writes_to_parameters(settings, monkeypatch):
    at_visit, seen = ChunksInUse.at_visit, []

    def compared(self, visited):
        every = [chunk for chunk in self._copies.computable if chunk is not visited and chunk.is_in_use]
        found = at_visit(self, visited)
        assert found == sorted(chunk.spec.index for chunk in every)
        seen.append(found)
        return found

    monkeypatch.setattr(ChunksInUse, "at_visit", compared)
    model = Averages()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    config = {"chunk_numel": 400, "host_budget": 2**24, **settings}
    engine = PatrickStarEngine(model, config, optimizer, device=torch.device("cpu"))
    for num_rows in (3, 5):
        model(torch.ones(num_rows, 16)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert any(seen)


def test_a_step_of_training_asks_all_once(monkeypatch):
    at_visit, places = ChunksInUse.at_visit, []

    def counted(self, visited):
        places.append(self._next != (*self._tracer.place, self._values.num_looks))
        return at_visit(self, visited)

    monkeypatch.setattr(ChunksInUse, "at_visit", counted)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    config = {"chunk_numel": 300, "placement": "host", "device_budget": 2**14, "host_budget": 2**24}
    optimizer = torch.optim.AdamW(model.parameters())
    engine = PatrickStarEngine(model, config, optimizer, device=torch.device("cpu"))
    for _ in range(2):
        model(torch.ones(3, 16)).sum().backward()
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert len(places) > 12
    assert sum(places) == engine.stats()["recorded_steps"] - 1, "beside that of the update, which visits nothing"
