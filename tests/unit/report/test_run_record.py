"""The record of a run: small, whole after a kill, and right after the run was resumed."""

import json
import logging
import math

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.run_record import FOLDER, RUN, STEPS, RunRecorder, read_run
from hf_patrickstar.report.survey import Survey

SURVEY = Survey({"device": 10}, {"device": {"param": 4}}, (), (), ("because",))
ABOUT = {"model": "a model"}


def record(folder, rows, *, is_resumed=False):
    recorder = RunRecorder(folder, ABOUT, is_resumed=is_resumed)
    recorder.note_survey(SURVEY)
    for row in rows:
        recorder.note_step(row)
    return recorder


def test_what_was_recorded_is_read(tmp_path):
    record(tmp_path, [{"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "loss": math.nan}])
    run = read_run(tmp_path)
    assert (run.about, run.survey) == (ABOUT, SURVEY)
    assert run.steps == ({"step": 1, "loss": 2.5}, {"step": 2, "loss": None})
    assert run.evaluations == ({"step": 1, "eval_loss": 3.0},)
    assert len((tmp_path / FOLDER / STEPS).read_text().splitlines()) == 3
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [RUN, STEPS]


def test_a_new_run_replaces_the_record_and_a_resumed_one_goes_on(tmp_path):
    record(tmp_path, [{"step": step, "loss": 1.0} for step in range(1, 6)] + [{"step": 4, "eval_loss": 1.0}])
    record(tmp_path, [{"step": 4, "loss": 2.0}], is_resumed=True)
    run = read_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.steps] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert run.evaluations == (), "it was of the run that did not go on"
    record(tmp_path, [{"step": 2, "loss": 3.0}])
    assert [row["step"] for row in read_run(tmp_path).steps] == [2]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    record(tmp_path, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}])
    path = tmp_path / FOLDER / STEPS
    path.write_text(path.read_text()[:-9])
    assert [row["step"] for row in read_run(tmp_path).steps] == [1]
    record(tmp_path, [{"step": 2, "loss": 2.0}], is_resumed=True)
    assert [(row["step"], row["loss"]) for row in read_run(tmp_path).steps] == [(1, 1.0), (2, 2.0)]


def test_a_survey_is_written_when_it_has_changed(tmp_path):
    recorder = record(tmp_path, [])
    path = tmp_path / FOLDER / RUN
    path.unlink()
    recorder.note_survey(SURVEY)
    assert not path.exists()
    recorder.note_survey(Survey({"device": 11}, {}, (), (), ()))
    assert read_run(tmp_path).survey.budgets == {"device": 11}


@pytest.mark.parametrize("what", ["survey", "step"])
def test_a_disk_that_refuses_ends_the_record_and_not_the_run(what, tmp_path, caplog):
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    recorder = RunRecorder(tmp_path, ABOUT, is_resumed=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            recorder.note_survey(SURVEY) if what == "survey" else recorder.note_step({"step": 1})
    (warning,) = caplog.messages
    assert f"'{tmp_path / FOLDER}' cannot be written" in warning


def test_no_record_is_told_apart_from_a_bad_one(tmp_path):
    with pytest.raises(ConfigError, match=r"has no record of a run .*name the output_dir of a run with --patrickstar"):
        read_run(tmp_path)
    record(tmp_path, [])
    path = tmp_path / FOLDER / RUN
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(ConfigError, match=r"^'.*run.json' has format 99, and this version reads 1"):
        read_run(tmp_path)
    for text in ("{", "[]", "{}", json.dumps({**values, "about": 3})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"run.json' is not the record of a run"):
            read_run(tmp_path)
