"""``scripts/gpu_check.py`` with stand-ins for its parts: what fails is reported, and hides nothing."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"
JUNIT = """<testsuites><testsuite>
<testcase name="test_good"/><testcase name="test_left_out"><skipped message="needs more"/></testcase>
<testcase name="test_bad"><failure message="AssertionError: 1 != 2&#10;more">x</failure></testcase>
</testsuite></testsuites>"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check():
    return load(SCRIPT)


@pytest.fixture
def place(check, tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "abc")
    return check.Place("cpu", tmp_path / "state", False)


@pytest.fixture
def run(check, place, tmp_path):
    """Runs parts as a stage that needs no device; returns whether all is well, and the record."""

    def run(parts, seconds=100.0):
        is_ok = check.run_stage("plan", parts, time.monotonic() + seconds, place, tmp_path)
        return is_ok, json.loads((tmp_path / "gpu_check_plan_cpu.json").read_text())

    return run


def python(text):
    return sys.executable, "-c", text


def writes(text):
    return python(f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({text!r})")


def test_a_part_that_fails_is_reported_and_hides_no_other(check, run, tmp_path, capsys):
    parts = [
        check.Part("crashes", python("import os; print('last words', flush=True); os.abort()"), 30),
        check.Part("tests", (*writes(JUNIT), "{junit}"), 30),
        check.Part("hangs", python("import time; print('begins', flush=True); time.sleep(60)"), 0.5),
        check.Part("is not there", ("/nowhere/program",), 30),
        check.Part("is left out", python("raise SystemExit(1)"), 30, skip="needs a tool"),
        check.Part("races", python("print('CSAN detected a possible data race on tensor')"), 30, races=True),
        check.Part("measures", (*writes('{"ratio": 1.5}'), "{output}"), 30),
        check.Part("writes half", (*writes("{"), "{output}"), 30),
        check.Part("reads", python("import os; assert os.environ['A'] == 'b'"), 30, environment={"A": "b"}),
        check.Part("is told where", python("import os; open(os.environ['A'], 'w').write('7')"), 30, {"A": "{output}"}),
    ]
    is_ok, record = run(parts)
    found = record["parts"]
    assert not is_ok
    assert not record["ok"]
    assert {name: part["outcome"] for name, part in found.items()} == {
        "crashes": "failed",
        "tests": "passed",
        "hangs": "timed out",
        "is not there": "failed",
        "is left out": "skipped",
        "races": "failed",
        "measures": "passed",
        "writes half": "failed",
        "reads": "passed",
        "is told where": "passed",
    }
    assert found["crashes"]["tail"].startswith("last words\n")
    assert found["hangs"]["tail"] == "begins\n"
    assert 0.5 <= found["hangs"]["seconds"] < 10
    assert "nowhere" in found["is not there"]["why"]
    assert found["is left out"]["why"] == "needs a tool"
    assert found["races"]["why"] == "the sanitizer has found a race"
    expected = {
        "passed": 1,
        "failed": {"test_bad": "AssertionError: 1 != 2"},
        "skipped": {"test_left_out": "needs more"},
    }
    assert found["tests"]["tests"] == expected
    assert (found["measures"]["result"], found["is told where"]["result"]) == ({"ratio": 1.5}, 7)
    assert "cannot be read" in found["writes half"]["why"]
    assert record["is_whole"]
    assert {"device", "cores", "host_nbytes", "versions", "date", "seconds", "stage"} <= record.keys()
    assert record["commit"] == "abc"
    assert {"torch", "transformers", "accelerate", "python"} <= record["versions"].keys()
    log = (tmp_path / "gpu_check_plan_cpu.log").read_text()
    assert log.index("===== crashes") < log.index("last words") < log.index("===== tests")
    shown = capsys.readouterr().out
    assert "== hangs: timed out (it took longer than its limit)" in shown
    assert "stage plan failed, written to" in shown


def test_results_of_an_earlier_check_are_not_taken_for_those_of_this_one(check, run):
    run([check.Part("measures", (*writes('{"ratio": 1.5}'), "{output}"), 30)])
    _, record = run([check.Part("measures", python("pass"), 30)])
    assert "result" not in record["parts"]["measures"]


def test_a_part_that_finds_no_time_has_failed(check, run):
    parts = [check.Part(name, python("import time; time.sleep(2)"), 30) for name in ("first", "second")]
    is_ok, record = run(parts, seconds=check.LEAST_S + 1.5)
    assert not is_ok
    assert [part["outcome"] for part in record["parts"].values()] == ["passed", "failed"]
    assert record["parts"]["second"]["why"] == "no time was left for it"
    assert record["parts"]["first"]["limit_s"] < 17


@pytest.mark.parametrize("ends", ["time.sleep(60)", "pass"], ids=["hangs", "ends"])
def test_what_a_part_has_started_ends_with_it(check, run, tmp_path, ends):
    child = (
        f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(tmp_path / 'begun')!r}, 'w')"
    )
    child += f"; time.sleep(4); open({str(tmp_path / 'late')!r}, 'w')"
    text = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    text += f"while not os.path.exists({str(tmp_path / 'begun')!r}): time.sleep(0.01)\n{ends}"
    run([check.Part("starts another", python(text), 1.5)])
    time.sleep(4)
    assert (tmp_path / "begun").exists()
    assert not (tmp_path / "late").exists()


