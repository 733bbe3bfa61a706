"""Updates beside the next forward under a Trainer with everything that looks at its model, and under a loss scaler."""

import pytest
from support import inside
from support.streams import streams_of
from support.trainers import assert_same_run, tight, train
from test_sixteen_bit import compare
from transformers import TrainerCallback

from hf_patrickstar.memory.streams import DeviceStreams

pytestmark = pytest.mark.own_streams

CONFIG = {"placement": "host", "chunk_numel": 700, "host_threads": 3, **tight("gpt2", 1.6)}


class NormReader(TrainerCallback):
    """Reads the norms of all parameters after a step, in turns right then, when the step has ended, and not at all.

    Attributes:
        norms: What it read.
        num_late: The chunks that were still being updated when it began to read.
    """

    def __init__(self):
        self.norms, self.num_late = [], 0

    def read(self, model):
        engine = getattr(model, "patrickstar_engine", None)
        self.num_late += 0 if engine is None else inside.num_under_way(engine)
        self.norms += [parameter.detach().norm().item() for parameter in model.parameters()]

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step % 3 == 0:
            self.read(model)

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % 3 == 2:
            self.read(model)


ARGUMENTS = {"max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}


def evaluations(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_a_trainer_that_clips_evaluates_and_looks_has_the_bits_of_the_stock_one(tmp_path):
    reader, stock_reader = NormReader(), NormReader()
    expected = train("gpt2", tmp_path / "stock", callbacks=[stock_reader], **ARGUMENTS)
    with streams_of("pooled"):
        found = train("gpt2", tmp_path / "ours", CONFIG, callbacks=[reader], **ARGUMENTS)
        assert_same_run(expected, found)
    assert reader.norms == stock_reader.norms
    assert evaluations(found[0]) == evaluations(expected[0])
    assert len(evaluations(found[0])) == 4
    assert reader.num_late > 0


def test_steps_that_overflow_after_steps_whose_updates_were_late(monkeypatch):
    """The scale of the loss grows with every step that is done, until gradients overflow."""
    given, on_host = [], DeviceStreams.on_host

    def note(self, work, *args):
        given.append(work)
        return on_host(self, work, *args)

    monkeypatch.setattr(DeviceStreams, "on_host", note)
    with streams_of("simulated:1"):
        scale = {"init_scale": 2.0**17, "growth_interval": 1}
        _, done = compare("gpt2", "fp16", CONFIG, steps=5, scale=scale)
    assert done[0]
    assert False in done[1:-1]
    assert len(given) > 3 * sum(done), "several chunks in each step that was done"
