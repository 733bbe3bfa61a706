"""Training states in torch's format: the stock Trainer goes on from our checkpoints, and we from ``optimizer.pt``."""

import io
import logging
import re
import shutil
import tracemalloc

import numpy
import pytest
import torch
from support.checkpoint_files import STATE_INDEX, names_in, same_bits, snapshot, tensors_in, write_training_state
from support.models import make_batch, make_model
from support.trainers import assert_same_weights, logged, run, tight
from test_interchange import ours, stock, with_adapters

from hf_patrickstar import CheckpointError, PatrickStarAccelerator, PatrickStarEngine
from hf_patrickstar.checkpoint.torch_state import export
from hf_patrickstar.cli.main import main

SHARDED = {STATE_INDEX, "optimizer-00001-of-00001.safetensors", "optimizer-others.safetensors", "README.md"}


SGD = {"trainer_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9})}}
OPTIMIZERS = {"adamw": {}, "momentum": SGD, "adafactor": {"optim": "adafactor"}}


def without_chunks(tmp_path, **kwargs):
    return ours(tmp_path, patrickstar=False, patrickstar_config=None, **kwargs)


def formatted(optimizer_format, **config):
    return {**tight(), **config, "optimizer_format": optimizer_format}


def state_of(engine):
    return engine.optimizer.state_dict()


# The Trainer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_trainer_goes_on_from_either_file(name, tmp_path):
    kwargs, theirs = OPTIMIZERS[name], stock(tmp_path / "stock", **OPTIMIZERS[name])
    run(theirs)
    for form in ("torch", "sharded"):
        run(ours(tmp_path / form, patrickstar_config=formatted(form, background_save=True), **kwargs))
    original, place, sharded = (tmp_path / name / "checkpoint-2" for name in ("stock", "torch", "sharded"))
    assert names_in(place) == names_in(original) == names_in(sharded) - SHARDED | {"optimizer.pt"}
    exported = shutil.copytree(sharded, tmp_path / "exported")
    assert main(["export", str(exported)]) == 0
    wanted, *files = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (original, place, exported))
    for found in files:
        assert same_bits(wanted["state"], found["state"])
        assert [group["lr"] for group in wanted["param_groups"]] == [group["lr"] for group in found["param_groups"]]
        assert [group["params"] for group in wanted["param_groups"]] == [g["params"] for g in found["param_groups"]]
    cases = [(stock, place), (ours, original), (without_chunks, sharded)]
    if name == "adamw":  # files of others differ in names alone
        cases += [(ours, place), (without_chunks, place), (stock, exported)]
    for number, (make, folder) in enumerate(cases):
        other = make(tmp_path / str(number), model=make_model("gpt2", seed=3), **kwargs)
        run(other, resume_from_checkpoint=str(folder))
        for key in ("loss", "grad_norm", "learning_rate"):
            assert logged(other, key) == logged(theirs, key)
        assert_same_weights(theirs.model, other.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_default_the_stock_trainer_goes_on(dtype, tmp_path, caplog):
    """The same files, and in fp32 the same bits; a model in 16 bits has fp32 masters beside torch's entries."""
    kwargs = {"bf16": dtype is torch.bfloat16}

    def make(trainer, name, **config):
        settings = {} if trainer is stock else {"patrickstar_config": {**tight(), **config}}
        return trainer(tmp_path / name, model=make_model("gpt2", len(name)).to(dtype), **kwargs, **settings)

    run(whole := make(ours, "ours"))
    place = tmp_path / "ours/checkpoint-2"
    run(theirs := make(stock, "past"))
    assert names_in(place) == names_in(tmp_path / "past/checkpoint-2")
    saved = torch.load(place / "optimizer.pt", weights_only=True)
    assert set(saved) == {"state", "param_groups"} | ({"patrickstar_master"} if kwargs["bf16"] else set())
    run(again := make(ours, "in large chunks", chunk_budget="auto"), resume_from_checkpoint=str(place))
    assert logged(again, "loss") == logged(whole, "loss")
    assert_same_weights(whole.model, again.model)
    run(gone := make(stock, "a stock one that goes on"), resume_from_checkpoint=str(place))
    assert logged(gone, "grad_norm")[2] < 2 * logged(whole, "grad_norm")[2]
    if dtype is torch.float32:
        assert logged(gone, "loss") == logged(whole, "loss") == logged(theirs, "loss")
        assert_same_weights(theirs.model, gone.model)
    assert [record for record in caplog.records if "patrickstar" in record.getMessage()] == []


NAN = b"\xff" * 4096


def damage(path, start=0.5):
    """Writes 4 KiB of garbage into a file."""
    data = bytearray(path.read_bytes())
    begin = int(len(data) * start)
    data[begin : begin + len(NAN)] = NAN
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("form", "dtype", "place_of_damage"),
    [("auto", torch.float32, 0.9), ("auto", torch.bfloat16, 0.3), ("sharded", torch.bfloat16, 0.9)],
)
def test_garbage_in_the_file_of_the_optimizer_changes_nothing(form, dtype, place_of_damage, tmp_path, capsys):
    def make(name, seed):
        model = make_model("gpt2", seed).to(dtype)
        return ours(tmp_path / name, model=model, patrickstar_config={**formatted(form), "dtype": "bf16"})

    run(make("run", 0))
    names = {"auto": "optimizer.pt", "sharded": "optimizer-00001-of-00001.safetensors"}
    path = tmp_path / "run/checkpoint-4" / names[form]
    assert main(["check", str(path.parent)]) == 0
    assert f"{path}: as it was saved" in capsys.readouterr().out
    damage(path, place_of_damage)
    is_seen = "(: tensor '.*(exp_avg|master|step).*' has other bytes| is damaged, or cannot be loaded)"
    message = rf"{path.name}'{is_seen}.* use a(nother)? checkp"
    assert main(["check", str(path.parent)]) == 1
    assert re.search(message, capsys.readouterr().err)
    beginner = make("other", 3)
    with pytest.raises(CheckpointError, match=message):
        run(beginner, resume_from_checkpoint=str(path.parent))
    assert_same_weights(make_model("gpt2", 3).to(dtype), beginner.model)
    assert state_of(beginner.patrickstar_engine)["state"] == {}
    trained = make("again", 4)
    run(trained)
    before = trained.model.state_dict(), state_of(trained.patrickstar_engine)
    with pytest.raises(CheckpointError, match=message):
        trained.patrickstar_engine.load_checkpoint(path.parent)
    assert same_bits(before, (trained.model.state_dict(), state_of(trained.patrickstar_engine)))
    run(make("remedy", 5), resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))


