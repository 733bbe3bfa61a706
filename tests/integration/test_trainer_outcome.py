"""What a console shows when a Trainer's run begins and ends."""

import dataclasses
import re
import sys

import pytest
from support import inside
from support.streams import simulated_streams
from support.trainers import make_trainer, run, tight, train
from transformers import PrinterCallback
from transformers.utils.logging import is_progress_bar_enabled

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.checkpoint import progress
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.setup.payloads import Payloads
from hf_patrickstar.tracing import kept_traces as kept_files

EXPECTED = r"patrickstar: [\d.]+ [KM] parameters \([\d.]+ [KM] trained\): model data takes .* on the host, and .*"
_SIZE = r"[\d.]+ \w+"
PEAKS = rf"peak {_SIZE} of 4.00 MiB on the device, {_SIZE} of {_SIZE} for chunks, {_SIZE} of 256.00 MiB on the host"
FIRST = rf"patrickstar: first planned step \(step 1\): [\d.e-]+ s; {PEAKS}"
LAST = (
    rf"patrickstar: 4 steps, [\d.e-]+ s each: (\d+)% .*, (\d+)% .*, (\d+)% .*, (\d+)% [^;]*; {PEAKS}(?:; to change.*)?"
)


def said(text):
    return [line for line in text.splitlines() if line.startswith("patrickstar: ")]


@pytest.mark.parametrize("disable_tqdm", [True, False], ids=["printer", "progress"])
def test_lines_at_the_beginning_and_at_the_end(disable_tqdm, tmp_path, capsys):
    config = {**tight(factor=2.0), "device_budget": 2**22, "host_budget": 2**28}
    kwargs = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    trainer, _ = train("gpt2", tmp_path, config, disable_tqdm=disable_tqdm, **kwargs)
    text = capsys.readouterr().out
    lines = said(text)
    for pattern, line in zip((EXPECTED, FIRST, LAST), lines, strict=True):
        assert re.fullmatch(pattern, line), line
    assert 97 <= sum(map(int, re.fullmatch(LAST, lines[2]).groups())) <= 103
    stats = trainer.patrickstar_stats()
    assert f"{stats['device_total_peak_nbytes'] / 2**20:.2f} MiB of 4.00" in lines[2] or "KiB" in lines[2]
    assert text.split(lines[1])[0].count("'loss'") == 1, "the first step was estimated"
    assert text.index(lines[0]) < text.index("'loss'"), "before the first step"
    assert text.index("'train_runtime'") < text.index(lines[2]), "after the last log"
    for name in ("computing_seconds", "settling_seconds", "updating_seconds"):
        assert 0 < stats[name] < 60
    assert stats["loading_seconds"] + stats["waiting_seconds"] <= stats["computing_seconds"]


def test_a_step_that_is_recorded_is_not_the_first_planned_one(recorded, tmp_path, capsys):
    train("gpt2", tmp_path, tight(factor=2.0))
    _, first, _ = said(capsys.readouterr().out)
    assert "first planned step (step 2): " in first


def test_off_says_nothing_and_neither_does_a_trainer_without_console(tmp_path, capsys):
    kwargs = {"patrickstar_config": tight(), "max_steps": 3}
    run(make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar_logging="off", **kwargs))
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, **kwargs)
    trainer.remove_callback(PrinterCallback)
    run(trainer)
    train("gpt2", tmp_path, max_steps=1)
    assert said(capsys.readouterr().out) == []


def test_what_is_expected_is_said_before_anything_is_allocated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Payloads, "allocate", lambda self: 1 / 0)
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(trainer)
    (line,) = said(capsys.readouterr().out)
    assert re.fullmatch(EXPECTED, line), line


def test_seconds_of_evaluation_and_saving_are_left_out(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hf_patrickstar.integrations.trainer_report.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("hf_patrickstar.memory.lanes.time.perf_counter_ns", lambda: round(now[0] * 1e9))
    kwargs = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, **kwargs)
    step, save = trainer.compute_loss, trainer.save_model

    def compute_loss(*args, **kwargs):
        loss = step(*args, **kwargs)
        now[0] += 2.0 if trainer.model.training else 100.0
        return loss

    def save_model(*args, **kwargs):
        now[0] += 1000.0
        return save(*args, **kwargs)

    trainer.compute_loss, trainer.save_model = compute_loss, save_model
    run(trainer)
    _, first, line = said(capsys.readouterr().out)
    assert "planned step (step 1): 2 s" in first
    assert line.startswith("patrickstar: 3 steps, 2 s each: 100% forward and backward, 0%"), line


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_disable_tqdm_is_for_all_bars(disable_tqdm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PROGRESS_AFTER_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    kwargs = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": disable_tqdm}
    train("gpt2", tmp_path, tight(), **kwargs)
    text = capsys.readouterr().err
    for what in ("Moving weights into chunks", "Writing model.safetensors"):
        assert (what in text) == (not disable_tqdm), what
    assert is_progress_bar_enabled()


def test_beside_lanes_the_clock_of_the_simulator_says_what_a_step_waits_for(tmp_path, capsys):
    slow = dataclasses.replace(MACHINES["rtx4090"], to_device_bandwidth=1e6, name="slow bus")
    config = {**tight(), "device_budget": 2**22, "host_budget": 2**28, "machine": slow}
    with simulated_streams():
        trainer, _ = train("gpt2", tmp_path, config, max_steps=3)
    *_, line = said(capsys.readouterr().out)
    cost = inside.estimated(trainer.patrickstar_engine)
    assert 0.8 < cost.copying_ns / cost.duration_ns <= 1 - cost.updating_ns / cost.duration_ns
    assert f"estimated for 'slow bus': {cost.copying_ns / cost.duration_ns:.0%} waiting for copies" in line
    assert re.search("to change first: .*(waits for copies|what the script does between steps)", line)


@pytest.fixture
def kept_traces(tmp_path, monkeypatch):
    """What plans leave, in a directory of the test."""
    place = tmp_path / "kept"
    place.mkdir()
    monkeypatch.setattr(kept_files, "directory", lambda kind: place)


def run_with_lanes(tmp_path, **settings):
    """Three steps on a simulated device of a known machine."""
    config = {**tight(), "device_budget": 2**22, "host_budget": 2**28, "machine": MACHINES["rtx4090"], **settings}
    with simulated_streams():
        trainer, _ = train("gpt2", tmp_path, config, max_steps=3)
    return trainer.patrickstar_engine


@pytest.mark.usefixtures("kept_traces")
def test_seconds_are_expected_where_a_plan_left_traces(tmp_path, capsys):
    engine = run_with_lanes(tmp_path)
    expected, first, *_ = said(capsys.readouterr().out)
    assert re.fullmatch(EXPECTED, expected)
    assert " s per step" not in expected, "nothing is known of the inputs"
    cost = inside.estimated(engine)
    assert re.search(rf"first planned step \(step 1\): [\d.e-]+ s \({cost.seconds:.3g} s estimated\); ", first)

    kept_files.keep_traces(inside.known(engine))
    again = run_with_lanes(tmp_path)
    expected, first, *_ = said(capsys.readouterr().out)
    assert expected.endswith(f", and about {cost.seconds:.3g} s per step by the rates of 'rtx4090'")
    assert "first planned step" in first
    assert inside.estimated(again) == cost == again.estimated, "the same as when the chunks had their homes"
