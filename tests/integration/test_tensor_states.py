"""The state of a parameter follows from facts, and moves as PatrickStar's figure 7 says."""

import torch
from support import inside
from support.models import make_batch, make_model
from support.trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine


def test_the_path_of_one_weight():
    model = make_model("gpt2")
    config = {"chunk_budget": smallest_budget(make_model("gpt2"))}
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3))
    weight = model.transformer.h[0].mlp.c_fc.weight
    tensor = next(tensor for tensor in inside.tensors(engine) if tensor.parameter is weight)
    path = [tensor.state.name]

    def look(*_):
        if path[-1] != tensor.state.name:
            path.append(tensor.state.name)

    for module in model.modules():
        for is_first in (True, False):
            module.register_forward_pre_hook(look, prepend=is_first)
            module.register_forward_hook(look, prepend=is_first)
    model(**make_batch("gpt2")).loss.backward()
    look()
    engine.optimizer.step()
    look()
    assert path == ["HOLD", "COMPUTE", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD", "HOLD"]
    with torch.no_grad():
        model(**make_batch("gpt2"))
    assert path[-2:] == ["COMPUTE", "HOLD"], "an evaluation keeps nothing for a backward"