def test_the_first_loss_after_a_resume_that_is_not_finite(tmp_path, caplog):
    """Weights have no checksums, and the Trainer does not log such losses."""
    run(stock(tmp_path / "stock"))
    place = tmp_path / "stock/checkpoint-2"
    damage(place / "model.safetensors")
    run(ours(tmp_path / "run", model=make_model("gpt2", 3)), resume_from_checkpoint=str(place))
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "not finite" in text]
    assert f"the loss is not finite, for the first time since '{place}' was loaded; weights have no" in warning
    assert warning.endswith(f"hf-patrickstar check {place}")
    assert main(["check", str(place)]) == 0  # what it names


def test_the_stock_trainer_begins_adam_anew_where_the_file_is_missing(tmp_path):
    """Which the README of the checkpoint warns of."""
    run(own := ours(tmp_path / "run", patrickstar_config=formatted("sharded")))
    place = tmp_path / "run/checkpoint-2"
    assert "optimizer.pt" not in names_in(place)
    text = (place / "README.md").read_text()
    assert "hf-patrickstar export" in text
    for name in names_in(place):
        assert not name.startswith("optimizer") or name.replace("00001-of-00001", "*") in text
    other = stock(tmp_path / "stock", model=make_model("gpt2", seed=3))
    run(other, resume_from_checkpoint=str(place))
    assert logged(other, "loss") != logged(own, "loss")


def test_the_readme_of_a_model_stays(tmp_path):
    """PEFT writes one of its own."""
    make_model("gpt2").save_pretrained(tmp_path / "base")
    folders = []
    for make in (stock, ours):
        folders.append(tmp_path / make.__name__ / "checkpoint-2")
        config = {"patrickstar_config": formatted("sharded")} if make is ours else {}
        run(make(tmp_path / make.__name__, model=with_adapters(tmp_path / "base"), max_steps=2, **config))
    theirs, own = ((folder / "README.md").read_text() for folder in folders)
    assert own.startswith(theirs.rstrip())
    assert "hf-patrickstar export" in own
    assert "hf-patrickstar export" not in theirs


