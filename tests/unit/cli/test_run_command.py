"""The command line of ``hf-patrickstar run``, and what it refuses."""

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from hf_patrickstar.cli.main import main
from hf_patrickstar.cli.run import split_program
from hf_patrickstar.integrations import post_import


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--patrickstar"], ([], ["train.py", "--patrickstar"])),
        (["--patrickstar", "train.py", "-m"], (["--patrickstar"], ["train.py", "-m"])),
        (["--patrickstar_config", "{}", "a.py"], (["--patrickstar_config", "{}"], ["a.py"])),
        (["--patrickstar_config={}", "a.py"], (["--patrickstar_config={}"], ["a.py"])),
        (["-m", "a.b", "--x"], (["-m", "a.b"], ["--x"])),
        (["--module=a.b", "--x"], (["--module=a.b"], ["--x"])),
        (["--inherit", "--", "-odd"], (["--inherit"], ["-odd"])),
        (["--help"], (["--help"], [])),
    ],
)
def test_options_before_the_program_are_those_of_the_command(words, expected):
    assert split_program(words) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no script; give the path of a file, -m MODULE, or --inherit and a command"),
        (["missing.py"], "there is no script 'missing.py'; give the path of a file"),
        (["-m", "no_such_module.at_all"], "there is no module 'no_such_module.at_all'; is it installed in this Python"),
        (["--inherit", "no-such-command"], "there is no script and no command 'no-such-command'"),
        (
            ["--patrickstar_config", "{}", "a.py"],
            "--patrickstar_config is given before the script but --patrickstar is",
        ),
        (["--patrickstar", "--patrickstar_config", "{", "a.py"], "is not JSON"),
        (["--patrickstar", "--patrickstar_config", '{"chunk_bugdet": 1}', "a.py"], "did you mean 'chunk_budget'"),
    ],
)
def test_wrong_arguments_are_one_sentence(words, said, capsys):
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert post_import.ASKED not in os.environ


def test_classes_that_are_known_already_are_not_replaced(tmp_path, capsys):
    import transformers.trainer  # noqa: F401

    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it must not run')")
    assert main(["run", str(script)]) == 2
    assert "'transformers.trainer' was imported before" in capsys.readouterr().err
    assert not post_import.is_installed()


def test_a_version_that_has_moved_a_class_is_named():
    library = ModuleType("transformers.trainer")
    with pytest.raises(
        post_import.MovedError, match=r"transformers \S+ has no class 'Trainer' in 'transformers.trainer'"
    ):
        post_import._replace_trainer(library)


def test_a_module_is_as_its_own_loader_makes_it(tmp_path, monkeypatch):
    (tmp_path / "found_later.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finder = post_import.PostImport({"found_later": lambda module: seen.append((module.VALUE, module.__name__))})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import found_later

    assert seen == [(1, "found_later")]
    assert type(found_later.__loader__) is type(found_later.__spec__.loader)
    assert type(found_later.__loader__).__name__ == "SourceFileLoader"
    del sys.modules["found_later"]


def test_what_is_asked_for_reaches_arguments_and_accelerators(monkeypatch, tmp_path):
    from hf_patrickstar import PatrickStarTrainingArguments

    assert not PatrickStarTrainingArguments(str(tmp_path), use_cpu=True).patrickstar
    monkeypatch.setenv(post_import.ASKED, json.dumps({"patrickstar": True, "patrickstar_config": '{"dtype": "fp32"}'}))
    made = PatrickStarTrainingArguments(str(tmp_path), use_cpu=True)
    assert made.patrickstar
    assert made.patrickstar_config["dtype"] == "fp32"
    own = PatrickStarTrainingArguments(str(tmp_path), use_cpu=True, patrickstar=True, patrickstar_config={})
    assert own.patrickstar_config["dtype"] == "auto"
    monkeypatch.setenv(post_import.ASKED, json.dumps({"patrickstar": False, "patrickstar_config": None}))
    assert not PatrickStarTrainingArguments(str(tmp_path), use_cpu=True).patrickstar


PROGRAM = """
import argparse, os, sys
print("argv", sys.argv[1:], __name__, os.path.basename(sys.path[0]) == os.path.basename(os.path.dirname(__file__)))
parser = argparse.ArgumentParser()
parser.add_argument("--status", type=int, default=0)
sys.exit(parser.parse_args().status)
"""


def test_a_program_keeps_its_words_its_status_and_its_customisation(tmp_path):
    """One that uses neither transformers nor Accelerate; inherited, with a sitecustomize of the user's own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('customised')")
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])}
    start = [sys.executable, "-m", "hf_patrickstar", "run"]
    ran = [
        subprocess.run([*start, *words], env=there, cwd=tmp_path, capture_output=True, text=True, check=False)
        for words in (["program.py", "--status", "5"], ["--inherit", "program.py"], ["program.py", "--patrickstar"])
    ]
    assert [process.returncode for process in ran] == [5, 0, 2]
    assert "argv ['--status', '5'] __main__ True" in ran[0].stdout
    assert ran[1].stdout.splitlines()[-2:] == ["customised", "argv [] __main__ True"]
    assert "it before the script" in ran[2].stderr.replace("\n", " ")
