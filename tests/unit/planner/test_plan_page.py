"""The page, the picture and the trace of a plan: their figures are those of the plan."""

import json
import re
import sys

import pytest
from pages import PageReader, check_alone, check_charts
from PIL import Image

from hf_patrickstar.cli.main import main
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.units import MIB, format_nbytes

MODEL = "gpt2:n_layer=3,n_embd=128,n_head=4,vocab_size=512,n_positions=64"
ARGUMENTS = {
    **{"task": None, "batch_size": 2, "length": None, "world_size": 1, "checkpointing": False, "dtype": "bf16"},
    **{"optimizer": "adamw", "max_norm": 1.0, "settings": None},
}
TIGHT = ["--batch-size", "2", "--device-memory", str(6 * MIB), "--host-memory", str(64 * MIB), "--no-advice"]


@pytest.fixture(scope="module", params=[(6 * MIB, 1), (6 * MIB, 3), (None, 1)], ids=["tight", "accumulating", "roomy"])
def planned(request):
    device_memory, num_micro_batches = request.param
    given = {"device_memory": device_memory, "host_memory": 64 * MIB, "num_micro_batches": num_micro_batches}
    return plan_and_simulate(*arrange(MODEL, "rtx4090", **ARGUMENTS, **given))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command has written for a plan that fits."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--html", str(folder / "p.html"), "--png", str(folder / "p.png"), "--json", str(folder / "p.json")]
    assert main(["plan", MODEL, *TIGHT, *files]) == 0
    return folder


def test_the_tide_is_what_the_engine_had_on_the_device(planned):
    plan, recording = planned
    tides = recording.survey.tides
    assert [tide.key.split("/")[0] for tide in tides] == [trace.kind for trace in recording.traces]
    assert max(max(tide.totals) for tide in tides) == recording.device_nbytes == plan.tier(Tier.DEVICE).need_nbytes
    for tide, trace, moved in zip(tides, recording.traces, recording.plans, strict=True):
        assert tide.chunks == tuple(visit.chunk_index for visit in trace.visits)
        assert tide.others == tuple(visit.non_model_nbytes for visit in trace.visits)
        assert sum(tide.loads) == moved.num_loads
        assert tide.limit_nbytes >= max(tide.totals)
        assert tide.fixed_nbytes == recording.rules.fixed_nbytes
        assert tide.forward_ends == trace.forward_ends


def test_every_parameter_is_in_one_chunk(planned):
    plan, recording = planned
    chunks = recording.survey.chunks
    names = [name for chunk in chunks for name, _ in chunk.parameters]
    assert len(names) == len(set(names))
    assert "transformer.h.2.mlp.c_fc.weight" in names
    assert sum(numel for chunk in chunks for _, numel in chunk.parameters) == plan.num_parameters
    assert all(sum(numel for _, numel in chunk.parameters) == chunk.used_numel <= chunk.numel for chunk in chunks)
    assert sum(chunk.home == "device" for chunk in chunks) == plan.chunks.num_on_device
    host = sum(chunk.param_nbytes + chunk.state_nbytes for chunk in chunks if chunk.home == "host")
    assert host <= plan.tier(Tier.HOST).need_nbytes


def test_a_survey_is_read_as_it_was_written(planned):
    survey = planned[1].survey
    assert Survey.from_dict(json.loads(json.dumps(survey.to_dict()))) == survey


