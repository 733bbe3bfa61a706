"""``scripts/gpu_check.py`` with stand-ins for its parts: what fails is reported, and hides nothing."""

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
TESTS = {"passed": 1, "failed": {"test_bad": "AssertionError: 1 != 2"}, "skipped": {"test_left_out": "needs more"}}


@pytest.fixture(scope="module")
def check(script):
    return script("gpu_check.py")


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


@pytest.mark.long
def test_a_part_that_fails_is_reported_and_hides_no_other(check, run, tmp_path):
    parts = [
        (check.Part("crashes", python("import os; print('last words', flush=True); os.abort()"), 30), "failed"),
        (check.Part("tests", (*writes(JUNIT), "{junit}"), 30), "passed"),
        (check.Part("hangs", python("import time; print('begins', flush=True); time.sleep(60)"), 0.5), "timed out"),
        (check.Part("is not there", ("/nowhere/program",), 30), "failed"),
        (
            check.Part("races", python("print('CSAN detected a possible data race on tensor')"), 30, races=True),
            "failed",
        ),
        (check.Part("measures", (*writes('{"ratio": 1.5}'), "{output}"), 30), "passed"),
        (check.Part("writes half", (*writes("{"), "{output}"), 30), "failed"),
        (
            check.Part("is told", python("import os; open(os.environ['A'], 'w').write('7')"), 30, {"A": "{output}"}),
            "passed",
        ),
        (check.Part("talks", python("print('begin', 'x' * 4_000_000, 'end')"), 30), "passed"),
    ]
    is_ok, record = run([part for part, _ in parts])
    found = record["parts"]
    assert (is_ok, record["ok"], record["is_whole"], record["commit"]) == (False, False, True, "abc")
    assert [part["outcome"] for part in found.values()] == [outcome for _, outcome in parts]
    assert found["crashes"]["tail"].startswith("last words\n")
    assert found["hangs"]["tail"] == "begins\n"
    assert 0.5 <= found["hangs"]["seconds"] < 10
    for name, why in (
        *(("is not there", "nowhere"), ("races", "the sanitizer has found a race"), ("writes half", "cannot be read")),
    ):
        assert why in found[name]["why"]
    assert [found[name]["result"] for name in ("measures", "is told")] == [{"ratio": 1.5}, 7]
    assert found["tests"]["tests"] == TESTS
    assert {"torch", "transformers", "accelerate", "python"} <= record["versions"].keys()
    log = tmp_path / "gpu_check_plan_cpu.log"
    assert log.stat().st_size < 2_000_000
    assert log.read_text().endswith("x end\n")
    _, record = run([check.Part("measures", python("pass"), 30)])
    assert "result" not in record["parts"]["measures"], "an earlier result is not taken for one of this check"


@pytest.mark.long
def test_a_part_that_finds_no_time_has_failed(check, run):
    parts = [check.Part(name, python("import time; time.sleep(2)"), 30) for name in ("first", "second")]
    is_ok, record = run(parts, seconds=check.LEAST_S + 1.5)
    assert not is_ok
    assert [part["outcome"] for part in record["parts"].values()] == ["passed", "failed"]
    assert record["parts"]["second"]["why"] == "no time was left for it"


@pytest.mark.long
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
    for _ in range(600):
        if log.exists() and "begun" in log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = json.loads((tmp_path / "gpu_check_plan_cpu.json").read_text())["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == {"first": "passed", "second": "begun"}
    assert "done" in log.read_text()


def test_every_file_that_is_run_is_there_on_every_device_and_in_a_rehearsal(check, place):
    start_s, between_s = 90, 30
    assert start_s + check.SECONDS["one"] + between_s + check.SECONDS["two"] <= 900 - 45, "a quarter of an hour"
    for stage in check.SECONDS:
        parts, rehearsed = (check.parts_of(stage, each) for each in (check.HERE, check.REHEARSAL))
        assert [part.name for part in parts] == [part.name for part in rehearsed]
        assert len({part.name for part in parts}) == len(parts) > 0
        for word in (word for part in (*parts, *rehearsed) for word in part.command):
            assert not word.startswith(("tests/", "benchmarks/", "scripts/")) or (ROOT / word.split("::")[0]).exists()
        for part in parts if stage != "plan" else ():  # torch.cuda.set_device refuses a device without an index
            assert "cuda" not in part.command
            assert "cuda:0" in (*part.command, *part.environment.values())
    command = next(part.command for part in check.parts_of("two", place) if part.name == "3b_auto")
    for option, path in (("--plan", place.plans / "3b_auto"), ("--rates", place.file("rates"))):
        assert command[command.index(option) + 1] == str(path), "what the stages before have left"
    planned = {part.name: part.command for part in check.parts_of("plan", place, "rtx4090")}
    assert planned["3b_auto"][-4:] == ("--record", str(place.plans / "3b_auto"), "--machine", "rtx4090")
    assert list(planned) == [part.name for part in check.parts_of("two", place) if "patrickstar" in part.command]


def run_script(*arguments, **environment):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **environment}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "gpu_check: torch finds no accelerator on this machine; run it on one with a GPU"),
        (("--stage", "two", "--dry-run"), 0, '"device_budget": "22.8GiB"'),
    ],
)
def test_what_it_says_before_anything_runs(tmp_path, arguments, status, said):
    done = run_script("--output", str(tmp_path / "found"), *arguments)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_it_writes_to_the_folder_that_the_environment_names_and_needs_no_git(tmp_path):
    """The rehearsal itself is a part of ``scripts/test.sh``; its smoke is the part that needs no other."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env"):
        (tmp_path / "bin" / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    done = run_script("--rehearse", "--only", "smoke", OUT=str(tmp_path / "out"), PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "gpu_check_one_cpu_only.json").read_text())
    assert (record["is_rehearsal"], record["is_whole"]) == (True, False), "it takes the place of no record of all parts"
    outcomes = {found["check"]: found["outcome"] for found in record["parts"]["smoke"]["result"]}
    assert outcomes["engine_first"] == outcomes["adam_on_the_host"] == "passed"
    assert outcomes["pinning"] == "skipped"
