"""Pages stand alone, escape what comes from outside, and have a table behind every chart."""

import dataclasses
import json

import pytest
from pages import PageReader, check_alone, check_charts

from hf_patrickstar.cli.files import write_html
from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.blocks import Bullets, Cell, Fact, Page, Section, Table, Text
from hf_patrickstar.report.page import render
from hf_patrickstar.report.plan_page import plan_page
from hf_patrickstar.report.run_page import run_page, typical
from hf_patrickstar.report.run_record import Run, RunRecorder, record_folder
from hf_patrickstar.report.survey import Survey, SurveyedChunk, Tide
from hf_patrickstar.schedule.clock import Clock, Lane
from hf_patrickstar.units import MIB

EVIL = "<script>alert('x')</script>\"><img src=http://example.org/x.png>&amp;"
CHUNK = SurveyedChunk(3, "host", "bfloat16", 100, 80, 200, 1200, True, ((f"{EVIL}.weight", 80),))
FROZEN = SurveyedChunk(4, "device", "float32", 64, 64, 256, 0, False, (("bias", 64),))
TIDE = Tide(
    f"training:{EVIL}", 9 * MIB, MIB, 1, (1,), (3, 4), (MIB, 2 * MIB), (0, 0), (4 * MIB, 3 * MIB), (1, 0), (0, 2)
)
SURVEY = Survey(
    {"device": 9 * MIB, "host": 50 * MIB}, {"device": {EVIL: 7}, "host": {}}, (CHUNK, FROZEN), (TIDE,), (EVIL,)
)
ABOUT = {
    **{"model": EVIL, "model_class": EVIL, "device": EVIL, "num_parameters": 144, "num_trainable": 80, "batch_size": 2},
    **{"num_micro_batches": 1, "world_size": 1, "precision": "bfloat16", "settings": {"keep_fp32": [EVIL]}},
    **{"version": "0", "length": 8, "checkpointing": False},
}
PLAN = {
    **{"model": EVIL, "task": EVIL, "machine": EVIL, "num_parameters": 144, "num_trainable": 80, "batch_size": 2},
    **{"length": 8, "num_micro_batches": 1, "world_size": 1, "settings": {"dtype": EVIL}, "checkpointing": False},
    "tiers": {
        "device": {"budget_nbytes": 9 * MIB, "need_nbytes": 6 * MIB, "owners": {EVIL: 5 * MIB}},
        "host": {"budget_nbytes": 50 * MIB, "need_nbytes": 40 * MIB, "owners": {"param": 40 * MIB}},
    },
    "chunks": {"num": 2, "numel": 100, "utilisation": 0.9, "num_on_device": 1, "reasons": [EVIL]},
    "speed": {
        **{"seconds": 0.5, "tokens_per_s": 32.0, "binding": "host Adam", "least_seconds": 0.25, "clipped_seconds": 0.3},
        **{"busy": {"device": 0.5}, "to_device_nbytes": MIB, "to_host_nbytes": 2 * MIB},
    },
    **{"fits": True, "precision": "bfloat16"},
}
EARLIER_PLAN = {name: value for name, value in PLAN.items() if name != "precision"}


def row(step, loss, seconds=0.4):
    return {
        **{"step": step, "loss": loss, "seconds": seconds, "samples_per_s": 2 / seconds},
        **{"host_to_device_nbytes": 1000.0 * step, "device_to_host_nbytes": 500.0, "chunk_loads": 3.0},
        **{"prefetches": 2.0, "late_prefetches": 1.0, "chunk_evictions": 1.0, "waiting_seconds": 0.1},
        **{"device_total_step_peak_nbytes": 5 * MIB, "host_step_peak_nbytes": 41 * MIB},
        **{"device_total_peak_nbytes": 6 * MIB, "host_peak_nbytes": 42 * MIB},
    }


STEPS = (row(5, 3.0, seconds=9.0), row(10, None), row(15, 2.0), row(20, 1.5, seconds=0.6))
RUN = Run(ABOUT, SURVEY, STEPS, ({"step": 10, "eval_loss": 2.5},))


def make_timeline():
    clock = Clock()
    clock.wait(clock.put(Lane.COMPUTE, 6_000, EVIL), EVIL)
    return clock.timeline()


PAGES = {
    "plan": lambda: plan_page(
        PLAN,
        f"{EVIL}: 144 parameters",
        "fits",
        SURVEY,
        make_timeline(),
        changes=[EVIL],
        largest=[EVIL],
        trace_name=f"{EVIL}.json",
    ),
    "run": lambda: run_page(RUN, PLAN),
}