def test_the_page_has_the_figures_of_the_plan(written):
    plan = json.loads((written / "p.json").read_text())
    reader = PageReader((written / "p.html").read_text(encoding="utf-8"))
    check_alone(reader, allowed=("p.trace.json",))
    check_charts(reader, least=4)
    speed = plan["speed"]
    bounds = reader.table("What bounds a step").column("time or share")
    expected = [speed["seconds"], speed["least_seconds"], speed["clipped_seconds"]]
    assert bounds == [*expected, *sorted(speed["busy"].values(), reverse=True)]
    assert reader.table("Bytes that cross").column("bytes") == [speed["to_device_nbytes"], speed["to_host_nbytes"]]
    for name, use in plan["tiers"].items():
        nbytes = reader.table(f"Most bytes on the {name}").column("most bytes")
        assert nbytes == [use["need_nbytes"], *sorted(use["owners"].values(), reverse=True), use["budget_nbytes"]]
    tide = reader.table("The tide of")
    assert max(tide.column("at once")) == plan["tiers"]["device"]["need_nbytes"]
    sums = zip(*(tide.column(name) for name in ("copies", "gradients", "non-model data")), strict=True)
    assert tide.column("at once") == [sum(row) for row in sums], "nothing is at home on the device"
    chunks = reader.table("All chunks")
    assert len(chunks.rows) == plan["chunks"]["num"]
    text = "".join(reader.text)
    assert all(reason in text for reason in plan["chunks"]["reasons"])
    assert "It fits." in text
    assert "transformer.h.2.mlp.c_fc.weight" in text


def test_the_page_of_several_processes_has_what_they_send(tmp_path):
    files = ["--html", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")]
    assert main(["plan", MODEL, "--machine", "8xh100", "--processes", "2", "--no-advice", *files]) == 0
    speed = json.loads((tmp_path / "p.json").read_text())["speed"]
    reader = PageReader((tmp_path / "p.html").read_text(encoding="utf-8"))
    moved = [speed[name] for name in ("to_device_nbytes", "to_host_nbytes", "sent_nbytes")]
    assert reader.table("Bytes that cross").column("bytes") == moved
    assert moved[2] > 0
    assert {"busy: gathers", "busy: reductions"} <= {what for what, _ in reader.table("What bounds a step").rows}


def test_the_trace_and_the_picture_lie_beside_it(written):
    trace = json.loads((written / "p.trace.json").read_text())
    end = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    plan = json.loads((written / "p.json").read_text())
    assert end == pytest.approx(plan["speed"]["seconds"] * 1e6, abs=0.01)
    with Image.open(written / "p.png") as picture:
        assert picture.size == (1440, 1080)


def test_a_plan_that_does_not_fit_has_a_page_that_says_by_how_much(tmp_path, capsys):
    path = tmp_path / "small.html"
    command = ["plan", MODEL, "--device-memory", str(MIB), "--host-memory", str(4 * MIB), "--no-advice"]
    assert main([*command, "--html", str(path), "--json", str(tmp_path / "small.json")]) == 1
    plan = json.loads((tmp_path / "small.json").read_text())
    reader = PageReader(path.read_text(encoding="utf-8"))
    check_alone(reader)
    check_charts(reader, least=2)
    text = "".join(reader.text)
    assert re.search(r"It does not fit: .* too little on the device, .* too little on the host; .* are there\.", text)
    assert "The tide" not in text
    for name, use in plan["tiers"].items():
        rows = reader.table(f"Most bytes on the {name}").column("most bytes")
        assert rows == [use["need_nbytes"], *sorted(use["owners"].values(), reverse=True), use["budget_nbytes"]]
        assert len(rows) > 3
        assert f"At least {format_nbytes(use['need_nbytes'])} of {format_nbytes(use['budget_nbytes'])} " in text
    assert main([*command, "--png", str(tmp_path / "small.png")]) == 1
    assert "no step to draw, because the plan does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--html", "--png", "--json"])
def test_a_file_that_cannot_be_written_is_named_at_once(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.planner.planning.plan_and_simulate", lambda *_: pytest.fail("it has planned"))
    path = tmp_path / "missing" / "file"
    assert main(["plan", MODEL, *TIGHT, option, str(path)]) == 2
    assert re.fullmatch(rf"hf-patrickstar plan: .*'{path}' cannot be written: .*\n", capsys.readouterr().err)


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_patrickstar.planner.planning.plan_and_simulate", lambda *_: pytest.fail("it has planned"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", MODEL, *TIGHT, "--png", str(tmp_path / "p.png")]) == 2
    assert "pip install 'hf_patrickstar[plots]', or leave the picture out\n" in capsys.readouterr().err
