"""What a training log says of the engine, and to whom: the console, other callbacks, the Trainer's history."""

import ast
import pathlib
import re

import pytest
from support.trainers import LogRecorder, make_trainer, tight, train
from transformers import HfArgumentParser

from hf_patrickstar import ConfigError, PatrickStarEngine, PatrickStarTrainer, PatrickStarTrainingArguments

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "report.md"
STOCK = ["loss", "grad_norm", "learning_rate", "epoch"]
BRIEF = ["patrickstar/device", "patrickstar/moved"]
FEW = {
    *("device_total_step_peak_nbytes", "host_step_peak_nbytes", "host_to_device_nbytes", "device_to_host_nbytes"),
    "waiting_seconds",
}
MOVED = {
    "offloaded_nbytes",
    "host_to_device_nbytes",
    "device_to_host_nbytes",
    "chunk_loads",
    "chunk_evictions",
    "chunk_hits",
    "prefetches",
    "late_prefetches",
    "waiting_seconds",
    "chunk_moves",
    "moved_home_to_device_nbytes",
    "moved_home_to_host_nbytes",
    *("all_gathers", "reduce_scatters", "sent_nbytes", "messages"),
    *("disk_read_nbytes", "disk_written_nbytes", "disk_seconds"),
}
STANDING = {
    *("device_step_peak_nbytes", "device_total_step_peak_nbytes", "host_step_peak_nbytes"),
    *("device_peak_nbytes", "device_total_peak_nbytes", "host_peak_nbytes"),
    *("device_budget_nbytes", "host_budget_nbytes"),
    *("skipped_steps", "diverged_steps", "recorded_steps", "retries", "chunks_in_margin"),
}


@pytest.mark.parametrize(("factor", "has_margin"), [(1.0, False), (14.0, True)])
def test_statistics_are_logged_per_step(tmp_path, factor, has_margin):
    config = {**tight(factor=factor), "device_budget": 2**30, "host_budget": 2**28}
    logs, kwargs = LogRecorder(), {"logging_steps": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 4}
    trainer, _ = train("gpt2", tmp_path, config, callbacks=[logs], patrickstar_logging="all", **kwargs)
    stats, entries = trainer.patrickstar_stats(), logs.figures()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [2, 4]
    numel = sum(parameter.numel() for parameter in trainer.model.parameters())
    for entry in entries:
        assert entry.keys() == MOVED | STANDING
        assert (entry["device_budget_nbytes"], entry["host_budget_nbytes"]) == (2**30, 2**28)
        assert 0 < entry["device_step_peak_nbytes"] <= entry["device_peak_nbytes"] <= config["chunk_budget"]
        assert entry["device_step_peak_nbytes"] < entry["device_total_step_peak_nbytes"], "activations count"
        assert entry["device_total_step_peak_nbytes"] <= entry["device_total_peak_nbytes"] < 2**30
        assert 0 < entry["host_step_peak_nbytes"] <= entry["host_peak_nbytes"] == stats["host_peak_nbytes"] < 2**28
        assert 0 < entry["host_to_device_nbytes"] <= 2 * 4 * numel
        assert entry["chunk_hits"] > 0
        assert (entry["chunk_evictions"] == 0) == has_margin, "beside the margin there is room for all others"
        assert 0 <= entry["late_prefetches"] <= entry["prefetches"] <= entry["chunk_loads"]
        assert (0 < entry["waiting_seconds"] < 60) == (entry["late_prefetches"] > 0)
        assert entry["recorded_steps"] == entry["diverged_steps"] == entry["skipped_steps"] == entry["retries"] == 0
        assert entry["moved_home_to_host_nbytes"] == 0
        assert entry["all_gathers"] == entry["reduce_scatters"] == entry["sent_nbytes"] == entry["messages"] == 0
        assert entry["disk_read_nbytes"] == entry["disk_written_nbytes"] == entry["disk_seconds"] == 0
    first, second = entries
    for key in MOVED:
        assert 2 * (first[key] + second[key]) <= stats[key] * (1 + 1e-9), key
    assert second["chunk_moves"] == second["moved_home_to_device_nbytes"] == 0, (
        "they have moved in before the first step"
    )
    if has_margin:
        num_moved = stats["chunks_in_margin"]
        assert first["chunks_in_margin"] == second["chunks_in_margin"] == 2 * first["chunk_moves"] == num_moved > 0
        assert first["moved_home_to_device_nbytes"] > 0
        assert second["device_to_host_nbytes"] == first["device_to_host_nbytes"] < 4 * numel
    else:
        assert first["chunks_in_margin"] == first["chunk_moves"] == first["moved_home_to_device_nbytes"] == 0
        assert first["device_to_host_nbytes"] == second["device_to_host_nbytes"] == 4 * numel
    assert all("patrickstar/chunk_loads" not in entry for entry in logs.logs if "loss" not in entry)


