"""What ranks send each other, one by one, and what happens where data leads them down different branches."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from support import inside
from support.inside import recorded
from support.processes import Workers
from support.together import (
    alone,
    differences,
    engaged,
    heard,
    make_optimizer,
    on_one_rank,
    seed_of,
    train_as_alone,
    train_together,
)

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import CollectiveError

WIDTH = 8
SMALL = {"chunk_numel": WIDTH * WIDTH}
DROPPED = {**SMALL, "reshard_after_forward": True}


class Layer(torch.nn.Module):
    """As many weights as ranks, each as large as a chunk: a layer is a group."""

    def __init__(self, num):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(num))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Chain(torch.nn.Module):
    """Layers of which each rank takes those that ``route`` names at a step; where it names none, ``tell`` is called."""

    def __init__(self, num, depth, route=None):
        super().__init__()
        self.tell = lambda x: None
        self.layers = torch.nn.ModuleList(Layer(num) for _ in range(depth))
        self.route = route

    def forward(self, x, step=0, rank=0):
        for index in range(len(self.layers)) if self.route is None else self.route(step, rank):
            if index is None:
                self.tell(x)
            else:
                x = self.layers[index](x)
        return x


def make_chain(num, depth=3, route=None):
    torch.manual_seed(0)
    return Chain(num, depth, route)


def chain_loss(model, step, micro, rank):
    generator = torch.Generator().manual_seed(seed_of(step, micro, rank))
    return model(torch.randn(4, WIDTH, generator=generator), step, rank).square().mean()


class Recorder:
    """The collectives that this rank does, in order."""

    def __init__(self, monkeypatch):
        self.done = []
        original = getattr(*inside.DO_COLLECTIVES)

        def perform(groups, collectives):
            self.done += [(subject.name.lower(), index) for subject, index in collectives]
            original(groups, collectives)

        monkeypatch.setattr(*inside.DO_COLLECTIVES, perform)

    def take(self):
        done, self.done = self.done, []
        return done


def record(rank, config, num_frozen, steps, is_estimated=True):
    """The collectives, bytes and messages of every step."""
    world_size = dist.get_world_size()
    model = make_chain(world_size)
    for layer in model.layers[:num_frozen]:
        layer.requires_grad_(False)
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch, recorded(not is_estimated), engaged(model, config) as engine:
        recorder = Recorder(monkeypatch)
        before = engine.stats()
        for step in range(steps):
            train_together(engine, chain_loss, steps=1, first=step)
            stats = engine.stats()
            sent, counts = stats["sent_nbytes"] - before["sent_nbytes"], recorder.take()
            assert stats["all_gathers"] - before["all_gathers"] == sum(kind == "gather" for kind, _ in counts)
            assert stats["reduce_scatters"] - before["reduce_scatters"] == sum(kind == "reduce" for kind, _ in counts)
            found.append((counts, sent, stats["diverged_steps"]))
            before = stats
        assert stats["recorded_steps"] == (0 if is_estimated else 2)  # of training and of the optimizer
    return found


RECORDED = [("gather", 0), ("gather", 1), ("gather", 2), ("reduce", 2), ("reduce", 1), ("reduce", 0)]
ON_DEMAND = [
    *[("gather", 0), ("gather", 1), ("gather", 2)],
    *[("gather", 2), ("reduce", 2), ("gather", 1), ("reduce", 1), ("gather", 0), ("reduce", 0)],
]


@pytest.mark.parametrize(("num", "is_estimated"), [(2, True), (2, False), (4, True)])
def test_every_group_is_gathered_twice_and_reduced_once(num, is_estimated, request):
    workers = request.getfixturevalue({2: "pair", 4: "four"}[num])
    results = workers.run(record, {**DROPPED, "prefetch_depth": 0}, 0, 3, is_estimated)
    chunk_nbytes = 4 * WIDTH * WIDTH
    first = ON_DEMAND if is_estimated else RECORDED  # what is recorded keeps groups after forward
    for found in results:
        assert [counts for counts, _, _ in found] == [first, ON_DEMAND, ON_DEMAND]
        assert [sent for _, sent, _ in found] == [len(c) * (num - 1) * chunk_nbytes for c in (first, *[ON_DEMAND] * 2)]
        assert [lost for _, _, lost in found] == [0, 0, 0]


def test_prefetching_changes_the_order_and_no_number(pair):
    first, second = pair.run(record, DROPPED, 0, 3)
    assert first == second
    for counts, sent, _ in first:
        assert sorted(counts) == sorted(ON_DEMAND)
        assert counts != ON_DEMAND
        assert sent == 9 * 4 * WIDTH * WIDTH


FROZEN = [("gather", 0), ("gather", 1), ("gather", 2), ("gather", 2), ("reduce", 2)]


@pytest.mark.parametrize(
    ("config", "num_frozen", "expected"),
    [
        (SMALL, 0, RECORDED),
        ({**DROPPED, "debug_collectives": True}, 0, ON_DEMAND),
        (DROPPED, 2, FROZEN),  # of the first two layers nothing is computed in backward
    ],
    ids=["what stays is gathered once", "agreeing on everything", "frozen groups are never reduced"],
)
def test_collectives_of_a_step(pair, config, num_frozen, expected):
    for found in pair.run(record, {**config, "prefetch_depth": 0}, num_frozen, 2):
        assert [counts for counts, _, _ in found] == [expected] * 2


# Branches


def by_parity(step, rank):
    return [0, 1 + (rank + step) % 2, 3]


def at_random(step, rank):
    generator = torch.Generator().manual_seed(31 * step + rank)
    kept = [index for index in range(4) if torch.rand((), generator=generator) < 0.6]
    return kept or [rank % 4]


def one_twice(step, rank):
    return [0, 1, 1, 2, 3] if (rank + step) % 3 == 1 else [0, 1, 2, 3]


def only_on_rank_one(step, rank):
    return [0, 1, 2, 3] if rank == 1 else [0, 3]


def never_the_second(step, rank):
    return [0, 2, 3]


def once_less(step, rank):
    return [0, None, 1, 2, None, 3] if rank == 0 or step != 2 else [0, None, 1, None, 3]


def one_less(step, rank):
    return [0, 1, 2, None, 3] if rank == 0 else [0, 1, None, 3]


ROUTES = {
    route.__name__: route
    for route in (once_less, one_less, by_parity, at_random, one_twice, only_on_rank_one, never_the_second)
}


def gather(x):
    """A collective of the user."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())


