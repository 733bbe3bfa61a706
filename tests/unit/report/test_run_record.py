"""The record of a run: small, whole after a kill, and right after the run was resumed."""

import json
import logging
import math
import os
import shutil

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report import run_record
from hf_patrickstar.report.run_record import RUN, STEPS, RunRecorder, read_run, record_folder
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
    assert len((record_folder(tmp_path) / STEPS).read_text().splitlines()) == 3
    assert sorted(path.name for path in record_folder(tmp_path).iterdir()) == [RUN, STEPS]


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
    path = record_folder(tmp_path) / STEPS
    path.write_text(path.read_text()[:-9])
    assert [row["step"] for row in read_run(tmp_path).steps] == [1]
    record(tmp_path, [{"step": 2, "loss": 2.0}], is_resumed=True)
    assert [(row["step"], row["loss"]) for row in read_run(tmp_path).steps] == [(1, 1.0), (2, 2.0)]


def test_a_survey_is_written_when_it_has_changed(tmp_path):
    recorder = record(tmp_path, [])
    path = record_folder(tmp_path) / RUN
    path.unlink()
    recorder.note_survey(SURVEY)
    assert not path.exists()
    recorder.note_survey(Survey({"device": 11}, {}, (), (), ()))
    assert read_run(tmp_path).survey.budgets == {"device": 11}


@pytest.mark.parametrize("what", ["survey", "step"])
def test_a_disk_that_refuses_ends_the_record_and_not_the_run(what, tmp_path, caplog):
    record_folder(tmp_path).write_text("a file where the folder should be")
    recorder = RunRecorder(tmp_path, ABOUT, is_resumed=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            recorder.note_survey(SURVEY) if what == "survey" else recorder.note_step({"step": 1})
    (warning,) = caplog.messages
    assert f"'{record_folder(tmp_path)}' cannot be written" in warning


def test_the_record_leaves_the_output_directory_as_it_is(tmp_path):
    record(tmp_path / "out", [{"step": 1, "loss": 1.0}])
    assert list(tmp_path.iterdir()) == []
    assert json.loads((record_folder(tmp_path / "out") / RUN).read_text())["output_dir"] == str(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("link/out", "out", "out/../out"):
        assert len(read_run(tmp_path / name).steps) == 1


def test_the_record_of_an_earlier_version_is_read(tmp_path):
    record(tmp_path, [{"step": 1, "loss": 1.0}])
    shutil.move(record_folder(tmp_path), tmp_path / "_patrickstar")
    assert len(read_run(tmp_path).steps) == 1
    record(tmp_path, [{"step": step, "loss": 2.0} for step in (1, 2)])
    assert len(read_run(tmp_path).steps) == 2


def test_the_oldest_records_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "record_folder", lambda output_dir: tmp_path / os.path.basename(output_dir))
    monkeypatch.setattr(run_record, "_MOST_RECORDS", 2)
    for number, name in enumerate("abc"):
        record(name, [{"step": 1, "loss": 1.0}])
        os.utime(tmp_path / name, (number, number))
    os.utime(tmp_path / "b", (9, 9))
    record("b", [{"step": 1, "loss": 1.0}])
    record("d", [{"step": 1, "loss": 1.0}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_no_record_is_told_apart_from_a_bad_one(tmp_path):
    with pytest.raises(ConfigError, match=r"has no record of a run: name the output_dir of a run with --patrickstar"):
        read_run(tmp_path)
    record(tmp_path, [])
    path = record_folder(tmp_path) / RUN
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(ConfigError, match=r"^'.*run.json' has format 99, and this version reads 1"):
        read_run(tmp_path)
    for text in ("{", "[]", "{}", json.dumps({**values, "about": 3})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"run.json' is not the record of a run"):
            read_run(tmp_path)