def test_a_check_that_is_killed_leaves_its_record_and_its_log(tmp_path):
    """As a lease that ends does: the parts before are whole, and the one that ran is named."""
    text = f"""
import sys, time; sys.path.insert(0, {str(SCRIPT.parent)!r})
import os; os.environ["COMMIT"] = "abc"
import gpu_check as check, pathlib
place = check.Place("cpu", pathlib.Path({str(tmp_path)!r}) / "state", True)
command = lambda text: (sys.executable, "-u", "-c", text)
parts = [check.Part("first", command("print('done')"), 30),
         check.Part("second", command("import time; print('begun'); time.sleep(30)"), 30)]
check.run_stage("plan", parts, time.monotonic() + 60, place, pathlib.Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL, start_new_session=True)
    log = tmp_path / "gpu_check_plan_cpu.log"
    for _ in range(300):
        if log.exists() and "begun" in log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = json.loads((tmp_path / "gpu_check_plan_cpu.json").read_text())["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == {"first": "passed", "second": "begun"}
    assert "done" in log.read_text()


def test_stages_fit_into_a_quarter_of_an_hour(check):
    start_s, between_s = 90, 30
    assert start_s + check.SECONDS["one"] + between_s + check.SECONDS["two"] <= 900 - 45


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_every_file_that_is_run_is_there(check, is_rehearsal):
    place = check.REHEARSAL if is_rehearsal else check.HERE
    for stage in check.SECONDS:
        parts = check.parts_of(stage, place)
        assert len({part.name for part in parts}) == len(parts) > 0
        for part in parts:
            for word in part.command:
                if word.startswith(("tests/", "benchmarks/", "scripts/")):
                    assert (ROOT / word.split("::")[0]).exists(), word


def test_a_rehearsal_has_the_parts_of_the_check(check):
    for stage in check.SECONDS:
        names = [[part.name for part in check.parts_of(stage, place)] for place in (check.HERE, check.REHEARSAL)]
        assert names[0] == names[1]


def test_every_device_has_an_index(check):
    """``torch.cuda.set_device`` refuses one without."""
    for stage in ("one", "two"):
        for part in check.parts_of(stage, check.HERE):
            assert "cuda" not in part.command
            assert "cuda:0" in (*part.command, *part.environment.values())


def test_stage_two_compares_with_what_the_stages_before_have_left(check, place):
    def words(name):
        return next(part.command for part in check.parts_of("two", place) if part.name == name)

    for option, path in (("--plan", place.plans / "3b_auto"), ("--rates", place.file("rates"))):
        assert words("3b_auto")[words("3b_auto").index(option) + 1] == str(path)
    assert "rates" in [part.name for part in check.parts_of("one", place)], "what stage one leaves"
    assert "--plan" not in words("3b_plain")
    planned = {part.name: part.command for part in check.parts_of("plan", place, "rtx4090")}
    assert planned["3b_auto"][-4:] == ("--record", str(place.plans / "3b_auto"), "--machine", "rtx4090")
    own = [part.name for part in check.parts_of("two", place) if "patrickstar" in part.command]
    assert list(planned) == own


def test_a_part_that_writes_without_end_leaves_a_short_log(check, run, tmp_path):
    _, record = run([check.Part("talks", python("print('begin', 'x' * 4_000_000, 'end')"), 30)])
    log = tmp_path / "gpu_check_plan_cpu.log"
    assert log.stat().st_size < 2_000_000
    assert "begin x" in log.read_text()
    assert log.read_text().endswith("x end\n")
    assert record["parts"]["talks"]["tail"].endswith("x end\n")


def test_without_git_the_commit_is_that_of_the_plans(check, place, monkeypatch, tmp_path):
    monkeypatch.delenv("COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.find_commit(place) == "unknown"
    place.plans.mkdir(parents=True)
    (place.plans / "commit").write_text("0123")
    assert check.find_commit(place) == "0123 (of the plans)"


def run_script(*arguments, **environment):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **environment}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_without_an_accelerator_it_says_so(tmp_path):
    done = run_script("--output", str(tmp_path / "found"))
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "gpu_check: torch finds no accelerator on this machine; run it on one with a GPU"
    )
    assert not list(tmp_path.iterdir())


def test_it_writes_to_the_folder_that_the_environment_names_and_needs_no_git(tmp_path):
    """The rehearsal itself is a part of ``scripts/test.sh``; its smoke is the part that needs no other."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env"):
        (tmp_path / "bin" / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    done = run_script("--rehearse", "--only", "smoke", OUT=str(tmp_path / "out"), PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "gpu_check_one_cpu_only.json").read_text())
    assert record["is_rehearsal"]
    assert not record["is_whole"], "it takes the place of no record of all parts"
    outcomes = {found["check"]: found["outcome"] for found in record["parts"]["smoke"]["result"]}
    assert outcomes["engine_first"] == outcomes["adam_on_the_host"] == "passed"
    assert outcomes["pinning"] == "skipped"


def test_a_dry_run_says_what_would_be_run():
    done = run_script("--stage", "two", "--dry-run")
    assert done.returncode == 0, done.stderr
    for words in ("3b_fsdp2 (110 s):", "--size 8b", '"device_budget": "24GiB"'):
        assert words in done.stdout


def test_a_part_that_is_unknown():
    done = run_script("--only", "smoke", "speed")
    assert done.returncode == 2
    assert "no part is called speed; there are smoke, tests" in done.stderr


def test_a_benchmark_writes_its_result_where_there_is_no_git(tmp_path):
    text = (
        "import argparse, common; common.finish('x', argparse.Namespace(device='cpu', output='found.json'), {'y': 1})"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/benchmarks", "PATH": str(tmp_path), "COMMIT": "abc"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["y"], found["commit"]) == (1, "abc")


def test_peers_name_the_index_of_the_device(monkeypatch):
    """``torch.cuda.set_device`` refuses a device without one."""
    import torch

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers

    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(torch._utils._get_device_index(device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # what is set is taken back
    for device in ("cuda", "cuda:1"):
        with peers.process_group(torch.device(device)):
            pass
    assert chosen == [0, 1]
