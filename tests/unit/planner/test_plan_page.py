"""The page and the trace of a plan: their figures are those of the plan."""

import json
import re

import pytest
from support.pages import PageReader, check_alone, check_charts

from hf_patrickstar.cli.main import main
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.units import MIB, format_nbytes

MODEL = "gpt2:n_layer=3,n_embd=128,n_head=4,vocab_size=512,n_positions=64"
SHARE = "share of the step"
TIGHT = ["--batch-size", "2", "--device-memory", str(6 * MIB), "--host-memory", str(64 * MIB), "--no-advice"]


@pytest.fixture(scope="module", params=[(6 * MIB, 3), (None, 1)], ids=["tight", "roomy"])
def planned(request):
    device_memory, num_micro_batches = request.param
    given = {"device_memory": device_memory, "host_memory": 64 * MIB, "num_micro_batches": num_micro_batches}
    return plan_and_simulate(*arrange(MODEL, "rtx4090", batch_size=2, **given))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command has written for a plan that fits."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--html", str(folder / "p.html"), "--json", str(folder / "p.json")]
    assert main(["plan", MODEL, *TIGHT, *files]) == 0
    return folder


def test_the_tide_is_what_the_engine_had_on_the_device(planned):
    plan, recording = planned
    tides = recording.survey.tides
    assert [tide.key.split("/")[0] for tide in tides] == [trace.kind for trace in recording.traces]
    on_device = sum(recording.device_owners.values())
    assert max(max(tide.totals) for tide in tides) == on_device == plan.tier(Tier.DEVICE).need_nbytes
    for tide, trace, moved in zip(tides, recording.traces, recording.plans, strict=True):
        assert tide.copies == tuple(moved.chunk_nbytes)
        assert tide.others == tuple(visit.non_model_nbytes for visit in trace.visits)
        assert tide.limit_nbytes >= max(tide.totals)
        assert tide.fixed_nbytes == sum(recording.fixed.values())
        assert tide.forward_ends == trace.forward_ends


def test_every_parameter_is_in_one_chunk(planned):
    plan, recording = planned
    chunks = recording.survey.chunks
    names = [name for chunk in chunks for name, _ in chunk.parameters]
    assert len(names) == len(set(names))
    assert "transformer.h.2.mlp.c_fc.weight" in names
    assert sum(numel for chunk in chunks for _, numel in chunk.parameters) == plan.num_parameters
    assert all(sum(numel for _, numel in chunk.parameters) <= chunk.numel for chunk in chunks)
    assert sum(chunk.home == "device" for chunk in chunks) == plan.chunks.num_on_device
    assert plan.chunks.nbytes == sum(chunk.param_nbytes for chunk in chunks)
    assert plan.chunks.largest_nbytes == max(chunk.param_nbytes for chunk in chunks)
    host = sum(chunk.param_nbytes + chunk.state_nbytes for chunk in chunks if chunk.home == "host")
    assert host <= plan.tier(Tier.HOST).need_nbytes


def test_the_page_has_the_figures_of_the_plan(written):
    plan = json.loads((written / "p.json").read_text())
    reader = PageReader((written / "p.html").read_text(encoding="utf-8"))
    check_alone(reader, allowed=("p.trace.json",))
    check_charts(reader, least=2)
    speed, text = plan["speed"], "".join(reader.text)
    for figure in (speed["seconds"], speed["to_device_nbytes"], speed["to_host_nbytes"]):
        assert f'<data value="{figure}">' in (written / "p.html").read_text(encoding="utf-8")
    shares = dict(zip([row[0] for row in reader.table("Lanes").rows], reader.table("Lanes").column(SHARE), strict=True))
    assert shares["compute"] == pytest.approx(speed["busy"]["device"])
    assert shares["host -> device"] == pytest.approx(speed["busy"]["copies to the device"])
    for name, use in plan["tiers"].items():
        *kinds, total = reader.table(f"{name.capitalize()}, at its fullest moment").column("bytes")
        assert total == sum(kinds) == use["need_nbytes"], "the kinds are those of the moment with the most bytes"
        assert kinds == sorted(filter(None, use["owners"].values()), reverse=True)
    (chunks,) = [table for table in reader.tables if " chunks on the host: " in table.caption]
    assert len(chunks.rows) == plan["chunks"]["num"], "nothing is at home on the device"
    assert all(reason in text for reason in plan["chunks"]["reasons"])
    assert "It fits." in text
    assert "transformer.h.2.mlp.c_fc.weight" in text


def test_a_plan_that_does_not_fit_has_a_page_that_says_by_how_much(tmp_path, capsys):
    path = tmp_path / "small.html"
    command = ["plan", MODEL, "--device-memory", str(MIB // 2), "--host-memory", str(4 * MIB), "--no-advice"]
    assert main([*command, "--html", str(path), "--json", str(tmp_path / "small.json")]) == 1
    plan = json.loads((tmp_path / "small.json").read_text())
    reader = PageReader(path.read_text(encoding="utf-8"))
    check_alone(reader)
    text = "".join(reader.text)
    assert re.search(r"It does not fit: .* too little on the device, .* too little on the host\.", text)
    assert not reader.charts
    for name, use in plan["tiers"].items():
        *kinds, total = reader.table(f"{name.capitalize()}, at its fullest moment").column("bytes")
        assert total == sum(kinds)
        assert kinds == sorted(filter(None, use["owners"].values()), reverse=True)
        assert f"needed, of {format_nbytes(use['budget_nbytes'])}" in text


def test_the_page_of_several_processes_has_what_they_send(tmp_path):
    files = ["--html", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")]
    assert main(["plan", MODEL, "--machine", "8xh100", "--processes", "2", "--no-advice", *files]) == 0
    sent = json.loads((tmp_path / "p.json").read_text())["speed"]["sent_nbytes"]
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert sent > 0
    assert f'<dt>between processes</dt><dd><data value="{sent}">' in text
    assert {"gathers", "reductions"} <= {row[0] for row in PageReader(text).table("Lanes").rows}
