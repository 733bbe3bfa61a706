"""What a Trainer's run records for ``hf-patrickstar report``, and that the page says it."""

import json
import pathlib

import pytest
from support import inside
from support.disk import share_on_disk
from support.pages import PageReader, check_alone, check_charts
from support.streams import simulated_streams
from support.trainers import tight, train

from hf_patrickstar.cli.main import main
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.run_page import typical
from hf_patrickstar.report.run_record import read_run, record_folder
from hf_patrickstar.report.timeline import to_trace
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.units import describe_wear, format_nbytes

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "report.md"
RECORDED = {"patrickstar_report": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings = {**tight(factor=2.0), "device_budget": 2**22, "host_budget": 2**28}
    kwargs = {"logging_steps": 2, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 4}
    trainer, recorder = train("gpt2", folder, settings, gradient_accumulation_steps=2, **RECORDED, **kwargs)
    return trainer, recorder, read_run(folder), folder


def test_the_record_has_what_was_logged(trained):
    trainer, recorder, found, _ = trained
    assert [(row["step"], row["num_steps"]) for row in found.steps] == [(2, 2), (4, 2), (6, 2)]
    assert [row["loss"] for row in found.steps] == pytest.approx(recorder.losses)
    assert [row["step"] for row in found.evaluations] == [4, 6]
    for row in found.steps:
        assert 0 < row["seconds"] < 60
        assert row["samples_per_s"] == pytest.approx(4 * 2 / row["seconds"])
    stats = trainer.patrickstar_stats()
    assert found.steps[-1]["device_total_peak_nbytes"] == stats["device_total_peak_nbytes"]
    moved = sum(row["num_steps"] * row["host_to_device_nbytes"] for row in found.steps)
    assert moved <= stats["host_to_device_nbytes"], "the last evaluation, if any, comes after the last log"


def test_the_survey_is_that_of_the_engine(trained):
    trainer, _, found, _ = trained
    names = {name for chunk in found.survey.chunks for name, _ in chunk.parameters}
    assert names == {name for name, _ in trainer.model.named_parameters()}
    assert found.survey.budgets == {"device": 2**22, "host": 2**28}
    assert found.survey.reasons == trainer.patrickstar_engine.reasons
    assert [tide.key.split("/")[0] for tide in found.survey.tides] == ["training first", "training last"]
    peak = max(max(tide.totals) for tide in found.survey.tides)
    assert peak == found.steps[-1]["device_total_step_peak_nbytes"], "the last step followed these plans"
    assert found.about["settings"]["device_budget"] == 2**22
    assert (found.about["batch_size"], found.about["num_micro_batches"], found.about["world_size"]) == (4, 2, 1)
    length = max(len(row["input_ids"]) for row in trainer.train_dataset)
    assert (found.about["length"], found.about["checkpointing"]) == (length, False)


def test_the_page_says_it(trained, capsys):
    _, recorder, found, folder = trained
    assert main(["report", str(folder)]) == 0
    reader = PageReader((folder / "_patrickstar_report.html").read_text(encoding="utf-8"))
    check_alone(reader, allowed=("_patrickstar_report.trace.json",))
    check_charts(reader, least=5)
    logs = reader.table("All logs")
    assert list(filter(None, logs.column("loss"))) == pytest.approx(recorder.losses)
    assert list(filter(None, logs.column("eval_loss"))) == [row["eval_loss"] for row in found.evaluations]
    assert list(filter(None, logs.column("seconds"))) == [row["seconds"] for row in found.steps]
    for tier, name in (("Device", "device_total_step_peak_nbytes"), ("Host", "host_step_peak_nbytes")):
        *kinds, total = reader.table(f"{tier}, at its fullest moment").column("bytes")
        assert sum(kinds) == total == found.steps[-1][name], "the kinds are those of one moment"


def test_a_run_with_states_on_a_drive_says_what_it_wears(tmp_path):
    """The engine's own count of bytes is on the page, and no state is counted on the host and on the drive."""
    settings = {**tight(factor=2.0), "disk_path": str(tmp_path), "disk_budget": 2**28}
    with share_on_disk(0.5):
        trainer, _ = train("gpt2", tmp_path, settings, logging_steps=2, max_steps=6, **RECORDED)
    found, owners = read_run(tmp_path), trainer.patrickstar_engine.ledger.owners
    on_disk = sum(owners(Tier.DISK).values())
    assert sum(chunk.disk_nbytes for chunk in found.survey.chunks) == on_disk > 0
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "_patrickstar_report.html").read_text(encoding="utf-8")
    reader = PageReader(text)
    assert reader.table("Disk, at its fullest moment").column("bytes")[-1] == on_disk
    (host,) = [row[1] for row in reader.table("Host, at its fullest").rows if row[0].startswith("masters")]
    held = sum(nbytes for name, nbytes in owners(Tier.HOST).items() if name in ("master", "exp_avg", "exp_avg_sq"))
    assert host == format_nbytes(held)
    (written,) = {row["disk_written_nbytes"] for row in found.steps[1:]}
    assert describe_wear(round(written), typical(found, "seconds")) in text


