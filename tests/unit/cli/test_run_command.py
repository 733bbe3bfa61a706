"""``hf-patrickstar run`` trains other people's scripts as they are, and to the same bits."""

import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
from safetensors.torch import load_file
from support.quantized import saved
from support.scripts import trl_arguments, write_script, write_stock_scripts, write_trl_inputs

from hf_patrickstar.cli import inherited, patching
from hf_patrickstar.cli import run as run_command
from hf_patrickstar.cli.main import main
from hf_patrickstar.report.run_record import record_folder

TESTS = pathlib.Path(__file__).parents[2]
RUN = ["-m", "hf_patrickstar", "run"]
SETTINGS = ["--patrickstar_config", '{"chunk_numel": 16384}']
COMMON = ["--use_cpu", "--max_steps", "3", "--logging_steps", "1", "--per_device_train_batch_size", "2"]
COMMON += ["--learning_rate", "5e-3", "--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no"]


def start(words, folder, **variables):
    search = os.pathsep.join([*filter(None, [variables.pop("search", None)]), str(TESTS.parent), str(TESTS)])
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": search}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, **quiet, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=170)
    finally:
        process.kill()
    assert process.returncode == 0, f"{out[-3000:]}\n{err[-6000:]}"
    return out, err


def told(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"losses"')]


def test_a_script_is_the_same_to_the_bit_with_the_flag_and_without(tmp_path):
    write_stock_scripts(tmp_path)
    words = ["clm.py", "--output_dir", "out", *COMMON]
    out, err = finish(start([*RUN, "all.py", json.dumps([words, [*words, "--patrickstar", *SETTINGS]])], tmp_path))
    plain, chunked = told(out)
    assert not plain["is_chunked"]
    assert chunked == {**plain, "is_chunked": True}
    assert "hf-patrickstar run" not in err


INTERRUPT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
IN_A_STEP = f"""
class Interrupts(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        {INTERRUPT}


callbacks.append(Interrupts())
"""


@pytest.mark.parametrize("when", ["libraries are imported", "it trains", "a plan is made"])
def test_ctrl_c_ends_a_command_with_one_line(when, tmp_path):
    words, search = ["-m", "hf_patrickstar", "plan", "gpt2", "--machine", "h100"], None
    if when == "libraries are imported":
        (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
        search = str(tmp_path)
    elif when == "a plan is made":
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nclass Finder:\n  def find_spec(self, name, path=None, target=None):\n"
            f"    if name == 'hf_patrickstar.planner.planning': {INTERRUPT.replace('; ', ';')}\n"
            "sys.meta_path.insert(0, Finder())"
        )
        search = str(tmp_path)
    else:
        script = write_script(tmp_path, IN_A_STEP)
        words = [*RUN, script, "--output_dir", "out", *COMMON, "--patrickstar", *SETTINGS]
    process = start(words, tmp_path, search=search)
    _, err = process.communicate(timeout=170)
    assert process.returncode == 130, err[-3000:]
    assert err.endswith("\nhf-patrickstar: interrupted\n")  # before it is what other libraries say
    assert "Traceback" not in err


@pytest.mark.long
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_so_is_a_script_that_trains_an_adapter_over_a_quantized_base(precision, tmp_path):
    pytest.importorskip("bitsandbytes")
    write_stock_scripts(tmp_path)
    words = ["qlora.py", saved(3).name, "--output_dir", "out", *COMMON, *precision]
    process = start([*RUN, "all.py", json.dumps([words, [*words, "--patrickstar", *SETTINGS]])], tmp_path)
    plain, chunked = told(finish(process)[0])
    assert not plain["is_chunked"]
    assert chunked == {**plain, "is_chunked": True}
    assert finish(start(["-m", "hf_patrickstar", "check", *words], tmp_path))[0].startswith("same bits\n")


@pytest.mark.long
def test_scripts_of_trainers_and_loops_are_the_same_to_the_bit(tmp_path):
    write_stock_scripts(tmp_path)
    names = ("clm", "glue", "translation")
    stock = [[f"{name}.py", "--output_dir", f"out-{name}", *COMMON] for name in names]
    chunked = [[*words, "--patrickstar", *SETTINGS] for words in stock]
    values = {"output_dir": "out-json", "use_cpu": True, "max_steps": 3, "logging_steps": 1, "learning_rate": 5e-3}
    values |= {"per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no", "patrickstar": True}
    (tmp_path / "glue.json").write_text(json.dumps(values))
    others = [["no_trainer.py"], ["clm.py", "--output_dir", "out-all", *COMMON]]
    mixed = ["mixed.py", "--output_dir", "out-mixed", *COMMON]
    plain, by_flag, for_all = (
        start(["all.py", json.dumps([*stock, others[0]])], tmp_path),
        start([*RUN, "all.py", json.dumps([mixed, *stock, *chunked, ["glue.py", "glue.json"], mixed])], tmp_path),
        start([*RUN, "--patrickstar", *SETTINGS, "all.py", json.dumps(others)], tmp_path),
    )
    *expected, loop = told(finish(plain)[0])
    out, err = finish(by_flag)
    first_mixed, *rest = told(out)
    assert rest[:3] == expected, "without the flag all is as in transformers"
    assert rest[3:6] == [{**result, "is_chunked": True} for result in expected]
    assert rest[6] == rest[4], "a JSON file that the script reads may say it, too"
    assert first_mixed == rest[7] == expected[2], "a script that has the mixins runs as it is"
    assert "PatrickStarTrainerMixin into transformers.trainer.Trainer" in err
    assert "accelerate.Accelerator" not in err
    out, err = finish(for_all)
    assert told(out) == [{**loop, "is_chunked": True}, {**expected[0], "is_chunked": True}]
    assert "PatrickStarAccelerator into accelerate.Accelerator" in err
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out-clm", "out-all")]
    assert all(value.equal(weights[1][key]) for key, value in weights[0].items())
    # What a script pickles with its arguments is read where this package is not imported.
    bytes_of_arguments = (tmp_path / "out-all" / "training_args.bin").read_bytes()
    assert b"transformers.training_args" in bytes_of_arguments
    assert b"hf_patrickstar.integrations" not in bytes_of_arguments


@pytest.mark.long
def test_command_lines_of_trl_are_the_same_to_the_bit_and_launchers_pass_it_on(tmp_path):
    pytest.importorskip("trl")
    write_stock_scripts(tmp_path)
    write_trl_inputs(tmp_path)
    names = ("sft", "dpo", "grpo")

    def commands(kind, *flags):
        return [
            ["-m", f"trl.scripts.{name}", *trl_arguments(tmp_path, name, f"{kind}-{name}"), *flags] for name in names
        ]

    launcher = pathlib.Path(sys.executable).with_name("trl")
    processes = [
        start(["all.py", json.dumps(commands("plain"))], tmp_path, search=str(tmp_path)),
        start(
            [*RUN, "all.py", json.dumps(commands("chunked", "--patrickstar", *SETTINGS))],
            tmp_path,
            search=str(tmp_path),
        ),
        start(
            [*RUN, "--inherit", launcher, "sft", *trl_arguments(tmp_path, "sft", "launched-sft"), "--patrickstar"],
            tmp_path,
        ),
    ]
    for process in processes:
        finish(process)
    for kind, name in [*(("chunked", name) for name in names), ("launched", "sft")]:
        expected, got = (load_file(tmp_path / f"{which}-{name}" / "model.safetensors") for which in ("plain", kind))
        assert expected.keys() == got.keys()
        assert all(value.equal(got[key]) for key, value in expected.items()), (kind, name)
        assert record_folder(tmp_path / f"{kind}-{name}").is_dir(), "it trained in chunks"
    assert not record_folder(tmp_path / "plain-sft").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([__file__], "was imported before .* start the script in a new process"),
        (["--patrickstar_config", "{}", __file__], "--patrickstar_config is given before SCRIPT but --patrickstar"),
        (["--patrickstar", "--patrickstar_config", '{"x": 1}', __file__], "unknown key 'x'"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([], "there is no script to run"),
    ],
)
def test_refusals_are_one_sentence(words, sentence, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.training_args", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.trainer", types.ModuleType("transformers.trainer"))
    finders = list(sys.meta_path)
    assert main(["run", *words]) == 2
    err = capsys.readouterr().err
    assert re.search(sentence, err)
    assert len(err.splitlines()) == 1
    assert sys.meta_path == finders