def test_every_figure_is_documented():
    """In the docstring of the statistics, and in the table of docs/report.md, which names no other figures."""
    for key in MOVED | STANDING:
        assert f"``{key}``" in PatrickStarEngine.stats.__doc__, key
    rows = re.findall(r"^\| (`patrickstar/.*?`) \| (.*?) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = {name.strip("`").removeprefix("patrickstar/"): kind for names, kind in rows for name in names.split(", ")}
    assert kinds == dict.fromkeys(MOVED, "per step") | dict.fromkeys(STANDING, "now")


# Who is told


def printed(text):
    """The logs with a training loss that are on the console."""
    return [ast.literal_eval(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE) if "'loss'" in line]


@pytest.mark.parametrize(("choice", "disable_tqdm"), [(None, True), ("off", False), ("all", False)])
def test_what_the_console_shows(choice, disable_tqdm, tmp_path, capsys):
    logs, kwargs = LogRecorder(), {} if choice is None else {"patrickstar_logging": choice}
    kwargs |= {"callbacks": [logs], "disable_tqdm": disable_tqdm, "logging_steps": 2}
    train("gpt2", tmp_path, tight(), **kwargs)
    numbers = {"off": set(), "all": MOVED | STANDING}.get(choice, FEW)
    told = [f"patrickstar/{key}" for key in numbers]
    lines = printed(capsys.readouterr().out)
    assert len(lines) == len(logs.figures()) == 2
    for line, log in zip(lines, [log for log in logs.logs if "loss" in log], strict=True):
        assert list(line)[:4] == STOCK
        assert sorted(log) == sorted([*STOCK, *told])
        if choice in ("off", "all"):
            assert sorted(list(line)[4:]) == sorted(told)
    if choice not in ("off", "all"):
        first, second = ({key: line[key] for key in list(line)[4:]} for line in lines)
        assert sorted(first) == BRIEF
        assert all(re.fullmatch(r"\d+\.\d\d KiB", text) for text in first.values())
        assert second in ({}, {key: second.get(key) for key in BRIEF}), "only when one has changed"
        assert second != first
        figures = logs.figures()[0]
        nbytes = figures["host_to_device_nbytes"] + figures["device_to_host_nbytes"]
        assert float(first["patrickstar/moved"].split()[0]) == pytest.approx(nbytes / 1024, abs=0.006)


@pytest.mark.parametrize("choice", ["brief", "all"])
def test_the_history_is_that_of_the_stock_trainer(choice, tmp_path):
    kwargs = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    stock, _ = train("gpt2", tmp_path / "stock", **kwargs)
    ours, _ = train("gpt2", tmp_path / "ours", tight(), patrickstar_logging=choice, **kwargs)
    for expected, actual in zip(stock.state.log_history, ours.state.log_history, strict=True):
        assert expected.keys() == actual.keys()
        for key in expected.keys() & {*STOCK, "eval_loss", "step"}:
            assert expected[key] == actual[key], key


def test_a_loss_that_is_logged_before_training(tmp_path):
    logs = LogRecorder()
    kwargs = {"patrickstar": True, "patrickstar_config": tight(), "trainer_kwargs": {"callbacks": [logs]}}
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, **kwargs)
    trainer.evaluate()
    trainer.log({"loss": 1.0})
    assert logs.figures()[-1].keys() == FEW


# The argument


def test_the_argument(tmp_path):
    parser = HfArgumentParser(PatrickStarTrainingArguments)
    path = tmp_path / "args.yaml"
    path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\npatrickstar_logging: off\n")
    assert parser.parse_yaml_file(str(path))[0].patrickstar_logging == "off", "which YAML reads as false"
    with pytest.raises(ConfigError, match="patrickstar_logging is 'loud'; it must be one of 'off', 'brief', 'all'"):
        PatrickStarTrainingArguments(str(tmp_path), patrickstar_logging="loud")
