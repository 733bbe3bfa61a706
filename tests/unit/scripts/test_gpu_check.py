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
def run(check, place, tmp_path, monkeypatch):
    """Runs parts without a device; returns whether all is well, and the record."""
    monkeypatch.setattr(check, "describe_machine", lambda asks_device: {"device": "Some GPU", "commit": "abc"})

    def run(parts, seconds=100.0, folder="found", **how):
        is_ok = check.run_parts(parts, time.monotonic() + seconds, place, tmp_path / folder, **how)
        return is_ok, json.loads((tmp_path / folder / "gpu_check_some_gpu.json").read_text())

    return run


def python(text):
    return sys.executable, "-c", text


def writes(text):
    return python(f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({text!r})")


@pytest.mark.long
def test_a_part_that_fails_is_reported_and_hides_no_other(check, run, tmp_path, monkeypatch):
    monkeypatch.setattr(check.Part, "limit_s", property(lambda part: part.seconds))
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
    assert (is_ok, record["ok"], record["commit"]) == (False, False, "abc")
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
    log = tmp_path / "found" / "gpu_check_some_gpu.log"
    assert log.stat().st_size < 2_000_000
    assert log.read_text().endswith("x end\n")
    _, record = run([check.Part("measures", python("pass"), 30)], named=["measures"])
    assert "result" not in record["parts"]["measures"], "an earlier result is not taken for one of this check"


def outcomes(record):
    return {name: part["outcome"] for name, part in record["parts"].items()}


def counting(check, name, tmp_path, seconds=1.0, fails=False):
    """A part that notes each of its runs, and names itself in its result."""
    text = f"open({str(tmp_path / 'runs')!r}, 'a').write({name + ' '!r}); open(sys.argv[1], 'w').write('7')"
    return check.Part(name, (*python(f"import sys; {text}; sys.exit({int(fails)})"), "{output}"), seconds)


@pytest.mark.parametrize("place_of_record", ["found", "state", "results"])
def test_a_second_call_goes_on_with_what_has_not_passed(check, run, tmp_path, monkeypatch, place_of_record):
    """Its folder may be empty, and its machine a bare one: then the record is where it was committed."""
    monkeypatch.setattr(check, "ROOT", tmp_path / "root")
    results = tmp_path / "root" / "benchmarks" / "results"
    results.mkdir(parents=True)
    first, failing = counting(check, "first", tmp_path), counting(check, "failing", tmp_path, fails=True)
    more = [counting(check, "long", tmp_path, seconds=200.0), counting(check, "last", tmp_path)]
    is_ok, record = run([first, failing, *more])
    assert not is_ok
    assert outcomes(record) == {"first": "passed", "failing": "failed", "long": "left", "last": "left"}
    written = json.dumps(record)
    for path in (*tmp_path.glob("found/*"), *tmp_path.glob("state/*.json")):
        path.unlink()
    target = {"found": "found/gpu_check_some_gpu.json", "state": "state/record.json"}.get(place_of_record)
    (results / "gpu_check_some_gpu.json" if target is None else tmp_path / target).write_text(written)
    is_ok, record = run([first, counting(check, "failing", tmp_path), *more], seconds=400.0)
    assert (is_ok, record["ok"]) == (True, True)
    assert outcomes(record) == dict.fromkeys(outcomes(record), "passed")
    assert (tmp_path / "runs").read_text().split() == ["first", "failing", "long", "last", "failing"]
    assert record["parts"]["first"]["result"] == 7
    assert json.loads((tmp_path / "state" / "record.json").read_text()) == record


@pytest.mark.parametrize(("changed", "value"), [("sources", "other"), ("device", "another"), ("is_rehearsal", True)])
def test_a_record_of_something_else_is_not_gone_on_with(check, run, tmp_path, changed, value):
    part = counting(check, "first", tmp_path)
    _, record = run([part])
    for path in (tmp_path / "found" / "gpu_check_some_gpu.json", tmp_path / "state" / "record.json"):
        path.write_text(json.dumps({**record, changed: value}))
    run([part])
    assert (tmp_path / "runs").read_text().split() == ["first", "first"]


def test_parts_that_are_named_run_again_and_optional_ones_only_then(check, run, tmp_path):
    parts = [counting(check, name, tmp_path) for name in ("first", "second", "optional")]
    parts[2] = check.dataclasses.replace(parts[2], is_optional=True)
    is_ok, record = run(parts)
    assert (is_ok, outcomes(record)) == (True, {"first": "passed", "second": "passed"})
    is_ok, record = run(parts, named=["second", "optional"])
    assert (is_ok, outcomes(record)) == (True, {"first": "passed", "second": "passed", "optional": "passed"})
    assert (tmp_path / "runs").read_text().split() == ["first", "second", "second", "optional"]
    run(parts, is_new=True)
    assert (tmp_path / "runs").read_text().split()[4:] == ["first", "second"]


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
check.run_parts(parts, time.monotonic() + 60, place, pathlib.Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL, start_new_session=True)
    log = tmp_path / "gpu_check_cpu.log"
    for _ in range(600):
        if log.exists() and "begun" in log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = json.loads((tmp_path / "gpu_check_cpu.json").read_text())["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == {"first": "passed", "second": "begun"}
    assert "done" in log.read_text()


def test_every_file_that_is_run_is_there_on_every_device_and_in_a_rehearsal(check):
    parts, rehearsed = (check.parts_of(each) for each in (check.HERE, check.REHEARSAL))
    assert [part.name for part in parts] == [part.name for part in rehearsed]
    assert len({part.name for part in parts}) == len(parts) > 0
    assert sum(part.seconds for part in parts if not part.is_optional) <= 2 * check.CALL_S - max(
        part.seconds for part in parts
    ), "all fit into two calls, wherever the first one ends"
    for word in (word for part in (*parts, *rehearsed) for word in part.command):
        assert not word.startswith(("tests/", "benchmarks/", "scripts/")) or (ROOT / word.split("::")[0]).exists()
    for part in parts:  # torch.cuda.set_device refuses a device without an index
        assert "cuda" not in part.command
        if part.name not in ("plan", "replays"):
            assert "cuda:0" in (*part.command, *part.environment.values())


def run_script(*arguments, **environment):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **environment}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "gpu_check: torch finds no accelerator on this machine; run it on one with a GPU"),
        (("--dry-run",), 0, '"device_budget": "22.8GiB"'),
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
    record = json.loads((tmp_path / "out" / "gpu_check_cpu.json").read_text())
    assert {"torch", "transformers", "accelerate", "python"} <= record["versions"].keys()
    assert (record["is_rehearsal"], record["parts"]["tests"]["outcome"]) == (True, "left")
    outcomes = {found["check"]: found["outcome"] for found in record["parts"]["smoke"]["result"]}
    assert outcomes["engine_first"] == outcomes["adam_on_the_host"] == "passed"
    assert outcomes["pinning"] == "skipped"
