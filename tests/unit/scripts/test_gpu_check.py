"""``scripts/gpu_check.py`` with stand-ins for its parts: what fails is reported, and hides nothing."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def python(text):
    return sys.executable, "-c", text


JUNIT = """<testsuites><testsuite>
<testcase name="test_good"/><testcase name="test_left_out"><skipped/></testcase>
<testcase name="test_bad"><failure message="AssertionError: 1 != 2&#10;more">x</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def parts(check):
    report = f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({JUNIT!r}); sys.exit(1)"
    result = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"ratio\": 1.5}')"
    return [
        check.Part("crashes", python("import os; print('last words', flush=True); os.abort()"), 30),
        check.Part("tests", (*python(report), "{junit}"), 30),
        check.Part("hangs", python("import time; print('begins', flush=True); time.sleep(60)"), 0.5),
        check.Part("is not there", ("/nowhere/program",), 30),
        check.Part("needs a tool", python("pass"), 30, needs="no-such-tool"),
        check.Part("races", python("print('CSAN detected a possible data race on tensor')"), 30, races=True),
        check.Part("measures", (*python(result), "{output}"), 30),
        check.Part("reads", python("import os; assert os.environ['A'] == 'b'"), 30, environment={"A": "b"}),
    ]


def test_a_part_that_fails_is_reported_and_hides_no_other(check, parts, tmp_path, capsys):
    records = check.run_parts(parts, None)
    assert {name: record["outcome"] for name, record in records.items()} == {
        "crashes": "failed",
        "tests": "failed",
        "hangs": "timed out",
        "is not there": "failed",
        "needs a tool": "skipped",
        "races": "failed",
        "measures": "passed",
        "reads": "passed",
    }
    assert records["crashes"]["tail"] == "last words\n"
    assert records["hangs"]["tail"] == "begins\n"
    assert 0.5 <= records["hangs"]["seconds"] < 10
    assert records["needs a tool"]["why"] == "no-such-tool is not installed"
    assert records["races"]["why"] == "the sanitizer has found a race"
    assert records["tests"]["tests"] == {
        **{"passed": 1, "failed": 1, "skipped": 1},
        "failures": {"test_bad": "AssertionError: 1 != 2"},
    }
    assert records["measures"]["result"] == {"ratio": 1.5}
    assert not check.finish(records, 3.0, "short", tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text())
    assert not written["ok"]
    assert written["parts"] == records
    assert {"hardware", "versions", "commit", "date", "seconds", "virtual_against_measured"} <= written.keys()
    assert written["virtual_against_measured"] is None
    assert {"torch", "transformers", "accelerate", "datasets", "python", "cuda"} <= written["versions"].keys()
    out, err = capsys.readouterr()
    assert json.loads(out) == {"gpu_check": "failed", "written": str(tmp_path / "found.json")}
    assert "crashes failed, tests failed, hangs timed out, is not there failed, races failed; written" in err


def test_a_result_that_is_no_json_is_a_failure_of_its_part(check):
    text = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{')"
    records = check.run_parts([check.Part("writes", (*python(text), "{output}"), 30)], None)
    assert records["writes"]["outcome"] == "failed"
    assert "is no JSON" in records["writes"]["why"]


def test_parts_that_find_no_time_are_not_passed(check, parts):
    records = check.run_parts([parts[2], parts[-1]], 0.2)
    assert [record["outcome"] for record in records.values()] == ["timed out", "failed"]
    assert records["reads"]["why"] == "no time was left for it"


def test_skipped_parts_are_no_failure(check, parts, tmp_path):
    records = check.run_parts([parts[4], parts[6]], None)
    assert check.finish(records, 1.0, "short", tmp_path / "found.json")


def test_rows_of_virtual_time_are_on_the_first_level(check, tmp_path):
    text = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"rows": [{"virtual_s": 1}]}\')'
    records = check.run_parts([check.Part(check.VIRTUAL, (*python(text), "{output}"), 30)], None)
    assert check.finish(records, 1.0, "short", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())[check.VIRTUAL] == [{"virtual_s": 1}]