@pytest.mark.parametrize(("error", "status"), [("ConfigError", 2), ("BudgetError", 1)])
def test_an_error_of_the_package_ends_a_script_without_a_stack(error, status, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_command, "install", lambda defaults: None)  # transformers is imported here
    script = tmp_path / "train.py"
    script.write_text(f"from hf_patrickstar.errors import {error}\n\nraise {error}('too small; raise it\\nmore')\n")
    assert main(["run", str(script)]) == status
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"hf-patrickstar run: {script}, line 3: too small; raise it", "more"]


def test_options_before_the_script_are_the_commands_own():
    split = run_command.split_program
    assert split(["run", "train.py", "--patrickstar"]) == (["run"], ["train.py", "--patrickstar"])
    own = ["run", "--inherit", "--patrickstar_config", "{}"]
    assert split([*own, "-m", "trl", "sft"]) == (own, ["-m", "trl", "sft"])
    assert split(["run"]) == (["run"], [])


def test_started_processes_inherit_by_their_environment_alone(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own_sitecustomize = True\n")
    code = "import sys; print(own_sitecustomize, 'torch' in sys.modules, type(sys.meta_path[0]).__name__)"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    run_command._let_inherit(patching.Defaults(patrickstar=True))
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "HF_PATRICKSTAR_RUN")}
    folder = os.path.dirname(inherited.__file__)
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == folder
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True", "False", "Finder"]