def test_a_model_that_is_trained_in_16_bit(tmp_path):
    """As plain torch does it, without masters: then the model's file has every bit, and so has ``optimizer.pt``."""

    def make(seed):
        return make_model("gpt2", seed).to(torch.bfloat16)

    theirs = stock(tmp_path / "stock", model=make(0))
    own = ours(tmp_path / "own", model=make(0), patrickstar_config={"optimizer_format": "sharded"})
    run(theirs)
    run(own)
    places = tmp_path / "stock/checkpoint-2", tmp_path / "own/checkpoint-2"
    export(places[1])
    found = [torch.load(place / "optimizer.pt", weights_only=True)["state"] for place in places]
    assert found[0][0]["exp_avg"].dtype == torch.bfloat16
    assert same_bits(*found)
    assert not [name for name in tensors_in(places[1]) if "master/" in name]
    for number, (trainer, place) in enumerate(((stock, places[1]), (ours, places[0]), (ours, places[1]))):
        other = trainer(tmp_path / str(number), model=make(3))
        run(other, resume_from_checkpoint=str(place))
        assert logged(other, "loss") == logged(theirs, "loss")
        assert_same_weights(theirs.model, other.model)


# A bare loop


def engaged(seed=0, make_optimizer=torch.optim.AdamW, **config):
    model = make_model("gpt2", seed)
    return PatrickStarEngine(model, config, make_optimizer(model.parameters(), lr=0.01), device="cpu")


def train(engine, steps=2):
    for step in range(steps):
        engine.model(**make_batch("gpt2", 2, step)).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


ANOTHER = "it was saved by another optimizer"
WRONG = [
    (lambda state: state["state"][3].pop("step"), f"parameter '.*' has the step None: {ANOTHER}"),
    (lambda state: state["state"][3].pop("exp_avg"), f"parameter '.*' has no 'exp_avg': {ANOTHER}"),
    (lambda state: state["state"][3].update(exp_avg=None), r"parameter '.*' has no 'exp_avg'"),
    (lambda state: state["state"][3].update(exp_avg=torch.zeros(7, 5)), r"'exp_avg' of .* '.*' has shape \(7, 5\)"),
    (lambda state: state["state"][3].update(step=float("nan")), r"parameter '.*' has the step nan"),
    (lambda state: state["state"][3].update(step="3"), r"parameter '.*' has the step '3'"),
    (lambda state: state["state"][3].update(max_exp_avg_sq=torch.ones(1)), "has 'max_exp_avg_sq' of amsgrad"),
    (lambda state: state.update(patrickstar_master={999: torch.ones(1)}), "is not the state of an optimizer"),
    (lambda state: state["param_groups"][0]["params"].pop(), r"optimizer.pt': optimizer state has param groups of"),
    (lambda state: state.pop("param_groups"), r"optimizer.pt' is not the state of .*: KeyError\('param_groups'\)"),
]