def test_the_offload_benchmark_is_a_table_on_the_first_level(check, tmp_path):
    measured = {"seconds_per_step": [4.0, 2.0, 3.0], "tokens_per_second": 10.0, "fits": True}
    measured |= {"device_peak_nbytes": 7, "planned_device_peak_nbytes": 6, "host_peak_nbytes": 9}
    virtual = {"virtual_seconds_per_step": 1.5, "virtual_over_measured": 0.5}
    results = {
        "offload_3b_patrickstar": measured | virtual,
        "offload_3b_plain": {"fits": False, "why": "out of memory"},
        "offload_3b_fsdp2": measured,
        "offload_3b_zero3": {"skipped": "deepspeed is not installed"},
    }
    text = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({!r})"
    parts = [
        check.Part(name, (*python(text.format(json.dumps(result))), "{output}"), 30) for name, result in results.items()
    ]
    parts.append(check.Part("offload_8b_patrickstar", python("raise SystemExit(3)"), 30))
    records = check.run_parts(parts, None)
    skipped = records["offload_3b_zero3"]
    assert (skipped["outcome"], skipped["why"]) == ("skipped", "deepspeed is not installed")
    assert not check.finish(records, 1.0, "long", tmp_path / "found.json")
    table = json.loads((tmp_path / "found.json").read_text())["offload"]
    unknown = dict.fromkeys(table[0]) | {"size": "3b"}
    figures = {"tokens_per_second": 10.0, "device_peak_nbytes": 7, "planned_device_peak_nbytes": 6}
    figures |= {"host_peak_nbytes": 9, "seconds_per_step": 3.0, "fits": True, "outcome": "passed"}
    assert table == [
        unknown | figures | virtual | {"kind": "patrickstar"},
        unknown | {"kind": "plain", "outcome": "passed", "fits": False},
        unknown | figures | {"kind": "fsdp2"},
        unknown | {"kind": "zero3", "outcome": "skipped", "skipped": "deepspeed is not installed"},
        unknown | {"size": "8b", "kind": "patrickstar", "outcome": "failed"},
    ]


def test_what_fails_is_not_skipped_whatever_it_has_written(check):
    text = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"skipped": "no"}\'); sys.exit(3)'
    records = check.run_parts([check.Part("writes", (*python(text), "{output}"), 30)], None)
    assert records["writes"]["outcome"] == "failed"


def test_the_virtual_benchmark_moves_what_the_engine_moves(tmp_path):
    words = "--device cpu --layers 10 --hidden 64 --length 16 --batch_size 1 --chunk_numel 25000 --warmup 2 --steps 2"
    command = [sys.executable, "benchmarks/bench_virtual.py", *words.split(), "--output", str(tmp_path / "found.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 3
    assert all(row["virtual_s"] > 0 and row["measured_s"] > 0 for row in rows)
    assert all(row["measured_loads"] == row["virtual_loads"] > 0 for row in rows)


def test_the_short_form_ends_within_eight_minutes(check):
    assert check.SHORT_S < 480 - 10
    names = [part.name for part in check.short_parts()]
    assert names[:5] == ["parity", "budgets", "recovery", "races", "races_streams"]
    assert len(set(names)) == len(names)


def test_every_file_that_is_run_is_there(check):
    for part in check.short_parts() + check.long_parts():
        for word in part.command:
            if word.startswith(("tests/", "benchmarks/")):
                assert (ROOT / word).is_file(), word


def run_script(*arguments):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_an_accelerator_it_says_so(tmp_path):
    done = run_script("--output", str(tmp_path / "found.json"))
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "gpu_check: torch finds no accelerator on this machine; run it on one with a GPU"
    )
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_be_run(tmp_path):
    done = run_script("--long", "--dry-run")
    assert done.returncode == 0, done.stderr
    for words in ("parity (150 s):", "TORCH_CUDA_SANITIZER=1", "compute-sanitizer", "bench_offload.py"):
        assert words in done.stdout
    for size in ("3b", "8b"):
        for words in ("patrickstar --virtual", "plain", "fsdp2", "zero3"):
            assert f"--size {size} --kind {words} --output" in done.stdout


def test_a_part_that_is_unknown(tmp_path):
    done = run_script("--only", "parity", "speed")
    assert done.returncode == 2
    assert "no part is called speed; there are parity, budgets" in done.stderr


@pytest.mark.parametrize("kind", ["patrickstar", "plain"])
def test_the_offload_benchmark_runs_on_a_tiny_model(kind, tmp_path):
    """On the CPU tier, so that the first run on a GPU does not stumble over the benchmark itself."""
    words = ("--device cpu --size tiny --batch_size 2 --length 16 --warmup 1 --steps 2 --kind", kind, "--output")
    command = [sys.executable, "benchmarks/bench_offload.py", *" ".join(words).split(), str(tmp_path / "found.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fits"]
    assert found["tokens_per_second"] > 0
    assert len(found["losses"]) == 3
    assert found["losses"][0] == pytest.approx(5.545, abs=0.2), "as of a model that knows nothing of 256 tokens"
