"""Plans of small models: that they fit or do not, and that what they say is what the engine did in virtual time."""

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import math
import re
import warnings

import pytest
from support.pages import PageReader
from transformers import BertConfig, BertForSequenceClassification

import hf_patrickstar
from hf_patrickstar import plan, units
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import MACHINES, find_machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_if_fits
from hf_patrickstar.planner.screen import describe
from hf_patrickstar.planner.search import Found, Goal, search_below
from hf_patrickstar.planner.subject import Subject
from hf_patrickstar.planner.training_plan import Chunks, Plan, Speed, TierUse, TriedChange
from hf_patrickstar.units import GIB, MIB, format_nbytes

MODEL = "gpt2:n_layer=3,n_embd=128,n_head=4,vocab_size=512,n_positions=64"
NUM_PARAMETERS = 512 * 128 + 64 * 128 + 3 * (12 * 128 * 128 + 13 * 128) + 2 * 128
TIGHT = {"batch_size": 2, "device_memory": 6 * MIB, "host_memory": 64 * MIB}


def joined(text):
    """A text in one line: the command wraps what it prints."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def roomy():
    return plan(MODEL, "rtx4090", batch_size=2)


@pytest.fixture(scope="module")
def tight():
    return plan(MODEL, "rtx4090", **TIGHT)


def test_a_model_that_fits_on_the_device_moves_nothing(roomy):
    assert roomy.fits
    assert (roomy.num_parameters, roomy.num_trainable) == (NUM_PARAMETERS, NUM_PARAMETERS)
    assert roomy.tier(Tier.HOST).need_nbytes == 0
    device = roomy.tier(Tier.DEVICE)
    assert device.budget_nbytes == int(0.95 * MACHINES["rtx4090"].device_nbytes)
    assert 14 * NUM_PARAMETERS < device.need_nbytes < device.budget_nbytes
    assert roomy.chunks.num_on_device == roomy.chunks.num
    assert (roomy.speed.to_device_nbytes, roomy.speed.to_host_nbytes) == (0, 0)
    assert math.isclose(roomy.speed.tokens_per_s * roomy.speed.seconds, 2 * 64)


def test_it_says_what_was_decided_and_why(roomy, tight):
    assert any("chunk_numel=" in reason for reason in tight.chunks.reasons)
    assert any("at home on the host" in reason for reason in tight.chunks.reasons)
    assert not any("at home on the host" in reason for reason in roomy.chunks.reasons)
    assert f"decided   {tight.chunks.reasons[0]}" in describe(tight, is_verbose=True).splitlines()
    for is_verbose in (True, False):
        screen = describe(tight, is_verbose=is_verbose)
        assert all((f"\n{name:10}" in screen) == is_verbose for name in ("busy", "start", "decided"))


MOE = (
    "mixtral:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,num_key_value_heads=2,intermediate_size=16,"
    "num_local_experts=2,vocab_size=40"
)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_experts_are_planned_in_every_type(dtype, caplog):
    assert plan(MOE, "h100", length=8, dtype=dtype).fits
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "model: it must be a model id"),
        ({"machine": None}, "machine: it must be the name of a machine"),
        ({"length": "64"}, "length: it must be a whole number, got '64'"),
        ({"settings": ["x"]}, "settings: it must be a dictionary, got \\['x'\\]"),
        ({"adapters": "r=8"}, "adapters: it must be a dictionary, got 'r=8'"),
    ],
)
def test_what_has_another_type_gets_a_sentence(changes, said):
    with pytest.raises(ConfigError, match=said):
        plan(**{"model": MODEL, "machine": "h100", **changes})


def test_a_model_is_planned_by_its_configuration_and_class():
    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=40)
    model = BertForSequenceClassification(config)
    planned = plan(model, "h100", length=8)
    assert (planned.model, planned.task) == ("bert", "sequence-classification")
    assert planned.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.config.architectures is None
    model.peft_config = {}
    with pytest.raises(ConfigError, match="it has adapters of PEFT already"):
        plan(model, "h100", length=8)


def test_this_machine_is_measured(monkeypatch):
    measured = dataclasses.replace(MACHINES["rtx4090"], name="measured")
    monkeypatch.setattr("hf_patrickstar.planner.planning.measure_machine", lambda visit: measured)
    _, training = arrange(MODEL, "this")
    assert training.machine.name == "this machine"
    assert training.machine.flops == measured.flops


@pytest.mark.parametrize(
    ("budgets", "short"),
    [
        ({"device_memory": 6 * MIB, "host_memory": 4 * MIB}, {"host"}),
        ({"device_memory": MIB, "host_memory": 64 * MIB}, {"device"}),
    ],
)
def test_what_does_not_fit_says_where_and_what_would(budgets, short):
    refused = plan(MODEL, "rtx4090", batch_size=2, **budgets)
    assert not refused.fits
    assert list(refused.tiers) == ["device", "host"], "nobody gave a disk"
    assert {name for name, use in refused.tiers.items() if use.missing_nbytes} == short
    screen = describe(refused, is_verbose=True).splitlines()
    assert "too little on the" in screen[1]
    for name, use in refused.tiers.items():  # where the bytes go at one moment, within what is enough for all
        assert 0 < sum(use.owners.values()) <= use.need_nbytes
        (row,) = [line for line in screen if line.startswith(f"{name} ")]
        need, budget = format_nbytes(use.need_nbytes), format_nbytes(use.budget_nbytes)
        assert row.split(maxsplit=1)[1].startswith(f"needs {need} of {budget}")
        assert all(f"{kind} {format_nbytes(nbytes)}" in row for kind, nbytes in use.owners.items() if nbytes)
    states = ("param", "master", "exp_avg", "exp_avg_sq")
    nbytes_at_home = sum(use.owners.get(name, 0) for use in refused.tiers.values() for name in states)
    assert nbytes_at_home >= 14 * NUM_PARAMETERS
    assert refused.tier(Tier.DEVICE).owners["non-model data"] > 0
    # What it says is enough is enough, and 2 % less of either is not.
    need = {f"{name}_memory": use.need_nbytes for name, use in refused.tiers.items()}
    need = {name: max(nbytes, budgets[name]) for name, nbytes in need.items()}
    assert plan_if_fits(*arrange(MODEL, "rtx4090", batch_size=2, **need)) is not None
    for name in short:
        less = {**need, f"{name}_memory": int(0.98 * need[f"{name}_memory"])}
        assert plan_if_fits(*arrange(MODEL, "rtx4090", batch_size=2, **less)) is None


@pytest.mark.parametrize("nbytes", ["1KiB", "100KiB"])
def test_chunks_that_may_take_too_little_are_what_is_short(nbytes, capsys):
    command = [*COMMAND, "--set", f"chunk_budget={nbytes}"]
    assert main(command) == 1
    verdict, _, row = joined(capsys.readouterr().out).partition(" device needs ")
    assert "does not fit: chunk_budget is too small: it must be at least " in verdict
    assert "too little on the" not in verdict
    assert "activations " in row
    value = verdict.partition("at least ")[2].split()[0]
    assert main([*COMMAND, "--set", f"chunk_budget={value}"]) == 0


def test_accumulation_and_processes():
    many = plan(MODEL, "8xh100", batch_size=2, num_micro_batches=4, world_size=2)
    assert many.fits
    assert many.chunks.num_on_device == many.chunks.num, "all of it fits there"
    assert math.isclose(many.speed.tokens_per_s * many.speed.seconds, 2 * 64 * 4 * 2)
    (line,) = [line for line in describe(many).splitlines() if line.startswith("copies ")]
    assert line.endswith(f" per step, {format_nbytes(many.speed.sent_nbytes)} between processes")
    with pytest.raises(ConfigError, match="need as many devices, num_devices is 1; give --machine 2xh100, or use"):
        plan(MODEL, "h100", world_size=2)
    with pytest.raises(ConfigError, match=r"processes \(0\) must be at least 1"):
        plan(MODEL, "h100", world_size=0)


@pytest.mark.parametrize(
    ("machine", "dtype", "is_said"), [("v100", "bf16", 1), ("v100", "fp16", 0), ("h100", "bf16", 0)]
)
def test_it_says_that_a_device_does_not_compute_in_a_type(machine, dtype, is_said):
    found = plan("gpt2:n_layer=1,n_embd=32,n_head=2,vocab_size=64", machine, dtype=dtype, length=16)
    assert len(found.remarks) == is_said
    assert describe(found).count("note      'v100' has no rate for bfloat16") == is_said


def test_images_are_counted_as_images(capsys):
    vit = "vit:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16,image_size=16,patch_size=8"
    assert main(["plan", vit, "--batch-size", "64", "--no-advice", "--device-memory", "64KiB"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan", vit, "--batch-size", "2", "--no-advice"]) == 0
    out = joined(capsys.readouterr().out)
    assert ", image-classification, bf16, 2 images, all activations kept" in out
    assert " images per second" in out
    assert " tokens" not in out


COMMAND = ["plan", MODEL, "--batch-size", "2", "--no-advice", "--host-memory", "64MiB"]


def test_the_command_prints_a_screen_and_writes_json(tight, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*COMMAND, "--device-memory", "6MiB", "--json", str(path)]) == 0
    out, _ = capsys.readouterr()
    memory, *others = out.partition("gpt2:")[0], *out.partition("\nfits\n")[2].splitlines()
    assert memory.startswith("Model data of 0.7 M parameters takes ")
    assert "of the host (128.00 GiB in all)." in joined(memory)
    assert joined(memory).endswith(" Sequences have 64 tokens (--seq-len).")
    first = "gpt2:... (0.7 M parameters), causal-lm, bf16, 2 x 64 tokens, all activations kept, on rtx4090 fits"
    assert first in joined(out)
    assert joined(describe(tight)) in joined(out)
    assert len(others) < 16
    assert main([*COMMAND, "--device-memory", "6MiB", "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert joined(describe(tight, is_verbose=True)) in joined(verbose)
    assert all(len(line) <= 80 for line in (out + verbose).splitlines())
    assert not re.search(r"\d\n +([KMG]iB|B|m?s)\b", verbose), "a number and its unit stay together"
    found = json.loads(path.read_text())
    assert found["fits"] is True
    assert found["speed"]["to_host_nbytes"] == tight.speed.to_host_nbytes


CROWDED = ["plan", MODEL, "--batch-size", "16", "--device-memory", "8MiB", "--host-memory", "64MiB"]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """What the command has written and printed of a plan that does not fit, with changes that do."""
    folder, out = tmp_path_factory.mktemp("crowded"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*CROWDED, "--json", str(folder / "p.json"), "--html", str(folder / "p.html")]) == 1
    return folder, out.getvalue()


def test_json_and_page_have_what_was_tried(crowded):
    folder, out = crowded
    found = json.loads((folder / "p.json").read_text())
    assert found["changes"]
    assert set(found["largest"]) == {"batch_size", "length"}
    assert found["largest"]["batch_size"] < 16
    assert found["largest"]["length"] < 64
    subject, given = arrange(MODEL, "rtx4090", batch_size=16, device_memory="8MiB", host_memory="64MiB")
    assert found["largest"]["length"] == search_below(Goal.MAX_LENGTH, subject, given).answer
    page = PageReader((folder / "p.html").read_text(encoding="utf-8"))
    assert found["failed"]
    sentences = [
        *(f"{change['text']}: {change['tokens_per_s']:,.0f} tokens per second" for change in found["changes"]),
        f"The largest batch that fits with 64 tokens: {found['largest']['batch_size']} (--batch-size ",
        f"The largest sequence that fits with a batch of 16: {found['largest']['length']} (--seq-len ",
    ]
    for sentence in sentences:
        assert joined(sentence) in joined(out)
        assert sentence in "".join(page.text)
    assert [change["gain"] for change in found["changes"]] == [None] * len(found["changes"])


@pytest.mark.long
def test_python_tries_changes_on_request(crowded):
    asked = {"batch_size": 16, "device_memory": "8MiB", "host_memory": "64MiB"}
    found = json.loads((crowded[0] / "p.json").read_text())
    tried = plan(MODEL, "rtx4090", **asked, advice=True)
    assert json.loads(tried.to_json()) == found
    assert isinstance(tried, hf_patrickstar.Plan)
    assert isinstance(tried.changes[0], hf_patrickstar.TriedChange)
    alone = plan(MODEL, "rtx4090", **asked)
    assert (alone.changes, alone.failed, alone.largest) == (None, (), None)
    assert dataclasses.replace(tried, changes=None, failed=(), largest=None) == alone


@pytest.mark.parametrize("kind", [Plan, TierUse, Chunks, Speed, TriedChange, Found])
def test_every_field_of_json_is_documented(kind):
    documented = re.findall(r"^        (\w+): ", kind.__doc__, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(kind)]


def test_kinds_of_bytes_are_those_of_one_moment(tight):
    device = tight.tier(Tier.DEVICE)
    assert sum(device.owners.values()) == device.need_nbytes
    assert device.moment.startswith(("forward of transformer.", "backward of transformer.", "backward of lm_head"))
    (row,) = [line for line in describe(tight).splitlines() if line.startswith("device ")]
    assert device.moment in row
    (row_of_chunks,) = [line for line in describe(tight).splitlines() if line.startswith("chunks ")]
    assert all(format_nbytes(n) in row_of_chunks for n in (tight.chunks.nbytes, tight.chunks.largest_nbytes))
    assert f"activations {format_nbytes(device.owners['non-model data'])}" in row


@pytest.mark.parametrize("cpu_embedding", [True, pytest.param(False, marks=pytest.mark.long)])
def test_more_memory_is_never_slower(cpu_embedding):
    """Within a percent, for a model that does not wait for Python, nor for one chunk less that the host updates."""
    model = (
        "llama:num_hidden_layers=12,hidden_size=2048,num_attention_heads=16,num_key_value_heads=4,"
        "intermediate_size=8192,vocab_size=32000"
    )
    # The norm of a gradient on the host makes the update of one chunk less there count for more.
    given = {"length": 2048 if cpu_embedding else 1024, "settings": {"cpu_embedding": cpu_embedding}}
    subject, training = arrange(model, "rtx4090", **given)
    for tier, sizes in (("device", (7, 9, 10, 14)), ("host", (6, 8, 10, 64))):
        memory = [{"device_nbytes": 8 * GIB, "host_nbytes": 64 * GIB, f"{tier}_nbytes": size * GIB} for size in sizes]
        machines = [dataclasses.replace(training.machine, **nbytes) for nbytes in memory]
        plans = [plan_if_fits(subject, dataclasses.replace(training, machine=machine)) for machine in machines]
        seconds = [found.speed.seconds for found in plans if found is not None]
        assert len(seconds) > 2
        assert all(more <= 1.01 * less for less, more in itertools.pairwise(seconds)), (tier, seconds)


def test_fewer_cores_of_the_host_are_slower():
    all_cores = plan(MODEL, "rtx4090", **TIGHT)
    two = plan(MODEL, "rtx4090", **TIGHT, host_cores=2)
    assert two.speed.seconds > all_cores.speed.seconds
    with pytest.raises(ConfigError, match=r"cores of the host: must be at least 1, got 0"):
        plan(MODEL, "rtx4090", host_cores=0)


def test_memory_is_told_before_a_step_is_planned(capsys, monkeypatch):
    def plan_for_runs(*given):
        told.append(capsys.readouterr().out)
        raise ConfigError("enough")

    told = []
    monkeypatch.setattr("hf_patrickstar.cli.plan_run.plan_for_runs", plan_for_runs)
    assert main(COMMAND) == 2
    assert told[0].startswith("Model data of 0.7 M parameters takes ")


def test_the_plan_is_there_before_changes_are_tried(capsys, monkeypatch):
    told = []

    def advise(subject, training, plan, progress):
        told.append(joined(describe(plan)) in joined(capsys.readouterr().out))
        return dataclasses.replace(plan, changes=())

    monkeypatch.setattr("hf_patrickstar.planner.advice.advise", advise)
    command = [word for word in COMMAND if word != "--no-advice"]
    assert main([*command, "--device-memory", "6MiB"]) == 0
    assert told == [True]
    assert capsys.readouterr().out.startswith("No change was found that makes a step 2 % faster.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "rtx409"], "machine 'rtx409' is not known"),
        (["--device-memory", "24"], "device memory: 24 is a number of bytes, less than 1 MiB; did you mean '24GiB'"),
        (["--set", "device_budget=1GiB"], "use --device-memory (device_memory in Python)"),
        (["--max-grad-norm", "-1"], "norm of gradients -1.0: it must be a positive number"),
        (["--json", ""], "--json: the name of the file is empty; name a file"),
        (["--json", "a.trace.json", "--html", "a.html"], "the timeline of --html: 'a.trace.json' is written by --json"),
        (["--optimizer", "lbfgs"], "its code, or that of the optimizer 'lbfgs', fails on tensors without values"),
        (
            ["--batch-size", "99999999999"],
            "batch of 99999999999 x 64: a step takes more than 1024.00 TiB, which cannot",
        ),
        (["--json", "/no/such/folder/plan.json"], "--json: '/no/such/folder/plan.json' cannot be written"),
    ],
)
def test_wrong_arguments_get_a_sentence(words, message, capsys, monkeypatch):
    monkeypatch.setattr(units, "LEAST_BUDGET_NBYTES", MIB)  # as outside of tests
    assert main([*COMMAND, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-patrickstar plan: ")
    assert error.count("\n") == 1
    assert message in error


def test_attention_that_drops_scores_writes_them_on_a_cpu():
    """Fused attention of an accelerator drops them inside of its kernel."""
    with_scores = {}
    for rate in (0.0, 0.1):
        for has_accelerator in (True, False):
            machine = dataclasses.replace(MACHINES["rtx4090"], has_accelerator=has_accelerator)
            found = plan(f"{MODEL},attn_pdrop={rate},resid_pdrop=0.0,embd_pdrop=0.0", machine, batch_size=4)
            with_scores[rate, has_accelerator] = found.tier(Tier.DEVICE).owners["non-model data"]
    assert with_scores[0.1, True] == with_scores[0.0, True]
    assert with_scores[0.1, False] >= with_scores[0.0, False] + 3 * 4 * 4 * 64 * 64 * 2, "scores of three layers"


def test_warnings_of_the_model_do_not_leak(monkeypatch):
    def make_model(self):
        warnings.warn("about nothing that a plan could change", stacklevel=1)
        return made(self)

    made = Subject.make_model
    monkeypatch.setattr(Subject, "make_model", make_model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan(MODEL, "rtx4090", length=18)  # none that was kept
    assert not found


def test_torch_does_not_log_what_is_told_in_a_sentence(monkeypatch, caplog):
    def fail(*args):
        logging.getLogger("torch._subclasses.fake_tensor").error("a traceback")
        raise RuntimeError("no shape")

    monkeypatch.setattr("hf_patrickstar.planner.planning.simulate", fail)
    with pytest.raises(ConfigError, match="no shape"):
        plan(MOE, "h100", length=16)
    assert not caplog.records


def test_one_process_sends_nothing(tight):
    assert tight.speed.sent_nbytes == 0
    assert not {"gathers", "reductions"} & set(tight.speed.busy)
    assert "process" not in describe(tight)


def test_what_binds_several_processes_is_in_what_is_busy():
    slow = dataclasses.replace(find_machine("8xh100"), link_bandwidth=1e8)
    found = plan(MODEL, slow, batch_size=2, world_size=2, settings={"placement": "host"})
    assert found.speed.binding in ("gathers", "reductions")
    assert found.speed.busy[found.speed.binding] == max(found.speed.busy.values())
    (line,) = [line for line in describe(found, is_verbose=True).splitlines() if line.startswith("busy ")]
    assert f"{found.speed.binding} {found.speed.busy[found.speed.binding]:.0%}" in line


def test_another_optimizer_is_named_and_clipping_only_where_it_is_done():
    found = plan(MODEL, "rtx4090", **TIGHT, optimizer="sgd", max_norm=None)
    slow = dataclasses.replace(MACHINES["rtx4090"], host_bandwidth=1e8)
    bound = plan(MODEL, slow, **TIGHT, optimizer="sgd", max_norm=None)
    assert bound.speed.binding == "host SGD"
    assert found.speed.clipped_seconds is None
    assert "Adam" not in describe(bound)
    assert "clipping" not in describe(found)


def test_it_says_what_binds_a_step_that_is_slower_than_its_bounds(tight):
    bound, chain = max(tight.speed.least_seconds, tight.speed.clipped_seconds), tight.speed.chain
    assert math.isclose(sum(chain.values()), tight.speed.seconds, rel_tol=0.01)
    for times, is_said in ((1.04, False), (1.1, True)):
        busy, chain = {**tight.speed.busy, "host": 0.5}, {"device": 0.5, "host": 0.25}
        speed = dataclasses.replace(tight.speed, seconds=times * bound, chain=chain, busy=busy)
        told = describe(dataclasses.replace(tight, speed=speed))
        assert (" s. In turn: device 0.5 s, host 0.25 s" in told) == is_said


def test_it_says_when_the_host_has_the_most_to_do(tight):
    full = dataclasses.replace(tight.speed, busy={**tight.speed.busy, "host": 0.97})
    (line,) = [line for line in describe(dataclasses.replace(tight, speed=full)).splitlines() if line[:5] == "limit"]
    assert line.split(maxsplit=1)[1].startswith(f"Python and launches on the host; then {full.binding} (")
