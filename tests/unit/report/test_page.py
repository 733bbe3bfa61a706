"""Pages stand alone, escape what comes from outside, and say what was planned or recorded."""

import dataclasses
import json

import pytest
from support.pages import PageReader, check_alone, check_charts

from hf_patrickstar.cli.main import main
from hf_patrickstar.report.page import Page, Table, render
from hf_patrickstar.report.plan_page import plan_page
from hf_patrickstar.report.run_page import run_page, typical
from hf_patrickstar.report.run_record import Run, RunRecorder
from hf_patrickstar.report.survey import Survey, SurveyedChunk, Tide
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.units import MIB, describe_wear

EVIL = "<script>alert('x')</script>\"><img src=http://example.org/x.png>&amp;"
CHUNKS = (
    SurveyedChunk(3, "host", "bfloat16", 100, 2 * MIB, 12 * MIB, True, ((f"{EVIL}.weight", 80),)),
    SurveyedChunk(4, "device", "float32", 64, 256, 0, False, (("bias", 64),)),
    SurveyedChunk(5, "host", "bfloat16", 100, MIB, 6 * MIB, True, (("weight", 100),)),
)
TIDE = Tide(f"training:{EVIL}", 9 * MIB, MIB, 1, (1,), (2 * MIB, MIB), (0, 0), (2 * MIB, 4 * MIB))
SURVEY = Survey({"device": 9 * MIB, "host": 50 * MIB}, CHUNKS, (TIDE,), (EVIL,))
SPANS = (Span(Lane.HOST, 0, 10, EVIL), Span(Lane.COMPUTE, 10, 100, EVIL, 0))
TIMELINE = Timeline(0, 100, SPANS, 0, (Wait(10, 20, EVIL),))
SHARED = {
    **{"model": EVIL, "num_parameters": 144, "num_trainable": 80, "batch_size": 2, "num_micro_batches": 1},
    **{"world_size": 1, "length": 8, "checkpointing": False, "precision": "bfloat16", "settings": {"dtype": EVIL}},
}
DEVICE = {"budget_nbytes": 9 * MIB, "need_nbytes": 6 * MIB, "owners": {EVIL: 5 * MIB, "param": MIB}, "moment": "head"}
HOST = {"budget_nbytes": 50 * MIB, "need_nbytes": 40 * MIB, "owners": {"param": 40 * MIB}, "moment": ""}
SPEED = {
    **{"seconds": 0.5, "tokens_per_s": 32.0, "binding": "host Adam", "least_seconds": 0.25, "clipped_seconds": 0.3},
    **{"to_device_nbytes": MIB, "to_host_nbytes": 2 * MIB, "sent_nbytes": 0, "disk_written_nbytes": 0},
}
PLAN = SHARED | {
    **{"task": EVIL, "machine": EVIL, "tiers": {"device": DEVICE, "host": HOST}, "speed": SPEED, "fits": True},
    **{"chunks": {"num": 3, "num_on_device": 1, "reasons": [EVIL]}, "unit": "tokens"},
}


def row(step, loss, seconds=0.4):
    return {
        **{"step": step, "loss": loss, "seconds": seconds, "samples_per_s": 2 / seconds, "sent_nbytes": 0.0},
        **{"host_to_device_nbytes": 1000.0 * step, "device_to_host_nbytes": 500.0, "waiting_seconds": 0.1},
        **{"device_total_step_peak_nbytes": 5 * MIB, "host_step_peak_nbytes": 22 * MIB},
    }


STEPS = (row(5, 3.0, seconds=9.0), row(10, None), row(15, 2.0), row(20, 1.5, seconds=0.6))
RUN = Run(SHARED | {"model_class": EVIL, "device": EVIL}, SURVEY, STEPS, ({"step": 10, "eval_loss": 2.5},), TIMELINE)


def plan_of(plan=PLAN, survey=SURVEY, timeline=TIMELINE):
    return plan_page(plan, f"{EVIL}: 144", "fits", survey, timeline, changes=[EVIL], largest=[EVIL], found=EVIL)


def read(page):
    return PageReader(render(page))


BOTH = [dataclasses.replace(plan_of(), trace_name=f"{EVIL}.json"), run_page(RUN, PLAN)]
both = pytest.mark.parametrize("page", BOTH, ids=["plan", "run"])


