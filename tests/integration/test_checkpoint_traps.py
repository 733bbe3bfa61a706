"""What checkpoints must not do: delete what is not theirs, mix two of them, or take values for others."""

import errno
import threading

import pytest
import torch
from models import make_batch, make_model
from peft import LoraConfig, get_peft_model
from transformers import ResNetConfig, ResNetForImageClassification

from hf_patrickstar import CheckpointError, PatrickStarAccelerator, PatrickStarEngine, deferred_weights
from hf_patrickstar.checkpoint.storage import NewFile

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


@pytest.mark.parametrize("in_background", [False, True])
def test_files_of_others_stay(tmp_path, in_background):
    model = make_model("gpt2")
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config={"background_save": in_background})
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "events").write_text("mine")
    (tmp_path / "run" / "notes").write_text("mine")
    (tmp_path / "run" / "optimizer.pt").write_text("old")
    (tmp_path / "run" / "README.md").write_text("mine")
    for _ in range(2):
        accelerator.save_state(tmp_path / "run")
    model.patrickstar_engine.checkpoints.wait()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names[:4] == ["README.md", "logs", "model.safetensors", "notes"]
    text = (tmp_path / "run" / "README.md").read_text()
    assert text.startswith("mine\n\n## Training state")
    assert text.count("## Training state") == 1
    assert "optimizer.pt" not in names
    assert (tmp_path / "run" / "logs" / "events").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    model.patrickstar_engine.detach()


def test_loading_waits_for_what_is_being_written(tmp_path, monkeypatch):
    gate, original = threading.Event(), NewFile.write

    def slowly(file, view):
        if "optimizer" in str(file.name):
            assert gate.wait(30)
        return original(file, view)

    engine = engage(make_model("gpt2"), {**HOST, "background_save": True})
    engine.save_checkpoint(tmp_path / "c")
    engine.checkpoints.wait()
    step(engine)
    saved = state_of(engine)
    monkeypatch.setattr(NewFile, "write", slowly)
    engine.save_checkpoint(tmp_path / "c")
    threading.Timer(0.3, gate.set).start()
    engine.load_checkpoint(tmp_path / "c")
    assert_same(saved, state_of(engine))
    engine.detach()


CASTS = {
    "float": lambda model: model.float(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "norms in fp32": lambda model: [setattr(m.weight, "data", m.weight.data.float()) for m in norms_of(model)],
    "a frozen base in bf16": lambda model: model.requires_grad_(False).to(torch.bfloat16).lm_head.requires_grad_(True),
}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
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


def test_buffers_of_deferred_weights(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    model = ResNetForImageClassification(config).train()
    model(torch.randn(4, 3, 32, 32))  # running statistics
    model.save_pretrained(tmp_path)
    with deferred_weights():
        deferred = ResNetForImageClassification.from_pretrained(tmp_path)
    engine = engage(deferred, {})
    assert_same(model.state_dict(), deferred.state_dict())
    deferred.train()(torch.randn(4, 3, 32, 32))
    engine.load_checkpoint(tmp_path)
    assert_same(model.state_dict(), deferred.state_dict())
    engine.detach()


def test_a_parameter_that_is_read_while_the_model_is_saved(tmp_path):
    """A Trainer of the user's may save some parameters in its own way, too."""
    engine = engage(make_model("gpt2"))
    step(engine)
    expected = engine.model.state_dict()
    with engine.weights.streamed(is_reader=True):
        torch.save(engine.model.lm_head.weight, tmp_path / "head.pt")
        torch.save(dict(engine.model.state_dict()), tmp_path / "all.pt")
        total = engine.model.transformer.ln_f.weight.sum().item()
    assert torch.equal(torch.load(tmp_path / "head.pt"), expected["lm_head.weight"])
    assert_same(dict(expected), torch.load(tmp_path / "all.pt"))
    assert total == expected["transformer.ln_f.weight"].sum().item()
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


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    engine, original = engage(make_model("gpt2")), NewFile.write
    engine.model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    step(engine)

    def write_all(file, view):
        if file.tell() > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(file, view)

    monkeypatch.setattr(NewFile, "write", write_all)
    with pytest.raises(CheckpointError, match=r"/model.safetensors' cannot be written: No space left.*the file needs"):
        engine.model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    engine.detach()