def gather_beside(x):
    work = dist.all_reduce(x.detach().clone(), async_op=True)
    work.wait()


def gather_in_backward(x):
    x.register_hook(gather)


def branch(rank, config, route, steps, kwargs, tolerance=0.0):
    world_size = dist.get_world_size()
    expected = on_one_rank(
        lambda: alone(lambda: make_chain(2, 4, ROUTES[route]), chain_loss, world_size, steps=steps, **kwargs)
    )
    model = make_chain(2, 4, ROUTES[route])
    model.tell = gather
    with engaged(model, config, accumulation=kwargs.get("accumulation", 1)) as engine:
        if tolerance:
            train_together(engine, chain_loss, steps, **kwargs)
            assert max(differences(expected[0], model.state_dict()).values(), default=0.0) <= tolerance
        else:
            train_as_alone(engine, expected, chain_loss, steps=steps, **kwargs)
        return engine.stats()["diverged_steps"], len(engine.optimizer.state_dict()["state"])


CONFIGS = {
    "staying": SMALL,
    "dropped": DROPPED,
    "bounded": {**SMALL, "chunk_budget": 4 * WIDTH * WIDTH * 2 * 9},  # 4 groups, gradients of as many, and a reduction
    "large_groups": {"chunk_numel": 3 * WIDTH * WIDTH, "reshard_after_forward": True},
    "evicting": {**SMALL, "debug_evict_all": True},
    "agreeing": {**DROPPED, "debug_collectives": True},
    "ahead": {**SMALL, "prefetch_depth": 1},  # one rank gathers before a collective of the user, and one after it
}


@pytest.mark.parametrize(
    ("route", "config"),
    [
        ("by_parity", "staying"),
        ("by_parity", "large_groups"),
        ("at_random", "dropped"),
        ("at_random", "bounded"),
        ("one_twice", "evicting"),
        ("one_twice", "large_groups"),
        ("only_on_rank_one", "agreeing"),
        ("only_on_rank_one", "bounded"),
        ("never_the_second", "dropped"),
        ("once_less", "ahead"),
    ],
)
def test_branches_of_two(pair, route, config):
    results = pair.run(branch, CONFIGS[config], route, 6, {"max_norm": 0.01})
    num_states = 6 if route == "never_the_second" else 8
    assert [found for _, found in results] == [num_states] * 2
    # In large groups the layers of either branch are the same ones.
    is_same = route == "never_the_second" or (route, config) == ("by_parity", "large_groups")
    assert (max(lost for lost, _ in results) == 0) == is_same


def test_branches_of_four(four):
    # A gradient that comes late is added after those of later ranks.
    four.run(branch, DROPPED, "at_random", 5, {}, 1e-5)


def test_branches_in_micro_batches(pair):
    # A gradient that comes late is added to the sum on its own, after half of the other rank's.
    pair.run(branch, DROPPED, "only_on_rank_one", 4, {"accumulation": 2, "max_norm": 0.01}, 1e-5)


# Collectives of the user, to which only a rank comes that waits for nobody

WAIT_S = 1.5


def get_stuck(rank, route, tell):
    model = make_chain(2, 4, ROUTES[route])
    model.tell = tell
    config = {**SMALL, "process_wait_s": WAIT_S, "prefetch_depth": 0}
    engine = PatrickStarEngine(model, config, make_optimizer(model), device="cpu")
    assert engine.collectives.world_size == dist.get_world_size() > 1
    begin = time.monotonic()
    with heard() as texts, pytest.raises(RuntimeError) as caught:
        train_together(engine, chain_loss, 4)
    is_ours = isinstance(caught.value, CollectiveError)
    return str(caught.value) if is_ours else texts[-1], is_ours, time.monotonic() - begin


@pytest.mark.parametrize(
    ("route", "tell", "waits", "line"),
    [
        ("one_less", gather, r"needs group 2 \(gather\) for ", "gather: dist.all_gather(parts, x.detach())"),
        ("once_less", gather_beside, "gathers group 2", "gather_beside: work.wait()"),
        ("once_less", gather_in_backward, r"reduces group \d", "gather: dist.all_gather(parts, x.detach())"),
    ],
)
def test_each_waits_for_the_other_and_both_places_are_named(route, tell, waits, line):
    """Without an end of its own; the first waits for a message, the second for data, and the third is blocked."""
    with Workers(2) as workers:
        (first, is_ours, seconds), (second, is_others, _) = workers.run(get_stuck, route, tell, timeout=50)
    assert (is_ours, is_others) == (True, False)
    assert seconds < 30, "the timeout of the process group is 60 s"
    place = rf"rank 1 is in a collective at \S+test_branches.py:\d+ in {re.escape(line)}\. Each waits for the other: "
    for text in (first, second):
        assert re.search(rf"rank 0 gave up after \d+ s: it {waits}.*rank 1 has not come; {place}", text), text