@both
def test_what_comes_from_outside_is_text_and_the_page_needs_nothing_else(page):
    text = render(page)
    assert not any(tag in text for tag in ("<script", "<img"))
    assert all(look in text for look in ("default-src 'none'", "url(#fill-0)", "stroke-dasharray", "scheme: dark"))
    assert text.count('role="region" tabindex="0"') == text.count("<table>"), "a wide table is scrolled by keys"
    reader = PageReader(text)
    check_alone(reader, allowed=[item for item in reader.references if item.startswith("%3Cscript%3E")])
    check_charts(reader, least=2)
    assert "".join(reader.text).count(EVIL) >= 8


@both
def test_both_pages_show_chunks_memory_and_time(page):
    reader = read(page)
    host = reader.table("2 chunks on the host: 21.00 MiB, sizes from 7.00 MiB to 14.00 MiB")
    assert (host.column("bytes"), host.column("used")) == ([14 * MIB, 7 * MIB], [0.8, 1.0])
    assert reader.table("1 chunk on the device, frozen: 256 B").rows[0][4] == "bias (64)"
    assert render(page).count("<details") == (3 if page.is_good else 4), "chunks of a tier are one box that opens"
    for tier, whole in (("Device", 6 * MIB), ("Host", (40 if page.is_good else 22) * MIB)):
        table = reader.table(f"{tier}, at its fullest moment")
        *kinds, total = table.column("bytes")
        assert (sum(kinds), total) == (whole, whole), "the kinds are those of one moment"
        assert table.column("share of the budget")[-1] == total / SURVEY.budgets[tier.lower()]
    assert ("moment (head)" in "".join(reader.text)) == (page.is_good is True)
    lanes = reader.table("Lanes")
    assert [line[0] for line in lanes.rows] == ["host", "compute"]
    assert (lanes.column("share of the step"), sum(lanes.column("critical path"))) == ([0.1, 0.9], 100e-9)
    assert lanes.rows[0] == ["host", "1e-05 ms", "10.0%", "1e-05 ms"]
    assert "M100 21.0H300V129.0H100Z" in render(page), "the wait of the host, in the first of two rows"
    waits = reader.table("What lanes wait for")
    assert (waits.rows[0][0], waits.column("share of the step")) == (f"host: {EVIL}", [0.2])


def test_a_plan_that_does_not_fit_has_no_step_and_says_what_is_needed():
    reader = read(plan_of({**PLAN, "speed": None, "chunks": None, "fits": False}, None, None))
    said = "".join(reader.text)
    assert "needed, of 9.00 MiB" in said
    assert reader.table("Device, at its fullest").column("bytes") == [5 * MIB, MIB, 6 * MIB]
    assert "per second" not in said
    page = Page("t", "s", "v", None, (), {"full": ["one", ["two"], Table("three", ("a", "b"), [])], "none": []})
    assert {"one", "two", "three"} <= set(read(page).text)
    assert "none" not in read(page).text, "parts without blocks are left out"


def test_the_page_of_a_run_has_what_was_logged():
    logs = read(run_page(RUN)).table("All logs")
    assert [line[0] for line in logs.rows] == ["5", "10", "15", "20"]
    assert (logs.column("loss"), logs.column("eval_loss")) == ([3.0, None, 2.0, 1.5], [None, 2.5, None, None])
    assert logs.column("host_to_device_nbytes") == [5000, 10000, 15000, 20000]
    assert "waiting_seconds" not in logs.header, "it never changes"
    assert typical(RUN, "seconds") == 0.4, "without the first log, whose step made the plan"
    steps = tuple(row(step, 1.0 / step) for step in range(1, 1234))
    logs = read(run_page(dataclasses.replace(RUN, steps=steps))).table("247 of 1233 logs")
    assert (len(logs.rows), logs.rows[-1][0]) == (248, "1233"), "with the last, and one of an evaluation"
    unlogged = read(run_page(dataclasses.replace(RUN, survey=Survey(SURVEY.budgets, (), (), ()), steps=())))
    assert "No training loss has been logged yet." in "".join(unlogged.text)