def test_the_lanes_of_one_step_are_recorded(trained):
    """Forward and backward of two micro-batches, the update, and all that crossed in between."""
    trainer, _, found, folder = trained
    timeline = found.timeline
    busy = timeline.busy_ns()
    for lane in (Lane.COMPUTE, Lane.HOST, Lane.TO_DEVICE):
        assert 0 < busy[lane] < timeline.duration_ns, lane
    assert busy[Lane.COMPUTE] + busy[Lane.HOST] <= timeline.duration_ns < 60e9
    parts = {span.what for span in timeline.own_spans if span.lane in (Lane.COMPUTE, Lane.HOST)}
    assert parts == {"forward", "backward", "update"}
    assert main(["report", str(folder)]) == 0
    html = (folder / "_patrickstar_report.html").read_text(encoding="utf-8")
    assert "Measured once" in html
    assert "Simulated" not in html
    trace = json.loads((folder / "_patrickstar_report.trace.json").read_text(encoding="utf-8"))
    assert trace == to_trace(timeline, f"measured on {found.about['device']}")
    assert not inside.is_timed(trainer.patrickstar_engine), "one step was watched"


@pytest.mark.own_streams
def test_the_lanes_of_an_accelerator_are_recorded(tmp_path):
    """Over simulated streams: what crossed in the step is what the lanes have, and the page says where who waited."""
    with simulated_streams():
        trainer, _ = train("gpt2", tmp_path, tight(factor=2.0), max_steps=4, **RECORDED)
        found = read_run(tmp_path)
        assert not inside.is_timed(trainer.patrickstar_engine), "one step was watched"
    timeline, row = found.timeline, found.steps[1]
    for lane, key in ((Lane.TO_DEVICE, "host_to_device_nbytes"), (Lane.TO_HOST, "device_to_host_nbytes")):
        spans = [span for span in timeline.own_spans if span.lane is lane]
        assert sum(int(span.what.split()[0]) for span in spans) == row[key] > 0
    busy = timeline.busy_ns()
    for lane in (Lane.COMPUTE, Lane.HOST, Lane.HOST_WORK):
        assert 0 < busy[lane] <= timeline.duration_ns < 60e9, lane
    assert {span.what for span in timeline.own_spans if span.lane is Lane.COMPUTE} >= {"forward", "backward"}
    assert main(["report", str(tmp_path)]) == 0
    html = (tmp_path / "_patrickstar_report.html").read_text(encoding="utf-8")
    reader = PageReader(html)
    check_alone(reader, allowed=("_patrickstar_report.trace.json",))
    check_charts(reader, least=5)
    assert "Measured once" in html
    assert "critical path" not in reader.table("Lanes").header
    assert any(row[0].startswith("compute: ") for row in reader.table("What lanes wait for").rows)


def test_the_survey_follows_the_plans(tmp_path):
    trainer, _ = train("gpt2", tmp_path, tight(factor=14.0), max_steps=4, **RECORDED)
    found = read_run(tmp_path)
    assert found.survey == trainer.patrickstar_engine.survey()
    assert len(found.survey.tides) == 1, "the first step has no plan, and the second one has"
    spans = [span for span in found.timeline.own_spans if span.lane is Lane.TO_HOST]
    nbytes, moved = sum(int(span.what.split()[0]) for span in spans), found.steps[1]["device_to_host_nbytes"]
    assert nbytes == moved, "the lanes are those of the second step"
    num_inside = sum(chunk.home == "device" for chunk in found.survey.chunks)
    assert num_inside == trainer.patrickstar_stats()["chunks_in_margin"] > 0


def test_a_resumed_run_goes_on_with_its_record(tmp_path):
    kwargs = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **RECORDED}
    train("gpt2", tmp_path, tight(), **kwargs)
    first = read_run(tmp_path).steps
    resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    train("gpt2", tmp_path, tight(), train_kwargs=resumed, **kwargs)
    found = read_run(tmp_path).steps
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found[:2] == first[:2]
    assert [row["loss"] for row in found] == [row["loss"] for row in first]
    assert found[2]["seconds"] != first[2]["seconds"]


# The argument


def test_without_a_report_nothing_is_written(tmp_path):
    for is_wanted in (False, True):
        folder = tmp_path / str(is_wanted)
        train("gpt2", folder, tight(), max_steps=1, patrickstar_logging="off", patrickstar_report=is_wanted)
        assert record_folder(folder).exists() == is_wanted


def test_every_field_is_documented(trained):
    """On docs/report.md, figures of the engine with their prefix."""
    _, _, found, _ = trained
    text = DOCS.read_text(encoding="utf-8")
    for row in (*found.steps, *found.evaluations, found.about):
        assert [name for name in row if f"`{name}`" not in text and f"`patrickstar/{name}`" not in text] == []
