"""Plans of what a script trains: its model, batches, loss and optimizer, taken where it calls ``train``."""

import dataclasses
import math
import re

import pytest
import torch
from support.models import make_model
from support.quantized import saved
from support.scripts import ARGUMENTS, write_script
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar import plan
from hf_patrickstar.checkpoint.deferred import DeferredTensor
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import BESIDE, plan_and_simulate, plan_if_fits
from hf_patrickstar.planner.script_subject import arrange_script
from hf_patrickstar.units import MIB

CHUNKS = ("--patrickstar", "--patrickstar_config", '{"chunk_numel": 8192}')


def plan_subject(*arranged):
    """The plan of a model that was found already."""
    return plan_and_simulate(*arranged)[0]


def arrange(tmp_path, more="", *arguments, **kwargs):
    return arrange_script(write_script(tmp_path, more), [*ARGUMENTS, *arguments], "rtx4090", **kwargs)


def test_it_is_the_plan_of_the_same_model_as_a_configuration(tmp_path):
    ours = plan_subject(*arrange(tmp_path, "model.config.use_cache = False", *CHUNKS))
    config = make_model("gpt2").config
    other = plan(config, "rtx4090", batch_size=2, length=16, dtype="auto", settings={"chunk_numel": 8192})
    assert (ours.model, ours.task) == ("train.py", "GPT2LMHeadModel")
    assert ours.settings == {"chunk_numel": 8192}
    assert (ours.num_parameters, ours.num_trainable, ours.chunks) == (
        other.num_parameters,
        other.num_trainable,
        other.chunks,
    )
    kinds = [dict(each.tier(Tier.DEVICE).owners) for each in (ours, other)]
    activations = [owners.pop("non-model data") for owners in kinds]
    assert kinds[0] == kinds[1]
    assert activations[1] <= activations[0] < 1.05 * activations[1], "the script has an attention mask, too"
    assert math.isclose(ours.speed.tokens_per_s * ours.speed.seconds, 2 * 16)


@pytest.mark.parametrize("optim", ["lion_8bit", "ademamix_8bit"])
def test_optimizers_of_bitsandbytes(optim, tmp_path):
    """The script's is copied, with what its class has added to torch's."""
    pytest.importorskip("bitsandbytes")
    ours = plan_subject(*arrange(tmp_path, "model.config.use_cache = False", "--optim", optim, *CHUNKS))
    config, settings = make_model("gpt2").config, {"chunk_numel": 8192}
    other = plan(config, "rtx4090", batch_size=2, length=16, dtype="auto", settings=settings, optimizer=optim)
    kinds = [dict(each.tier(Tier.DEVICE).owners) for each in (ours, other)]
    assert kinds[0].pop("non-model data") >= kinds[1].pop("non-model data")
    assert kinds[0] == kinds[1]


QUANTIZED = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