def test_planned_is_beside_measured():
    table = read(run_page(RUN, PLAN)).table("Planned for")
    assert table.column("planned") == [0.5, MIB, 2 * MIB, 6 * MIB, 40 * MIB, 3, 1]
    assert table.column("measured") == [0.4, 15000, 500, 5 * MIB, 22 * MIB, 3, 1]
    assert table.column("ratio")[0] == 0.8
    assert table.rows[1] == ["host to device per step", "1.00 MiB", "14.65 KiB", "0.0143"]
    refused = read(run_page(RUN, {**PLAN, "speed": None, "chunks": None, "fits": False}))
    assert refused.table("Planned for").rows[0] == ["seconds per step", "not known", "0.4 s", "not known"]


def test_states_on_a_drive_are_shown_with_its_wear():
    """They are no bytes of the host, and what a step writes is said even if it never changes."""
    chunks = (dataclasses.replace(CHUNKS[0], disk_nbytes=10 * MIB), *CHUNKS[1:])
    survey = Survey({**SURVEY.budgets, "disk": 80 * MIB}, chunks, (TIDE,), ())
    steps = tuple({**step, "disk_written_nbytes": 10.0 * MIB} for step in STEPS)
    speed, disk = SPEED | {"disk_written_nbytes": 10 * MIB}, {**HOST, "budget_nbytes": 80 * MIB}
    plan = {**PLAN, "speed": speed, "tiers": PLAN["tiers"] | {"disk": disk}}
    run = run_page(dataclasses.replace(RUN, survey=survey, steps=steps), plan)
    per_day = {}
    for page in (run, plan_of(plan, survey)):
        per_day[page.is_good] = [note for what, _, note in page.facts if what == "written to the disk"]
        assert [cell.value for what, cell, _ in page.facts if what == "written to the disk"] == [10 * MIB]
        captions = {table.caption for blocks in page.sections.values() for table in blocks if isinstance(table, Table)}
        assert any(text.startswith("1 chunk on the host, states on the disk: 14.00 MiB") for text in captions)
        assert any(text.startswith("1 chunk on the host: 7.00 MiB") for text in captions)
    assert per_day[None] == [describe_wear(10 * MIB, 0.4)]
    assert per_day[True] == [describe_wear(10 * MIB, 0.5)]
    reader = read(run)
    host = reader.table("Host, at its fullest moment")
    assert host.column("bytes") == [11 * MIB, 8 * MIB, 3 * MIB, 22 * MIB], "the peak of the host is 22 MiB"
    disk = reader.table("Disk, at its fullest moment")
    assert disk.column("bytes") == [10 * MIB, 10 * MIB]
    assert disk.column("share of the budget")[-1] == 1 / 8
    assert ["to the disk per step", "10.00 MiB", "10.00 MiB", "1"] in reader.table("Planned for").rows
    assert not [fact for page in BOTH for fact in page.facts if "disk" in fact[0]], "these have none"


def test_the_command(tmp_path, capsys):
    recorder = RunRecorder(tmp_path, RUN.about, is_resumed=False)
    recorder.note_survey(SURVEY)
    recorder.note_step(STEPS[0])
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert main(["report", str(tmp_path)]) == 0
    path = tmp_path / "_patrickstar_report.html"
    assert capsys.readouterr().out.startswith(f"{path}: 1 log")
    assert "trace.json" not in path.read_text(encoding="utf-8"), "no step was measured"
    recorder.timeline = TIMELINE
    recorder.note_survey(SURVEY)
    page = tmp_path / "a.html"
    assert main(["report", str(tmp_path), "--html", str(page), "--plan", str(tmp_path / "plan.json")]) == 0
    assert "Planned and measured" in page.read_text(encoding="utf-8")
    assert json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (None, "has no record of a run"),
        (["--plan", "other.json"], "--plan: 'other.json' is not a plan"),
        (["--plan", "partly.json"], "or the plan 'partly.json', lacks a figure"),
        (["--html", "missing/page.html"], "--html: 'missing/page.html' cannot be written"),
    ],
)
def test_a_command_that_cannot_work_says_so_in_a_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"no": "no", "other": "[]", "partly": json.dumps({**PLAN, "tiers": {}})}.items():
        (tmp_path / f"{name}.json").write_text(text)
    if arguments is not None:
        RunRecorder("run", RUN.about, is_resumed=False).note_survey(SURVEY)
    assert main(["report", "run", *(arguments or [])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("hf-patrickstar report: ")) == ("", 1, True)
    assert message in err
