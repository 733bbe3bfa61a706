"""The record of a run: whole after a kill, right after the run was resumed; the tide of a long step in it is short."""

import dataclasses
import json
import logging
import math
import os

import pytest

from hf_patrickstar.dist.order import Room
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report import run_record
from hf_patrickstar.report.run_record import RUN, STEPS, RunRecorder, read_run, record_folder
from hf_patrickstar.report.sections import tides
from hf_patrickstar.report.survey import MOST_MOMENTS, Survey, Tide
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait
from hf_patrickstar.schedule.move_plan import Actions, MovePlan
from hf_patrickstar.schedule.trace import Activation, Trace, Visit

SURVEY = Survey({"device": 10}, (), (), ("because",))
ABOUT = {"model": "a model"}


def record(folder, *rows, is_resumed=False):
    recorder = RunRecorder(folder, ABOUT, is_resumed=is_resumed)
    recorder.note_survey(SURVEY)
    for row in rows:
        recorder.note_step(row)
    return recorder


def losses(folder):
    return [(row["step"], row["loss"]) for row in read_run(folder).steps]


def test_what_was_recorded_is_read(tmp_path):
    recorder = record(tmp_path, {"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "loss": math.nan})
    run = read_run(tmp_path)
    assert (run.about, run.survey, run.timeline) == (ABOUT, SURVEY, None)
    assert losses(tmp_path) == [(1, 2.5), (2, None)]
    assert run.evaluations == ({"step": 1, "eval_loss": 3.0},)
    assert sorted(path.name for path in record_folder(tmp_path).iterdir()) == [RUN, STEPS]
    (record_folder(tmp_path) / RUN).unlink()
    recorder.note_survey(SURVEY)
    assert not (record_folder(tmp_path) / RUN).exists(), "it is the same survey"
    spans = (Span(Lane.HOST, 0, 5, "forward"), Span(Lane.COMPUTE, 1, 9, "backward", 0))
    timeline = Timeline(0, 9, spans, 0, (Wait(5, 2, "a copy", Lane.COMPUTE),), has_causes=False)
    recorder.timeline = timeline
    recorder.length = 16
    recorder.note_survey(SURVEY)
    run = read_run(tmp_path)
    assert (run.timeline, run.about["length"]) == (timeline, 16)
    assert run.timeline.waits_of(Lane.COMPUTE), "lanes are compared by identity"


def test_a_new_run_replaces_the_record_and_a_resumed_one_goes_on(tmp_path):
    record(tmp_path, *({"step": step, "loss": 1.0} for step in range(1, 6)), {"step": 4, "eval_loss": 1.0})
    record(tmp_path, {"step": 4, "loss": 2.0}, is_resumed=True)
    assert losses(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert read_run(tmp_path).evaluations == (), "it was of the run that did not go on"
    record(tmp_path, {"step": 2, "loss": 3.0})
    assert losses(tmp_path) == [(2, 3.0)]
    path = record_folder(tmp_path) / STEPS
    path.write_text(path.read_text()[:-9])
    assert losses(tmp_path) == [], "a line that was cut short is left out"
    record(tmp_path, {"step": 2, "loss": 2.0}, is_resumed=True)
    assert losses(tmp_path) == [(2, 2.0)]


def test_a_disk_that_refuses_ends_the_record_and_not_the_run(tmp_path, caplog):
    record_folder(tmp_path).write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        record(tmp_path, {"step": 1}, {"step": 2})
        RunRecorder(tmp_path, ABOUT, is_resumed=False).note_step({"step": 1})
    assert [f"'{record_folder(tmp_path)}' cannot be written" in message for message in caplog.messages] == [True] * 2


def test_the_oldest_records_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "record_folder", lambda output_dir: tmp_path / os.path.basename(output_dir))
    monkeypatch.setattr(run_record, "_MOST_RECORDS", 2)
    for name, seconds in (("a", 0), ("b", 9), ("c", 2)):
        record(name)
        os.utime(tmp_path / name, (seconds, seconds))
    record("d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_no_record_is_told_apart_from_a_bad_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no record of a run .* name the output_dir of a run with --patrickstar"):
        read_run(tmp_path)
    record(tmp_path)
    path = record_folder(tmp_path) / RUN
    values = json.loads(path.read_text())
    bad_waits = {"waits": [{"lane": "somewhere"}], "spans": []}
    broken = [json.dumps({**values, **change}) for change in ({"about": 3}, {"timeline": bad_waits}, {"survey": {}})]
    for text in ("{", "[]", "{}", *broken, json.dumps({**values, "format": 99})):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"run.json' cannot be read: .*; name the output_dir of another"
        ) as raised:
            read_run(tmp_path)
    assert "format 99, and this version of hf_patrickstar reads 2" in str(raised.value)


def test_moments_that_are_put_together_have_the_bytes_of_the_fullest_one():
    kinds = [(0, 0, 10), (0, 40, 0), (20, 10, 25), *[(0, 0, 0)] * (2 * MOST_MOMENTS - 2)]
    visits = tuple(Visit(0, (), others, gradients) for _, gradients, others in kinds)
    plan = MovePlan((Actions(),) * len(kinds), {}, tuple(copies for copies, _, _ in kinds))
    tide = Tide.of(Trace("training/1", (1,), visits, forward_ends=(2,)), plan, Room(70, None, 2, ()), 100, {})
    assert (tide.stride, len(tide.totals), tide.fixed_nbytes) == (3, 667, 30)
    assert list(tide.at_peak().values()) == [30, 20, 10, 25]
    assert tide.totals[:2] == (30 + 55, 30 + 2), "no moment has less than is there all the time"


def test_an_activation_that_leaves_is_named_by_the_next_parameter_that_is_alone_in_its_chunk():
    """A chunk of many small parameters is visited all over the model."""
    names = {0: ["norm.weight", "other.weight"], 1: ["first.weight"], 2: ["second.weight"]}
    visits = tuple(map(Visit, (1, 0, 2, 2, 0, 1)))
    activations = (Activation(0, 7, 0, 0, 5), Activation(3, 9, 1, 2, 4), Activation(4, 5, 2, 2, 3))
    trace = Trace("training/1", (1, 1, 1), visits, forward_ends=(3,), activations=activations, num_offloaded=2)
    plan = MovePlan((Actions(),) * len(visits), {}, (0,) * len(visits))
    tide = Tide.of(trace, plan, Room(70, None, 0, ()), 100, names)
    assert tide.offloaded == (("second.weight", 7), ("second.weight", 9))
    (*_, table) = tides(Survey({}, (), (tide,), ()))
    assert [(name, cell.value) for name, cell in table.rows] == list(tide.offloaded)
    assert len(list(tides(Survey({}, (), (dataclasses.replace(tide, offloaded=()),), ())))) == 1, "the chart alone"
