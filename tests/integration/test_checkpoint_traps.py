"""What checkpoints must not do: delete what is not theirs, mix two of them, or take values for others."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.models import make_batch, make_model

from hf_patrickstar import CheckpointError, PatrickStarEngine, deferred_weights

HOST = {"placement": "host", "chunk_budget": 2**17}


def engage(model, config=None, **kwargs):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return PatrickStarEngine(model, config or HOST, torch.optim.AdamW(parameters, lr=1e-2), device="cpu", **kwargs)


def step(engine, seed=1):
    torch.manual_seed(seed)  # for dropout
    engine.model(**make_batch("gpt2", 2, seed)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def state_of(engine):
    names = [name for group in engine.optimizer.named_groups() for name in group]
    states = engine.optimizer.state_dict()["state"]
    found = {f"{key}/{names[number]}": value for number, state in states.items() for key, value in state.items()}
    return {**found, **{key: value.clone() for key, value in engine.model.state_dict().items()}}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [key for key, value in left.items() if not torch.equal(value, right[key])] == []


CASTS = {
    "float": lambda model: model.float(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "norms in fp32": lambda model: [setattr(m.weight, "data", m.weight.data.float()) for m in norms_of(model)],
    "a frozen base in bf16": lambda model: model.requires_grad_(False).to(torch.bfloat16).lm_head.requires_grad_(True),
}


DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.parametrize(("cast", "dtype"), zip(CASTS.values(), DTYPES, strict=True), ids=CASTS)
def test_casts_of_deferred_weights(tmp_path, cast, dtype):
    make_model("gpt2").to(dtype).save_pretrained(tmp_path)
    plain = type(make_model("gpt2")).from_pretrained(tmp_path, dtype=dtype)
    with deferred_weights():
        deferred = type(plain).from_pretrained(tmp_path, dtype=dtype)
    for model in (plain, deferred):
        cast(model)
    engine = engage(deferred, {"dtype": "fp32"})
    expected, actual = plain.state_dict(), deferred.state_dict()
    assert {key: value.dtype for key, value in expected.items()} == {key: value.dtype for key, value in actual.items()}
    assert_same(expected, actual)
    engine.detach()


def make_adapter(seed):
    torch.manual_seed(seed)
    lora = LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.0, modules_to_save=["ln_f"], fan_in_fan_out=True)
    model = get_peft_model(make_model("gpt2"), lora)
    model.base_model.model.transformer.wpe.weight.requires_grad_(True)  # which no adapter file has
    return model


def test_an_adapter_beside_an_unfrozen_parameter(tmp_path):
    engine = engage(make_adapter(0), {})
    step(engine)
    engine.save_checkpoint(tmp_path / "c")
    saved = state_of(engine)
    other = engage(make_adapter(1), {"chunk_numel": 2048})
    other.load_checkpoint(tmp_path / "c")
    assert_same(saved, state_of(other))
    for each in (engine, other):
        step(each, seed=2)
    assert_same(state_of(engine), state_of(other))
    before = state_of(other)
    path = tmp_path / "c" / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors' is not a complete"):
        other.load_checkpoint(tmp_path / "c")
    path.write_bytes(whole.replace(b'"shape":[2,32]', b'"shape":[32,2]', 1))
    with pytest.raises(
        CheckpointError, match=r"adapter_model.safetensors': tensor '.*' has shape \(32, 2\), in the mod"
    ):
        other.load_checkpoint(tmp_path / "c")
    path.write_bytes(whole)
    *others, last = load_file(path).items()
    save_file(dict(others), path)
    with pytest.raises(CheckpointError, match=f"adapter_model.safetensors' has no tensor '{last[0]}'"):
        other.load_checkpoint(tmp_path / "c")
    assert_same(before, state_of(other))
    for each in (engine, other):
        each.detach()


def test_a_checkpoint_without_one_of_the_parameters(tmp_path):
    engine = engage(make_model("gpt2"))
    state = {key: value for key, value in engine.model.state_dict().items() if "wpe" not in key}
    before = state_of(engine)
    engine.model.save_pretrained(tmp_path / "c", state_dict=state)
    with pytest.raises(CheckpointError, match=r"has no value for 'transformer.wpe.weight'"):
        engine.load_checkpoint(tmp_path / "c")
    assert_same(before, state_of(engine))
    engine.detach()
