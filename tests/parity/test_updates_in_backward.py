"""``overlap_optimizer="backward"``: chunks are updated before ``step()`` is called, with the same bits.

What breaks the promise that this takes is an error, never a wrong number.
"""

import dataclasses
import logging
import tempfile

import pytest
import torch
from models import make_batch, make_model
from simulated import streams_of
from test_overlapped_updates import (
    CASES,
    OTHERS,
    STREAMS,
    Run,
    assert_same,
    groups,
    halves,
    momentum,
    outcome,
    tensor_rate,
    tight_budget,
)
from trainers import train

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError, DeviceMemoryError, EngineError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.runtime.copies import Copies

pytestmark = pytest.mark.own_streams


class UnclippedRun(Run):
    """Training without clipping; notes how many chunks backward has updated, and how many of them it brought back."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_ahead = []
        self.num_carried = []

    def note_updates(self):
        updated, copies = self.engine.manager.gradients.used_ahead, self.engine.manager.copies
        self.num_ahead.append(len(updated))
        self.num_carried.append(sum(chunk.spec.index in updated and not copies.is_stale(chunk) for chunk in copies))

    def step(self, seed=0, after=lambda run: None):
        self.backward(seed)
        self.note_updates()
        self.optimizer.step()
        after(self)
        self.optimizer.zero_grad()


def train_for(run, num=4):
    for seed in range(num):
        run.step(seed)


def norms(run):
    """As the Trainer asks for them where nothing is clipped."""
    for seed in range(4):
        for number in range(1, run.accumulation):
            run.backward(10 * number + seed)
        run.backward(seed)
        run.note_updates()
        run.keep(run.optimizer.clip_grad_norm_(None, float("inf")))
        run.optimizer.step()
        run.optimizer.zero_grad()


def rates(run):
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.3**step)
    for seed in range(4):
        run.step(seed, lambda run: scheduler.step())


def looks(run):
    """Everybody looks right after ``step()``."""
    for seed in range(4):
        run.step(seed, lambda run: run.keep(*run.model.state_dict().values()))
        run.keep_state(run.optimizer.state_dict())
        with torch.no_grad():
            run.keep(run.model(**make_batch(run.name, seed=9)).loss)


def micro_batches(run):
    for seed in range(4):
        run.backward(10 + seed)
        run.step(seed)


def looks_at_some(run):
    """Somebody writes to and looks at parameters whose copies may be on their way to the device."""
    for seed in range(5):
        run.step(seed)
        with torch.no_grad():
            for number, parameter in enumerate(run.model.parameters()):
                if number % 3 == seed % 3:
                    parameter.mul_(0.999)
                elif number % 3 == 1:
                    run.keep(parameter)


def trains_in_turns(run):
    """Evaluations and other batches between steps, so that plans begin with other chunks on the device."""
    for seed in range(6):
        run.step(seed)
        if seed % 2:
            with torch.no_grad():
                run.keep(run.model(**make_batch(run.name, seed=9)).loss)


def keeps_views(run):
    """Something looks into the copies of two chunks after backward has visited them, and writes to one of them."""
    views = {}

    def look(module, args, output):
        views[module] = module.weight.t().detach()

    for block in run.model.transformer.h[:2]:
        block.mlp.c_fc.register_forward_hook(look)
    for seed in range(6):
        run.backward(seed)
        run.note_updates()
        if seed % 3 == 2:
            next(iter(views.values())).mul_(0.9)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if seed % 2:
            views.clear()


UNCLIPPED = {
    "plain": (train_for, {}),
    "16-bit": (train_for, {"dtype": "bf16"}),
    "norms": (norms, {}),
    "norms in 16-bit": (norms, {"dtype": "bf16"}),
    "norms of micro-batches": (norms, {"accumulation": 2}),
    "norms of micro-batches in 16-bit": (norms, {"accumulation": 3, "dtype": "bf16"}),
    "groups": (rates, {"make_optimizer": groups}),
    "a rate that is a tensor": (rates, {"make_optimizer": tensor_rate}),
    "looks": (looks, {}),
    "momentum": (looks, {"make_optimizer": momentum}),
    "momentum, micro-batches in 16-bit": (
        micro_batches,
        {"make_optimizer": momentum, "accumulation": 2, "dtype": "bf16"},
    ),
    "momentum, groups": (rates, {"make_optimizer": halves}),
    "adafactor": (norms, {"make_optimizer": OTHERS["adafactor"], "dtype": "bf16"}),
    "micro-batches": (micro_batches, {"accumulation": 2}),
    "micro-batches in 16-bit": (micro_batches, {"accumulation": 2, "dtype": "bf16"}),
    "embeddings on the CPU": (train_for, {"cpu_embedding": True}),
    "embeddings on the CPU, micro-batches": (
        micro_batches,
        {"cpu_embedding": True, "accumulation": 2, "dtype": "bf16"},
    ),
    "another model": (train_for, {"name": "llama"}),
    "one that ties weights": (train_for, {"name": "t5"}),
    "views": (keeps_views, {"chunk_budget": 3 * tight_budget("gpt2")}),
    "copies that stay": (train_for, {"chunk_budget": 300_000}),
    "checkpointing": (train_for, {"checkpointing": True, "chunk_budget": 3 * tight_budget("gpt2")}),
}


SLOW_BUS = dataclasses.replace(MACHINES["rtx4090"], to_device_bandwidth=1e7)
"""By its rates many chunks are worth being carried over to the next step."""


FAST_BUS = dataclasses.replace(
    MACHINES["rtx4090"],
    to_device_bandwidth=1e12,
    copy_latency_s=1e-9,
    flops=dict.fromkeys(("float32", "bfloat16"), 1e9),
)
"""By its rates none is."""


@pytest.mark.parametrize(
    ("case", "settings"),
    [*UNCLIPPED.values(), (looks_at_some, {}), (trains_in_turns, {"dtype": "bf16"})],
    ids=[*UNCLIPPED, "writes", "turns"],
)
def test_the_bits_are_the_same_with_chunks_that_are_carried_over(case, settings):
    name = settings.get("name", "gpt2")
    settings = {"chunk_budget": 3 * tight_budget(name), "prefetch_depth": 1, **settings}
    expected, _ = unclipped("threads", case, overlap_optimizer=False, **settings)
    for streams in STREAMS[1:]:
        found, run = unclipped(streams, case, overlap_optimizer="backward", machine=SLOW_BUS, **settings)
        assert_same(expected, found)
        assert any(run.num_carried)


def test_a_copy_of_before_an_update_is_never_computed_with():
    """A program that breaks the promise and goes on has the values of after the step, in every copy."""
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward", chunk_budget=300_000, machine=FAST_BUS)
        train_for(run, 3)
        run.backward(3)
        copies = run.engine.manager.copies
        assert any(map(copies.is_stale, copies)), "copies of before an update, which nothing has evicted"
        with pytest.raises(EngineError, match="a forward begins"):
            run.backward(4)
        other = make_model(run.name).eval()
        run.optimizer.zero_grad()
        other.load_state_dict(run.model.state_dict())
        run.model.eval()  # so that nothing is random
        batch = make_batch(run.name, seed=5)
        assert torch.equal(run.model(**batch).loss, other(**batch).loss)


def unclipped(streams, case, *, checkpointing=False, **settings):
    torch.manual_seed(0)
    with streams_of(streams):
        run = UnclippedRun(**settings)
        if checkpointing:
            run.model.gradient_checkpointing_enable({"use_reentrant": False})
        case(run)
        return run.end(), run


@pytest.mark.parametrize(("case", "settings"), UNCLIPPED.values(), ids=UNCLIPPED)
def test_the_bits_are_those_of_updates_in_the_step(case, settings):
    expected, run = unclipped("threads", case, overlap_optimizer=False, **settings)
    assert not any(run.num_ahead)
    for streams in STREAMS:
        found, run = unclipped(streams, case, overlap_optimizer="backward", **settings)
        assert_same(expected, found)
        assert run.num_ahead[0] == 0  # nobody knows yet what this program does before step()
        assert min(run.num_ahead[2:]) > 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_is_spread_over_the_model(share, monkeypatch):
    """Not the chunks whose gradients come first, which are those of the last layers."""
    monkeypatch.setattr("hf_patrickstar.schedule.pace.share_beside_backward", lambda *args: share)
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train_for(run, 2)
        run.backward(2)
        ahead = run.engine.manager.gradients.used_ahead
        is_ahead = [chunk.spec.index in ahead for chunk in run.engine.manager.chunks if chunk.spec.is_updated]
        run.optimizer.step()
    middle = len(is_ahead) // 2
    assert middle > 4
    for part in (is_ahead[:middle], is_ahead[middle:]):
        assert sum(part) == pytest.approx(share * len(part), abs=1.5), is_ahead


@pytest.mark.parametrize(("case", "settings"), CASES.values(), ids=CASES)
def test_programs_that_do_more_keep_their_bits(case, settings):
    """Programs that clip, read, write and look at everything: their chunks are updated by ``step()``."""
    expected = outcome("threads", case, settings, overlap_optimizer=False)
    assert_same(expected, outcome("simulated:1", case, settings, overlap_optimizer="backward"))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_trainer_without_clipping(accumulation, tmp_path, monkeypatch):
    """Of the 16 batches of an epoch the last one is a step of its own, if three are one."""
    updated, outdate = [], Copies.outdate
    monkeypatch.setattr(Copies, "outdate", lambda *args: (updated.append(1), outdate(*args)))
    kwargs = {"max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation, "max_steps": 4 * accumulation}
    _, expected = train("gpt2", tmp_path / "stock", **kwargs)
    with streams_of("simulated:1"):
        config = {"placement": "host", "chunk_numel": 700, "chunk_budget": tight_budget("gpt2")}
        config |= {"overlap_optimizer": "backward"}
        _, found = train("gpt2", tmp_path / "ours", config, **kwargs)
    assert updated
    assert found.losses == expected.losses
    assert found.norms == expected.norms


def test_on_the_threads_of_the_cpu_tier_all_is_updated_by_the_step():
    expected, _ = unclipped("threads", train_for, overlap_optimizer=False)
    found, run = unclipped("threads", train_for, overlap_optimizer="backward")
    assert_same(expected, found)
    assert not any(run.num_ahead)


def test_clipping_is_noticed_and_said_once(caplog):
    with caplog.at_level(logging.INFO, "hf_patrickstar"), streams_of("simulated"):
        run = Run(overlap_optimizer="backward")
        for seed in range(4):
            run.step(seed)
            assert not run.engine.manager.gradients.used_ahead
    said = [record.message for record in caplog.records if "updated by step()" in record.message]
    assert len(said) == 1
    assert "clipped" in said[0]


# What breaks the promise


def evaluate(run):
    with torch.no_grad():
        run.model(**make_batch(run.name)).loss.item()


def read_gradients(run):
    for parameter in run.model.parameters():
        parameter.grad.sum()


def drop_gradients(run):
    for parameter in run.model.parameters():
        parameter.grad = None


def change_the_rate(run):
    run.optimizer.param_groups[0]["lr"] *= 0.5
    run.optimizer.step()


def save(run):
    with tempfile.TemporaryDirectory() as folder:
        run.engine.checkpoints.save(folder + "/saved")


BREAKS = {
    "a forward": lambda run: run.backward(1),
    "an evaluation": evaluate,
    "clipping": lambda run: run.optimizer.clip_grad_norm_(None, 0.5),
    "clipping by value": lambda run: run.optimizer.clip_grad_value_(0.5),
    "another norm": lambda run: run.optimizer.grad_norm(norm_type=1.0),
    "unscaling": lambda run: run.optimizer.unscale(torch.tensor(0.5)),
    "zeroing": lambda run: run.optimizer.zero_grad(),
    "zeroing by the model": lambda run: run.model.zero_grad(),
    "reading gradients": read_gradients,
    "dropping gradients": drop_gradients,
    "a skipped step": lambda run: run.optimizer.skip_step(),
    "another rate": change_the_rate,
    "a checkpoint": save,
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_what_breaks_the_promise_is_an_error(breaks):
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train_for(run, 3)
        run.backward(3)
        assert run.engine.manager.gradients.used_ahead
        with pytest.raises(EngineError, match=r"overlap_optimizer='backward'|consumed by optimizer.step"):
            breaks(run)


def test_what_reads_a_state_in_the_users_own_optimizer_breaks_the_promise():
    with streams_of("simulated:1"):
        run = UnclippedRun(momentum, overlap_optimizer="backward")
        train_for(run, 3)
        run.backward(3)
        assert run.engine.manager.gradients.used_ahead
        with pytest.raises(EngineError, match="or its state, is used"):
            run.optimizer.inner.state[next(run.model.parameters())]


def test_where_states_were_read_before_a_step_all_is_updated_by_the_step():
    """A program that reads them when its first step is over, and between backward and step, may do so again."""
    with streams_of("simulated:1"):
        run = UnclippedRun(momentum, overlap_optimizer="backward")
        for seed in range(4):
            run.backward(seed)
            run.note_updates()
            run.keep(*(len(run.optimizer.inner.state[p]) for p in run.model.parameters()))
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.num_ahead == [0, 0, 0, 0]


def test_a_second_backward_is_an_error(monkeypatch):
    """With a retained graph few chunks can be updated: those whose values no operator has kept."""
    monkeypatch.setattr("hf_patrickstar.schedule.pace.share_beside_backward", lambda *args: 1.0)
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train_for(run, 3)
        loss = run.model(**make_batch(run.name)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(EngineError, match="a backward begins"):
            loss.backward()


def test_a_micro_batch_is_not_repeated_once_a_chunk_was_updated():
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train_for(run, 3)

        def fail():
            run.backward(3)
            raise DeviceMemoryError("full")

        with pytest.raises(EngineError, match=r"out of memory \(full\), but .* chunks .* were updated"):
            run.engine.attempt(fail)


def test_after_a_failed_step_the_next_forward_says_so_once():
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train_for(run, 3)
        first = next(run.model.parameters())
        handle = first.register_post_accumulate_grad_hook(lambda _: (_ for _ in ()).throw(KeyError("mine")))
        with pytest.raises(KeyError):
            run.backward(3)
        handle.remove()
        assert run.engine.manager.gradients.used_ahead
        with pytest.raises(EngineError, match="a forward begins"):
            run.backward(4)
        run.optimizer.zero_grad()
        train_for(run, 3)  # it can go on, if the program wants to


def test_the_setting_is_checked():
    assert PatrickStarConfig(overlap_optimizer="backward").overlap_optimizer == "backward"
    with pytest.raises(ConfigError, match="overlap_optimizer: expected true, false or 'backward', got 'forward'"):
        PatrickStarConfig(overlap_optimizer="forward")
