"""The state of a parameter follows from facts, and moves as PatrickStar's figure 7 says."""

import itertools

import pytest
import torch
from models import make_batch, make_model
from trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.states import TensorState

LEGAL = {
    ("FREE", "HOLD"),  # filled
    ("HOLD", "COMPUTE"),  # an operator starts
    ("HOLD", "HOLD_AFTER_BWD"),  # a gradient whose operand is not needed any more
    ("COMPUTE", "HOLD"),  # evaluation, or an operator that keeps nothing for backward
    ("COMPUTE", "HOLD_AFTER_FWD"),
    ("HOLD_AFTER_FWD", "COMPUTE"),  # used twice, or recomputed
    ("HOLD_AFTER_FWD", "HOLD"),  # the operand was needed for the last time
    ("HOLD_AFTER_FWD", "HOLD_AFTER_BWD"),
    ("HOLD_AFTER_BWD", "COMPUTE"),  # the next micro-batch
    ("HOLD_AFTER_BWD", "HOLD"),  # the optimizer's step
}
NAME = "transformer.h.0.mlp.c_fc.weight"


class Recorder:
    """Notes the states of all parameters whenever a module begins or ends, and when it is told to."""

    def __init__(self, engine):
        self.paths = {tensor.spec.name: [tensor.state.name] for tensor in engine.manager.tensors}
        self._tensors = engine.manager.tensors
        for module in engine.model.modules():
            module.register_forward_pre_hook(self.look, prepend=True)
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self.look, prepend=True)
            module.register_forward_hook(self.look)
            if isinstance(module, torch.nn.Dropout | torch.nn.LayerNorm):
                module.register_full_backward_hook(self.look)

    def look(self, *_):
        for tensor in self._tensors:
            path, state = self.paths[tensor.spec.name], tensor.state.name
            if path[-1] != state:
                path.append(state)


def make_engine(times=1):
    model = make_model("gpt2")
    config = {"chunk_budget": times * smallest_budget(make_model("gpt2"))}
    return PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(engine, recorder, num_micro_batches=1):
    for number in range(num_micro_batches):
        engine.model(**make_batch("gpt2", seed=number)).loss.backward()
        recorder.look()
    engine.optimizer.step()
    recorder.look()
    engine.optimizer.zero_grad()
    recorder.look()


@pytest.mark.parametrize(("num_micro_batches", "is_checkpointed"), [(1, True), (2, False)])
def test_a_step_goes_through_the_states_of_the_paper(num_micro_batches, is_checkpointed):
    engine = make_engine(times=4)
    if is_checkpointed:
        engine.model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = Recorder(engine)
    for _ in range(2):
        train(engine, recorder, num_micro_batches)
    pairs = {pair for path in recorder.paths.values() for pair in itertools.pairwise(path)}
    assert pairs <= LEGAL
    assert {state.name for state in TensorState} - {"FREE"} <= {state for pair in pairs for state in pair}
    assert all(path[0] == path[-1] == "HOLD" for path in recorder.paths.values())


def test_the_path_of_one_weight():
    engine = make_engine()
    recorder = Recorder(engine)
    train(engine, recorder)
    path = ["HOLD", "COMPUTE", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD", "HOLD"]
    assert recorder.paths[NAME] == path
    with torch.no_grad():
        engine.model(**make_batch("gpt2"))
    assert recorder.paths[NAME] == [*path, "COMPUTE", "HOLD"], "an evaluation keeps nothing for a backward"