@pytest.mark.parametrize("name", PAGES)
def test_what_comes_from_outside_is_text(name):
    text = render(PAGES[name]())
    assert "<script" not in text
    assert "<img" not in text
    reader = PageReader(text)
    check_alone(reader, allowed=[item for item in reader.references if item.startswith("%3Cscript%3E")])
    check_charts(reader, least=4)
    said = "".join(reader.text)
    assert said.count(EVIL) >= 8
    assert f"{EVIL}.weight" in said


def test_it_can_be_used_without_a_mouse_and_in_the_dark():
    text = render(run_page(RUN))
    assert '<html lang="en">' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "default-src 'none'" in text
    assert text.count("<details") == text.count("<summary>") >= 8
    assert text.count('role="region" tabindex="0"') == text.count("<table>"), "a wide table is scrolled by keys"
    patterns = {"url(#fill-0)", "url(#fill-2)", "url(#fill-3)", "stroke-dasharray: 9 6", "stroke-dasharray: 1 6"}
    assert all(pattern in text for pattern in patterns)
    assert text.index("<h1>") < text.index("<h2") < text.index("<h3>")


def test_the_page_of_a_run_has_what_was_logged():
    reader = PageReader(render(run_page(RUN)))
    loss = reader.table("Loss")
    assert loss.column("step") == [5, 10, 15, 20, 10]
    assert loss.column("loss") == [3.0, None, 2.0, 1.5, 2.5]
    assert [line[1] for line in loss.rows] == [*["training"] * 4, "evaluation"]
    assert reader.table("Seconds per step").column("seconds") == [9.0, 0.4, 0.4, 0.6]
    assert reader.table("Throughput").column("samples per second") == [2 / 9, 5.0, 5.0, 2 / 0.6]
    assert reader.table("Bytes moved").column("host to device") == [5000, 10000, 15000, 20000]
    waits = reader.table("Waits per step")
    assert waits.column("share of the step") == [0.1 / 9, 0.25, 0.25, 0.1 / 0.6]
    assert reader.table("The tide").column("at once") == [6 * MIB, 6 * MIB]
    assert reader.table("Most bytes on the host in a step").column("most bytes") == [41 * MIB] * 4
    chunks = reader.table("All chunks")
    assert [line[1] for line in chunks.rows] == ["host", "device"]
    assert chunks.column("used") == [0.8, 1.0]
    assert typical(RUN, "seconds") == 0.4, "without the first log, whose steps were recorded"
    assert not [table for table in reader.tables if table.caption.startswith("Planned")]


def test_planned_is_beside_measured():
    reader = PageReader(render(run_page(RUN, PLAN)))
    table = reader.table("Planned for")
    assert table.column("planned")[:5] == [0.5, MIB, 2 * MIB, 6 * MIB, 40 * MIB]
    assert table.column("measured")[:5] == [0.4, 15000, 500, 5 * MIB, 41 * MIB]
    assert table.column("ratio")[0] == 0.8
    assert table.column("planned")[5:] == table.column("measured")[5:] == [2, 1]
    assert "not one of this run" not in "".join(reader.text)
    several = {**PLAN, "world_size": 2, "speed": {**PLAN["speed"], "sent_nbytes": MIB}}
    steps = tuple({**row, "sent_nbytes": 2.0 * MIB} for row in STEPS)
    run = dataclasses.replace(RUN, about={**RUN.about, "world_size": 2}, steps=steps)
    (cells,) = [
        row
        for row in PageReader(render(run_page(run, several))).table("Planned for").rows
        if row[0] == "bytes to other processes per step"
    ]
    assert cells[1:] == ["1.00 MiB", "2.00 MiB", "2"]
    other = PageReader(render(run_page(RUN, {**PLAN, "batch_size": 4})))
    assert "The plan is not one of this run: batch_size is 4 in the plan, 2 in the run." in "".join(other.text)
    assert "not one of this run" not in "".join(PageReader(render(run_page(RUN, EARLIER_PLAN))).text)
    refused = run_page(RUN, {**PLAN, "speed": None, "chunks": None, "fits": False})
    assert PageReader(render(refused)).table("Planned for").rows[0][1] == "not known"


def test_beside_a_run_that_evaluates_the_page_says_what_is_not_planned():
    said = "The plan is of steps of training alone, and this run evaluates, too"
    assert said in "".join(PageReader(render(run_page(RUN, PLAN))).text)
    assert said not in "".join(PageReader(render(run_page(RUN))).text), "nothing is compared"
    trains = Run(ABOUT, SURVEY, STEPS, ())
    assert said not in "".join(PageReader(render(run_page(trains, PLAN))).text)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("length", 16, "length is 16 in the plan, 8 in the run"),
        ("checkpointing", True, "checkpointing is True in the plan, False in the run"),
        ("precision", "float32", "precision is float32 in the plan, bfloat16 in the run"),
        ("num_trainable", 144, "num_trainable is 144 in the plan, 80 in the run"),
    ],
)
def test_a_plan_of_another_training_is_told(name, value, said):
    text = "".join(PageReader(render(run_page(RUN, {**PLAN, name: value}))).text)
    assert f"The plan is not one of this run: {said}." in text


