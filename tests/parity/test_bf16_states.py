"""``state_dtype: "bf16"``: bit for bit torch's AdamW whose averages are rounded to bf16 after each step."""

import functools
import shutil

import pytest
import torch
from support import inside
from support.checkpoint_files import names_in
from support.covering import ids, pairwise
from support.models import make_model
from support.streams import streams_of
from support.trainers import assert_same_weights, logged, make_trainer, run, smallest_budget, tight
from test_sixteen_bit import LR, groups, run_ours, run_reference
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.checkpoint.torch_state import export
from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier

AVERAGES = ("exp_avg", "exp_avg_sq")


class RoundedStates(torch.optim.AdamW):
    """The reference: between steps the averages are bf16, rounded to the nearest, ties to even; a step is in fp32."""

    def step(self, closure=None):
        self.convert(torch.float32)
        super().step()
        self.convert(torch.bfloat16)

    def convert(self, dtype):
        for state in self.state.values():
            state.update({name: state[name].to(dtype) for name in AVERAGES})


def make_optimizer(cls, fused, named):
    return cls(groups(named.items()), fused=fused)


def compare(name, precision, config, *, fused=True, steps=4, accumulation=1, max_norm=0.3):
    """Trains the reference and ours; losses, norms, weights and averages are the same."""
    ours = functools.partial(make_optimizer, torch.optim.AdamW, fused)
    theirs = functools.partial(make_optimizer, RoundedStates, fused)
    reference, losses, _ = run_reference(name, precision, steps, accumulation, theirs, max_norm)
    assert {state["exp_avg"].dtype for state in reference.optimizer.state.values()} == {torch.bfloat16}
    config = {**config, "state_dtype": "bf16"}
    model, our_losses, norms, _ = run_ours(name, precision, steps, accumulation, config, ours, max_norm)
    engine = model.patrickstar_engine
    assert our_losses == losses
    assert norms == reference.norms
    values = model.state_dict()
    for key, master in reference.masters.items():
        assert torch.equal(values[key], master.data), key
    assert_same_averages(reference.optimizer, engine.optimizer)
    return engine


def assert_same_averages(expected, ours):
    left, right = expected.state_dict()["state"], ours.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert state["step"] == right[number]["step"]
        for name in AVERAGES:
            assert torch.equal(state[name].float(), right[number][name].float()), (number, name)


CASES = pairwise(
    name=["gpt2", "llama"],
    memory=["chunks", "evicting", "resident"],
    fused=[True, None],
    accumulation=[1, 3],
    max_norm=[0.3, None],
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_bits_of_the_reference(case):
    case = dict(case)
    memory, name = case.pop("memory"), case["name"]
    least = {"chunk_budget": smallest_budget(make_model(name), "bf16"), "placement": "host"}
    config = {"chunks": least, "evicting": {**least, "debug_evict_all": True}, "resident": {}}[memory]
    engine = compare(precision="bf16", config=config, **case)
    assert (engine.stats()["chunk_evictions"] > 0) is (memory != "resident")


def test_bytes():
    """2 + 4 + 2 + 2 per parameter; autocast leaves some parameters in fp32 otherwise."""
    config = {"chunk_budget": 150_000, "placement": "host", "dtype": "bf16", "autocast": False}
    model, *_ = run_ours(
        "gpt2", "bf16", 1, 1, {**config, "state_dtype": "bf16"}, lambda named: torch.optim.AdamW(named.values()), None
    )
    engine = model.patrickstar_engine
    numel = sum(chunk.spec.chunk_numel for chunk in inside.chunks(engine))
    owners = engine.ledger.owners(Tier.HOST)
    widths = {"param": 2, "master": 4, "exp_avg": 2, "exp_avg_sq": 2}
    assert {name: owners[name] for name in widths} == {name: width * numel for name, width in widths.items()}


@pytest.mark.own_streams
@pytest.mark.parametrize("streams", ["simulated:1", "delayed", "pooled"])
def test_updates_beside_the_next_forward(streams):
    with streams_of(streams):
        config = {"placement": "host", "chunk_numel": 700, "host_threads": 3, **tight("gpt2", 1.6)}
        compare("gpt2", "bf16", config)


# The Trainer

CONFIG = {**tight("gpt2", 1.5), "placement": "host", "state_dtype": "bf16"}
SHAPES = ({**CONFIG, "chunk_numel": 9000, "chunk_budget": "1MiB"}, {"state_dtype": "bf16"})


def trained(tmp_path, config=None, seed=0, place=None, **kwargs):
    """Four steps with a checkpoint after the second, or the last two from one; without settings, the reference's."""
    cls, args_cls, optimizer_cls = Trainer, TrainingArguments, RoundedStates
    if config is not None:
        cls, args_cls, optimizer_cls = PatrickStarTrainer, PatrickStarTrainingArguments, torch.optim.AdamW
        kwargs["patrickstar_config"] = config
    given = {"optimizer_cls_and_kwargs": (optimizer_cls, {"lr": LR, "fused": True})}
    saving = {"save_strategy": "steps", "save_steps": 2}
    model = make_model("gpt2", seed)
    trainer = make_trainer(cls, args_cls, tmp_path, model=model, trainer_kwargs=given, **saving, **kwargs)
    run(trainer, **({} if place is None else {"resume_from_checkpoint": str(place)}))
    return trainer


def assert_same_end(expected, found):
    for key in ("loss", "grad_norm"):
        assert logged(found, key) == logged(expected, key)
    assert_same_weights(expected.model, found.model)
    assert_same_averages(expected.optimizer, found.optimizer)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_and_what_it_resumes(bf16, tmp_path):
    """In fp32 too. It goes on from its own files, in chunks of another shape, and from those of the stock Trainer."""
    expected = trained(tmp_path / "stock", bf16=bf16)
    ours = trained(tmp_path / "ours", {**CONFIG, "optimizer_format": "sharded"}, bf16=bf16)
    assert ours.patrickstar_stats()["chunk_evictions"] > 0
    assert_same_end(expected, ours)
    original, both = tmp_path / "stock/checkpoint-2", tmp_path / "ours/checkpoint-2"
    export(both)
    alone = shutil.copytree(both, tmp_path / "alone")
    for name in names_in(both) - names_in(original):
        (alone / name).unlink()
    for number, (config, place) in enumerate(
        [*((shape, both) for shape in SHAPES), (SHAPES[0], original), (SHAPES[1], alone), (None, alone)]
    ):
        found = trained(tmp_path / str(number), config, seed=3, place=place, bf16=bf16)
        assert_same_end(expected, found)


def test_a_type_that_states_cannot_have():
    with pytest.raises(ConfigError, match=r"state_dtype: expected one of .*bf16.*, got 'fp8'"):
        PatrickStarConfig(state_dtype="fp8")