def test_a_wrong_file_changes_nothing(tmp_path):
    engine = engaged(optimizer_format="torch")
    train(engine)
    engine.save_checkpoint(tmp_path / "c")
    whole = (tmp_path / "c/optimizer.pt").read_bytes()
    other = engaged(seed=3)
    train(other, 1)
    other.save_checkpoint(tmp_path / "before")
    for damage, said in WRONG:
        state = torch.load(io.BytesIO(whole))
        damage(state)
        torch.save(state, tmp_path / "c/optimizer.pt")
        with pytest.raises(CheckpointError, match=said):
            other.load_checkpoint(tmp_path / "c")
    other.save_checkpoint(tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")


@pytest.mark.parametrize("form", ["torch", "sharded"])
def test_settings_of_any_type(form, tmp_path):
    """Scalars of numpy come back as Python's; what cannot be pickled is refused before anything is written."""
    engine = engaged(optimizer_format=form)
    train(engine, 1)
    engine.optimizer.param_groups[0].update(note=numpy.float64(0.5), more=(1, {"a": [None, float("inf")]}))
    engine.save_checkpoint(tmp_path / "c")
    other = engaged(seed=3)
    other.load_checkpoint(tmp_path / "c")
    group = other.optimizer.param_groups[0]
    assert (type(group["note"]), group["note"], group["more"]) == (float, 0.5, (1, {"a": [None, float("inf")]}))
    engine.optimizer.param_groups[0]["note"] = lambda: 0
    with pytest.raises(CheckpointError, match=r"cannot be pickled .*; save without the optimizer's state"):
        engine.save_checkpoint(tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("form", ["torch", "sharded"])
def test_two_optimizers_and_what_is_in_no_chunk(form, tmp_path):
    """Each optimizer has its own file, and numbers its parameters as torch does; so it is with an exported one."""

    def make(seed):
        model, beside = make_model("gpt2", seed), torch.nn.Parameter(torch.ones(3))
        named = dict(model.named_parameters())
        groups = [beside, *(p for name, p in named.items() if "bias" in name)]
        optimizers = [
            torch.optim.SGD([p for name, p in named.items() if "bias" not in name], lr=0.01, momentum=0.9),
            torch.optim.AdamW([{"params": groups[:4], "lr": 0.1}, {"params": groups[4:]}]),
        ]
        return model, beside, optimizers

    def step(model, beside, optimizers):
        (model(**make_batch("gpt2", 2, 1)).loss + beside.square().sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    plain = make(0)
    step(*plain)
    model, beside, optimizers = make(0)
    engine = PatrickStarEngine(model, {"optimizer_format": form}, optimizers, device="cpu")
    step(model, beside, engine.optimizers)
    engine.save_checkpoint(tmp_path / "c")
    if form == "sharded":
        assert "optimizer-others.safetensors" in names_in(tmp_path / "c")
        assert main(["export", str(tmp_path / "c")]) == 0
        assert main(["export", str(tmp_path / "c"), "--output", str(tmp_path / "x.pt")]) == 0
    expected = [optimizer.state_dict()["state"] for optimizer in plain[2]]
    assert 0 in expected[1]
    for names in (("c/optimizer.pt", "c/optimizer_1.pt"), ("x.pt", "x_1.pt"))[: 1 + (form == "sharded")]:
        found = [torch.load(tmp_path / name, weights_only=True)["state"] for name in names]
        assert same_bits(expected, found)
    # And back: from torch's files alone.
    for path in (tmp_path / "c" / STATE_INDEX, *(tmp_path / "c").glob("optimizer-*")):
        path.unlink(missing_ok=True)
    model, beside, optimizers = make(3)
    again = PatrickStarEngine(model, {}, optimizers, device="cpu")
    again.load_checkpoint(tmp_path / "c")
    assert same_bits(expected, [optimizer.state_dict()["state"] for optimizer in again.optimizers])


# Accelerate


def prepared(folder, seed=0, config=None):
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=config or {}, project_dir=str(folder))
    model = make_model("gpt2", seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def test_accelerate(tmp_path):
    accelerator, model, optimizer = prepared(tmp_path, config={"optimizer_format": "torch"})
    for step in range(2):
        accelerator.backward(model(**make_batch("gpt2", 2, step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "c"))
    assert STATE_INDEX not in names_in(tmp_path / "c")
    plain = torch.optim.AdamW(make_model("gpt2").parameters(), lr=0.5)
    plain.load_state_dict(torch.load(tmp_path / "c/optimizer.bin", weights_only=True))
    assert same_bits(plain.state_dict()["state"], optimizer.state_dict()["state"])
    again, other, own = prepared(tmp_path, seed=3)
    again.load_state(str(tmp_path / "c"))
    assert_same_weights(model, other)
    assert same_bits(optimizer.state_dict(), own.state_dict())


# Memory


def test_export_needs_a_piece_at_a_time(tmp_path):
    states = {f"w{n}": {"exp_avg": torch.randn(1000, 1000), "step": torch.tensor(1.0)} for n in range(8)}
    write_training_state(tmp_path, states, 2, {"w0": [0, 300_000, 1_000_000]})
    tracemalloc.start()
    export(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < peak < 4 * 1000**2, "one of eight tensors"
    found = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert all(torch.equal(found[n]["exp_avg"], states[f"w{n}"]["exp_avg"]) for n in range(8))