def test_a_run_that_has_logged_nothing_yet_has_a_page():
    empty = Run(ABOUT, Survey({"device": 1, "host": 1}, {}, (), (), ()), (), ())
    reader = PageReader(render(run_page(empty)))
    check_charts(reader, least=2)
    assert "No training loss has been logged yet." in "".join(reader.text)


def test_of_a_long_run_some_logs_are_shown_with_the_last():
    steps = tuple(row(step, 1.0) for step in range(1, 1234))
    reader = PageReader(render(run_page(Run(ABOUT, SURVEY, steps, ()))))
    shown = reader.table("Loss").column("step")
    assert (len(shown), shown[-1]) == (500, 1233)
    assert "500 of 1233 logs are shown" in "".join(reader.text)


def test_parts_without_blocks_are_left_out():
    blocks = [Text("one"), Bullets(("two",), is_ordered=True), Table("three", ("a", "b"), ())]
    sections = (Section("full", "Full", blocks), Section("none", "None", []))
    reader = PageReader(render(Page("t", "s", "v", None, (Fact("label", Cell("4", 4), "note"),), sections)))
    check_alone(reader)
    assert reader.ids == ["fill-0", "fill-2", "fill-3", "main", "full"]
    assert {"one", "two", "4", "note"} <= set(reader.text)


def test_a_page_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    page = Page("t", "s", "v", None, (), ())
    with pytest.raises(ConfigError, match=f"--html: '{tmp_path}' cannot be written: Is a directory"):
        write_html(page, None, tmp_path, "measured")


# The command


@pytest.mark.parametrize(("about", "row"), [({"model": "m"}, STEPS[0]), (ABOUT, {"step": 1, "loss": 1.0})])
def test_a_record_that_lacks_something_is_told(about, row, tmp_path, capsys):
    recorder = RunRecorder(tmp_path, about, is_resumed=False)
    recorder.note_survey(SURVEY)
    recorder.note_step(row)
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hf-patrickstar report: the record of a run in '{record_folder(tmp_path)}' lacks ")
    assert err.count("\n") == 1


def test_the_command(tmp_path, capsys):
    recorder = RunRecorder(tmp_path, ABOUT, is_resumed=False)
    recorder.note_survey(SURVEY)
    recorder.note_step(STEPS[0])
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    assert main(["report", str(tmp_path)]) == 0
    path = tmp_path / "_patrickstar_report.html"
    assert capsys.readouterr().out == f"{path}: 1 logs of a training loss\n"
    assert "Planned and measured" not in path.read_text(encoding="utf-8")
    assert not (tmp_path / "_patrickstar_report.trace.json").exists(), "no step was measured"
    assert "trace.json" not in path.read_text(encoding="utf-8")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "a.html"), "--plan", str(plan)]) == 0
    assert "Planned and measured" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_trace_that_cannot_be_written_is_an_error_with_its_name(tmp_path, capsys):
    recorder = RunRecorder(tmp_path, ABOUT, is_resumed=False)
    recorder.note_timeline(make_timeline())
    recorder.note_survey(SURVEY)
    (tmp_path / "a.trace.json").mkdir()
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "a.html")]) == 2
    assert f"--html: '{tmp_path / 'a.trace.json'}' cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no record of a run"),
        (["--plan", "missing.json"], "--plan: 'missing.json' cannot be read: No such file"),
        (["--plan", "no.json"], "--plan: 'no.json' is not a plan"),
        (["--plan", "list.json"], "--plan: 'list.json' is not a plan"),
        (["--plan", "other.json"], "--plan: 'other.json' is not a plan"),
        (["--plan", "partly.json"], "--plan: 'partly.json' is not a plan"),
        (["--plan", "text.json"], "--plan: 'text.json' is not a plan"),
        (["--html", "missing/page.html"], "--html: 'missing/page.html' cannot be written"),
    ],
)
def test_a_command_that_cannot_work_says_so_in_a_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.json").write_text("no")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"lr": 1}')
    (tmp_path / "partly.json").write_text(json.dumps({**PLAN, "speed": {"busy": {}}}))
    (tmp_path / "text.json").write_text(json.dumps({**PLAN, "speed": "fast"}))
    if arguments:
        RunRecorder("run", ABOUT, is_resumed=False).note_survey(SURVEY)
    assert main(["report", "run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("hf-patrickstar report: ")
    assert message in err