how = BitsAndBytesConfig(load_in_{bits}bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
given = dict(quantization_config=how, device_map={{"": "cpu"}}, dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained("{path}", **given)
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_planned_as_its_configuration_is(bits, tmp_path, capfd):
    """It is packed while it is loaded, which needs the values of weights."""
    pytest.importorskip("bitsandbytes")
    path = saved(3).name
    ours = plan_subject(*arrange(tmp_path, QUANTIZED.format(bits=bits, path=path), "--bf16", *CHUNKS))
    assert "it runs again and reads them" in capfd.readouterr().err
    settings, adapters = {"chunk_numel": 8192}, {"r": 2, "target_modules": "all-linear"}
    other = plan(path, "rtx4090", batch_size=2, length=16, settings=settings, bits=bits, adapters=adapters)
    assert ours.tiers == other.tiers
    assert ours.chunks == other.chunks
    assert (ours.num_parameters, ours.num_trainable) == (other.num_parameters, other.num_trainable)


def test_everything_that_the_script_says_is_planned(tmp_path):
    settings = (
        '{"device_budget": "3MiB", "host_budget": "64MiB", "chunk_numel": 8192, "pin_memory": true, "machine": "h100"}'
    )
    arguments = ["--bf16", "--gradient_accumulation_steps", "4", "--max_grad_norm", "0.25", "--gradient_checkpointing"]
    arguments += ["--optim", "sgd", "--optim_args", "momentum=0.5", "--patrickstar", "--patrickstar_config", settings]
    subject, given = arrange(tmp_path, "", *arguments, "--per_device_train_batch_size", "3")
    assert (subject.batch_size, subject.length, subject.checkpointing) == (3, 16, True)
    assert (given.num_micro_batches, given.max_norm) == (4, 0.25)
    assert (given.machine.device_nbytes, given.machine.host_nbytes) == (3 * MIB, 64 * MIB)
    assert given.settings == {"chunk_numel": 8192, "dtype": "bf16"}, "what there is and is pinned says the machine"
    found = plan_subject(subject, given)
    assert found.tier(Tier.DEVICE).budget_nbytes == 3 * MIB
    kinds = set(found.tier(Tier.DEVICE).owners) | set(found.tier(Tier.HOST).owners)
    assert "optimizer_state" in kinds
    assert "exp_avg" not in kinds


def test_arguments_of_the_command_come_first(tmp_path):
    config = ("--patrickstar", "--patrickstar_config", '{"chunk_numel": 8192, "device_budget": "3MiB"}')
    _, given = arrange(
        tmp_path, "", "--max_grad_norm", "0", *config, device_memory="8MiB", settings={"chunk_numel": 4096}
    )
    assert given.machine.device_nbytes == 8 * MIB
    assert given.settings == {"chunk_numel": 4096}
    assert given.max_norm == math.inf, "the Trainer computes a norm that clips nothing"


WORDS = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

config = LlamaConfig(
    vocab_size=8192, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, pad_token_id=0
)
model = {}(config)
make_rows = lambda name, count: [{{"input_ids": torch.ones(256).long(), "labels": {}}}] * count
"""


def test_the_fused_loss_of_liger_is_planned(tmp_path):
    """Its peak is that of a chunk of rows, by the rule of Liger: 2 of 512 here, with 8,192 logits each."""
    of_words = WORDS.format("LlamaForCausalLM", "torch.ones(256).long()")
    peaks = []
    for arguments in ((), ("--use_liger_kernel", "true")):
        found = plan_subject(*arrange(tmp_path, of_words, *CHUNKS, *arguments))
        peaks.append(found.tier(Tier.DEVICE).owners["non-model data"])
    assert peaks[0] > 2 * 2 * 256 * 8192 * 4, "logits, and their softmax"
    assert peaks[1] < 256 * 8192 * 4 / 2
    other = WORDS.format("LlamaForSequenceClassification", "torch.tensor(1)")
    assert plan_subject(*arrange(tmp_path, other, *CHUNKS, "--use_liger_kernel", "true")).fits


def test_an_optimizer_of_the_script_itself(tmp_path):
    own = """
groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters(), 1)]
Trainer = lambda **kwargs: PatrickStarTrainer(optimizers=(torch.optim.RMSprop(groups), None), **kwargs)
"""
    subject, given = arrange(tmp_path, own)
    assert given.optimizer == "RMSprop"
    with FakeTensorMode():
        optimizer = subject.find_optimizer("")(subject.make_model().parameters())
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert [group["lr"] for group in optimizer.param_groups[:2]] == [0.1, 0.2]


TEACHER = """
class Trainer(PatrickStarTrainer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = make_model("gpt2").eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return (model(**inputs).logits - self.teacher(**inputs).logits).pow(2).sum()
"""


EVALUATES_IN_ITS_LOSS = """
class Trainer(PatrickStarTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        assert model is self.model
        with torch.no_grad():
            reference = self.model(**inputs).logits
        return (model(**inputs).logits - 2 * reference).pow(2).sum()
"""


@pytest.mark.long
def test_a_model_that_is_recorded_in_vain_leaves_the_trainer_the_one_that_runs(tmp_path):
    """A step of several micro-batches is recorded; what evaluates in its loss cannot be replayed, and runs."""
    assert plan_subject(*arrange(tmp_path, EVALUATES_IN_ITS_LOSS, "--gradient_accumulation_steps", "2", *CHUNKS)).fits


def test_a_teacher_takes_its_bytes_of_the_device(tmp_path):
    subject, given = arrange(tmp_path, TEACHER, device_memory="64MiB")
    nbytes = sum(parameter.nbytes for parameter in make_model("gpt2").parameters())
    assert given.machine.device_nbytes == 64 * MIB, "others are told of all of it"
    assert given.beside_nbytes == nbytes
    plan = plan_subject(subject, given)
    assert plan == plan_subject(subject, given)
    assert plan.tier(Tier.DEVICE).owners[BESIDE] == nbytes
    alone = plan_subject(subject, dataclasses.replace(given, beside_nbytes=0))
    assert plan.tier(Tier.DEVICE).need_nbytes == alone.tier(Tier.DEVICE).need_nbytes + nbytes


@pytest.mark.long
def test_a_device_that_the_teacher_fills_is_too_small(tmp_path):
    subject, given = arrange(tmp_path, TEACHER, device_memory="16KiB", host_memory="64MiB")
    plan = plan_subject(subject, given)
    assert not plan.fits
    need = plan.tier(Tier.DEVICE).need_nbytes
    assert need > given.beside_nbytes > 16 * 1024
    enough = dataclasses.replace(given, machine=dataclasses.replace(given.machine, device_nbytes=need))
    assert plan_if_fits(subject, enough) is not None


LORA = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
"""


def test_adapters_are_planned_as_the_script_has_made_them(tmp_path):
    found = plan_subject(*arrange(tmp_path, pretrained(tmp_path, LORA), "--bf16"))
    base = sum(parameter.numel() for parameter in make_model("gpt2").parameters())
    adapters = 3 * 4 * (32 + 3 * 32)
    assert (found.num_trainable, found.num_parameters) == (adapters, base + adapters)
    assert found.task == "GPT2LMHeadModel"
    assert found.tier(Tier.DEVICE).owners["exp_avg"] < 8 * adapters < found.tier(Tier.DEVICE).owners["param"]


def pretrained(tmp_path, change=""):
    make_model("gpt2").save_pretrained(tmp_path / "model")
    return f"model = type(model).from_pretrained({str(tmp_path / 'model')!r})\n{change}"


def test_the_largest_batch_of_the_first_ones(tmp_path):
    longer = """
rows = [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in (4, 9, 5)]
make_rows = lambda *_: rows
"""
    subject, given = arrange(tmp_path, longer, "--per_device_train_batch_size", "1")
    assert (subject.batch_size, subject.length) == (1, 9)
    shapes = {key: tuple(value.shape) for key, value in subject.make_inputs().items()}
    assert shapes == {"input_ids": (1, 9), "labels": (1, 9)}
    other = dataclasses.replace(subject, batch_size=4, length=18)
    assert {tuple(value.shape) for value in other.make_inputs().values()} == {(4, 18)}
    assert other.num_tokens == 4 * 18
    assert plan_subject(dataclasses.replace(other, checkpointing=True), given).checkpointing


def test_what_cannot_be_planned_gets_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="ended without building a Trainer"):
        arrange(tmp_path, "raise SystemExit")
    with pytest.raises(ConfigError, match=r"its Trainer has no batches: .*requires a train_dataset"):
        arrange(tmp_path, "make_rows = lambda *_: None")
    with pytest.raises(ConfigError, match=r"processes \(0\) must be at least 1"):
        arrange(tmp_path, "", world_size=0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("1 / 0", r"'.*train\.py' failed before it trained \(.*train\.py, line \d+: ZeroDivisionError: division by "),
        (
            "raise SystemExit(3)",
            r"'.*train\.py' ended itself with the status 3 before it trained; change its arguments",
        ),
        ("raise SystemExit('no data')", r"ended itself with 'no data' before it trained"),
    ],
)
def test_a_script_that_fails_gets_a_sentence(more, message, tmp_path, capsys):
    assert main(["plan", "--", write_script(tmp_path, more), *ARGUMENTS]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.search(message, lines[-1])
    assert not any("Traceback" in line for line in lines)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write_script(tmp_path, "print('said')")
    command = ["plan", "--machine", "rtx4090", "--device-memory", "1MiB", "--host-memory", "64MiB"]
    assert main([*command, "--no-advice", "--", script, *ARGUMENTS, "--output_dir", "mine", "--bf16", *CHUNKS]) == 0
    out, err = capsys.readouterr()
    headline = "train.py (42.3 K parameters), GPT2LMHeadModel, bf16, 2 x 16 tokens, all activations kept, on rtx"
    assert headline in out.replace("\n", " ")
    assert "said" in err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is written beside the script"


@pytest.mark.long
def test_what_fits_names_the_arguments_of_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.planner.advice.changes", lambda *given: [])
    command = ["plan", "--machine", "rtx4090", "--device-memory", "96KiB", "--host-memory", "64MiB"]
    assert (
        main([*command, "--", write_script(tmp_path, ""), *ARGUMENTS, "--output_dir", "mine", "--bf16", *CHUNKS]) == 1
    )
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"The largest batch [^:]*: (\d+) \(--per_device_train_batch_size \1\)", said)
    assert re.search(r"The largest sequence [^:]*: \d+ \(by the script's own option that cuts sequences\)", said)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "what should be planned?"),
        (["gpt2:", "--", "train.py"], "'gpt2:' and a script after -- are both given"),
        (["--batch-size", "4", "--", "train.py"], "--batch-size: the script says this"),
        (["--", "none.py"], "there is no script 'none.py'"),
    ],
)
def test_wrong_arguments_of_the_command(words, problem, capsys):
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hf-patrickstar plan: ")
    assert problem in err


def test_weights_are_not_read(tmp_path, capsys):
    subject, given = arrange(tmp_path, pretrained(tmp_path))
    assert isinstance(subject.model.lm_head.weight, DeferredTensor)
    assert "runs again" not in capsys.readouterr().err
    assert plan_subject(subject, given).fits


def test_weights_are_read_where_the_script_needs_them(tmp_path, capsys):
    change = "try:\n    model.resize_token_embeddings(100)\nexcept Exception:\n    raise SystemExit(1) from None\n"
    subject, _ = arrange(tmp_path, pretrained(tmp_path, change))
    assert subject.model.lm_head.weight.shape[0] == 100
    assert not isinstance(subject.model.lm_head.weight, DeferredTensor)
    assert "it runs again and reads them" in capsys.readouterr().err
