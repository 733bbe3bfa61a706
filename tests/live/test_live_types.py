"""Which type a model says that it has, beside the stock Trainer, where every answer is the type that was loaded."""

import copy
import json
import pickle

import pytest
import torch
from models import make_model
from safetensors import safe_open
from trainers import make_trainer, run
from transformers import TrainerCallback

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TRAINED = {"no": None, "bf16": BF16, "fp16": FP16}
CASES = [(FP32, "no"), (FP32, "bf16"), (BF16, "no"), (BF16, "fp16"), (FP16, "bf16")]


def types_of(tensors):
    return {tensor.dtype for tensor in tensors}


class Types(TrainerCallback):
    """What a callback is told while the model trains."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.model, self.first = model.dtype, next(model.parameters()).dtype
        self.parameters = types_of(model.parameters())
        self.values = types_of(parameter.data for parameter in model.parameters())
        self.results = types_of(parameter * 1 for parameter in model.parameters())
        self.made = types_of(torch.zeros_like(parameter) for parameter in model.parameters())
        self.config = model.config.dtype
        self.states = types_of(model.state_dict().values())
        self.copies = types_of(copy.deepcopy(model).parameters())
        self.pickled = types_of(pickle.loads(pickle.dumps(parameter)) for parameter in model.parameters())
        with model.patrickstar_engine.full_parameters():
            self.opened = types_of(model.parameters())


@pytest.mark.parametrize(("loaded", "trained"), CASES)
def test_types(loaded, trained, tmp_path):
    make_model("gpt2").to(loaded).save_pretrained(tmp_path / "model")
    model = type(make_model("gpt2")).from_pretrained(tmp_path / "model", dtype=loaded)
    inside = {}

    def note(name):
        return lambda module, args: inside.update({name: module.weight.dtype})

    for name, module in model.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(note(name))
    flags = {} if trained == "no" else {trained: True}
    trainer = make_trainer(
        PatrickStarTrainer,
        PatrickStarTrainingArguments,
        tmp_path / "out",
        model,
        max_steps=1,
        patrickstar_config={},
        save_strategy="steps",
        save_steps=1,
        trainer_kwargs={"callbacks": [types := Types()]},
        **flags,
    )
    run(trainer)
    # What the model is, wherever it goes: the type that was loaded.
    assert {loaded} == types.states == types.copies == types.pickled == types.opened == {types.config}
    saved = tmp_path / "out" / "checkpoint-1"
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(loaded).removeprefix("torch.")
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert types_of(file.get_tensor(name) for name in file.keys()) == {loaded}  # noqa: SIM118
    # What its parameters are: the values that are computed with, in and outside of forward.
    computed = TRAINED[trained] or loaded
    is_left = loaded is torch.float32  # then what autocast does not round is fp32
    assert inside["transformer.h.0.mlp.c_fc"] is computed
    assert inside["transformer.h.0.ln_1"] is inside["transformer.wte"] is (loaded if is_left else computed)
    assert types.model is types.first is inside["transformer.wte"]
    assert types.parameters == {computed, *([loaded] if is_left else [])}
    assert types.parameters == types.values == types.results == types.made
    trainer.patrickstar_engine.detach()
    assert {model.dtype} == types_of(model.parameters()) == {loaded}
