"""Checks the package on a GPU and writes one JSON file with the outcome of every part.

A part is a command of its own with a limit of time. A part that fails, hangs or cannot start is reported, and the
others run all the same. Exit code 0: every part passed or was skipped for a reason that the record names; 1: a part did
not pass; 2: this machine has no accelerator, and nothing was run or written.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from importlib import metadata

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHORT_S = 465.0
"""Seconds for all parts of the short form, whose own limits add up to more; the rest of eight minutes is for starting
and writing."""
TAIL_CHARS = 4000
OFFLOAD = "offload"
"""The table of models that are too large for the device, and what the names of its parts begin with."""
SIZES = ("3b", "8b")
KINDS = ("patrickstar", "plain", "fsdp2", "zero3")
FIGURES = (
    "tokens_per_second",
    "device_peak_nbytes",
    "planned_device_peak_nbytes",
    "host_peak_nbytes",
    "virtual_seconds_per_step",
    "virtual_over_measured",
)
VIRTUAL = "virtual_against_measured"
"""The part that has the time of steps in virtual time beside measured ones; its rows are also on the first level."""
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # runs are compared bit for bit
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: Its name in the record.
        command: What is run; ``{output}`` stands for a file that the command may write its own JSON to, ``{junit}`` for
            one that pytest writes its report to.
        limit_s: The most seconds that it may take.
        environment: Environment variables beside those of all parts.
        needs: A program without which the part is skipped.
        races: Whether a report of a race in its output is a failure, whatever its exit code is.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs: str | None = None
    races: bool = False


def pytest_part(name: str, paths: Sequence[str], limit_s: float, **settings) -> Part:
    """A part that runs tests."""
    options = ("-m", "gpu", "-p", "no:cacheprovider", "--junitxml", "{junit}")
    return Part(name, (sys.executable, "-m", "pytest", *paths, *options), limit_s, **settings)


def short_parts() -> list[Part]:
    """The parts of the short form, the most telling first."""
    sanitized = ("tests/gpu/test_gpu_races.py", "-k", "gpt2 and plain")
    overhead = ("--layers", "12", "--hidden", "1024", "--batch_size", "8", "--length", "512", "--steps", "10")
    written = ("--output", "{output}")
    parts = [
        pytest_part("parity", ["tests/gpu/test_gpu_parity.py"], 150),
        pytest_part("budgets", ["tests/gpu/test_gpu_budgets.py"], 60),
        pytest_part("recovery", ["tests/gpu/test_gpu_recovery.py"], 60),
        pytest_part("races", ["tests/gpu/test_gpu_races.py"], 60),
        # torch's own sanitizer knows streams and events: it finds uses of memory that no event orders.
        pytest_part("races_streams", sanitized, 60, environment={"TORCH_CUDA_SANITIZER": "1"}, races=True),
    ]
    for dtype in ("fp32", "bf16"):
        command = (sys.executable, "benchmarks/bench_overhead.py", "--device", "cuda", "--dtype", dtype, *overhead)
        # The part fails above 1.05; its result says whether the aim of 1.02 is met.
        parts.append(Part(f"overhead_{dtype}", (*command, "--repeats", "2", "--limit", "1.05", *written), 60))
    virtual = (sys.executable, "benchmarks/bench_virtual.py", "--device", "cuda", "--dtype", "bf16", *overhead)
    parts.append(Part(VIRTUAL, (*virtual, *written), 90))
    memory = pytest_part("memory", sanitized, 75, needs="compute-sanitizer")
    tool = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    parts.append(dataclasses.replace(memory, name="races_memory", command=(*tool, *memory.command)))
    return parts


def long_parts() -> list[Part]:
    """What the long form runs beside: the offload benchmark, under the engine and other ways to train the models."""
    parts = []
    for size in SIZES:
        for kind in KINDS:
            words = ("--size", size, "--kind", kind, *(("--virtual",) if kind == "patrickstar" else ()))
            command = (sys.executable, "benchmarks/bench_offload.py", "--device", "cuda", *words)
            parts.append(Part(f"{OFFLOAD}_{size}_{kind}", (*command, "--output", "{output}"), 900))
    return parts


def offload_table(records: dict[str, dict]) -> list[dict]:
    """The offload benchmark at a glance: a row for each model and way to train it.

    Args:
        records: What came of the parts.

    Returns:
        Rows; ``None`` stands for what is not known: the part has not passed, does not fit, or does not tell.
    """
    rows = []
    for size in SIZES:
        for kind in KINDS:
            record = records.get(f"{OFFLOAD}_{size}_{kind}")
            if record is None:
                continue
            result = record.get("result", {})
            seconds = result.get("seconds_per_step")
            rows.append(
                {
                    **{"size": size, "kind": kind, "outcome": record["outcome"], "fits": result.get("fits")},
                    "skipped": result.get("skipped"),
                    "seconds_per_step": statistics.median(seconds) if seconds else None,
                    **{name: result.get(name) for name in FIGURES},
                }
            )
    return rows


def run_part(part: Part, limit_s: float) -> dict:
    """Runs a part.

    Args:
        part: The part.
        limit_s: The most seconds that it may take now.

    Returns:
        What came of it. ``outcome`` is ``passed``, ``failed``, ``timed out`` or ``skipped``, and ``why`` says why.
    """
    if part.needs is not None and shutil.which(part.needs) is None:
        return {"outcome": "skipped", "why": f"{part.needs} is not installed", "seconds": 0.0}
    if limit_s <= 0:
        return {"outcome": "failed", "why": "no time was left for it", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: os.path.join(folder, name) for name in ("output", "junit")}
        command = [word.format(**files) if word in ("{output}", "{junit}") else word for word in part.command]
        begin = time.monotonic()
        code, text = run_command(command, {**os.environ, **ENVIRONMENT, **part.environment}, limit_s)
        record = {"seconds": round(time.monotonic() - begin, 2), "limit_s": round(limit_s, 2), "exit_code": code}
        record |= judge(part, code, text)
        readers = {"tests": (read_junit, files["junit"]), "result": (read_json, files["output"])}
        for key, (read, file) in readers.items():
            if os.path.exists(file):
                try:
                    record[key] = read(file)
                except (ValueError, xml.etree.ElementTree.ParseError) as error:
                    record |= {
                        "outcome": "failed",
                        "why": f"what it wrote is no {'JSON' if key == 'result' else 'report'}",
                    }
                    text += f"\n{error}"
    reason = skipped_for(record)
    if reason:
        record |= {"outcome": "skipped", "why": reason}
    if record["outcome"] not in ("passed", "skipped"):
        record["tail"] = text[-TAIL_CHARS:]
    return record


def run_command(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """The exit code of a command, ``None`` if it took too long, and what it wrote."""
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return 127, str(error)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # it, and whatever it has started
            process.wait()
        written.seek(0)
        return code, written.read()


def judge(part: Part, code: int | None, text: str) -> dict:
    """The outcome of a command."""
    if code is None:
        return {"outcome": "timed out", "why": "it took longer than its limit"}
    if part.races and re.search(r"CSAN detected|possible data race", text):
        return {"outcome": "failed", "why": "the sanitizer has found a race"}
    if code:
        return {"outcome": "failed", "why": f"exit code {code}"}
    return {"outcome": "passed", "why": ""}


def skipped_for(record: dict) -> str:
    """Why a command that passed has measured nothing, by its own word; empty if it has."""
    result = record.get("result")
    return result.get("skipped") or "" if record["outcome"] == "passed" and isinstance(result, dict) else ""


def read_junit(path: str) -> dict:
    """How many tests there were, and the first line of each failure."""
    root = xml.etree.ElementTree.parse(path).getroot()
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    for case in root.iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            failures[case.get("name", "?")] = (bad[0].get("message") or "").strip().split("\n")[0][:300]
    return {**counts, "failures": failures}


def read_json(path: str) -> object:
    """What a benchmark has written."""
    return json.loads(pathlib.Path(path).read_text())


def run_parts(parts: Sequence[Part], total_s: float | None) -> dict[str, dict]:
    """Runs one part after the other, whatever comes of each; what is not run in time has failed.

    Args:
        parts: The parts.
        total_s: Seconds for all together; ``None`` for each part's own limit alone.
    """
    deadline = time.monotonic() + (float("inf") if total_s is None else total_s)
    records = {}
    for part in parts:
        record = run_part(part, min(part.limit_s, deadline - time.monotonic()))
        records[part.name] = record
        why = f" ({record['why']})" if record["why"] else ""
        print(f"gpu_check: {part.name}: {record['outcome']}{why}, {record['seconds']:.0f} s", file=sys.stderr)
    return records


def describe_machine() -> dict:
    """Hardware, versions and commit."""
    import torch

    device: dict[str, object] = {"name": "none"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_nbytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    names = ("transformers", "accelerate", "datasets", "numpy", "safetensors", "nvidia-ml-py", "pytest", "deepspeed")
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    try:
        host_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        host_nbytes = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "hardware": {"device": device, "cores": cores, "host_nbytes": host_nbytes},
        "versions": versions,
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": ask("git", "describe", "--always", "--dirty", "--abbrev=40") or os.environ.get("COMMIT", "unknown"),
    }


def ask(*command: str) -> str:
    """The first line that a command writes; empty if there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if not done.returncode else ""


def why_not() -> str:
    """Why nothing can be checked here; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "torch finds no accelerator on this machine; run it on one with a GPU"
    return ""


def finish(records: dict[str, dict], seconds: float, form: str, target: pathlib.Path | None) -> bool:
    """Writes the record and says what came of it; returns whether every part passed or was skipped."""
    machine = describe_machine()
    is_ok = all(record["outcome"] in ("passed", "skipped") for record in records.values())
    record = {
        "check": "gpu_check",
        "ok": is_ok,
        "form": form,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **machine,
        "parts": records,
        OFFLOAD: offload_table(records),
        VIRTUAL: records.get(VIRTUAL, {}).get("result", {}).get("rows"),
    }
    if target is None:
        words = re.sub(r"\W+", "_", str(machine["hardware"]["device"]["name"])).strip("_").lower()
        target = RESULTS / f"gpu_check{'_long' if form == 'long' else ''}_{words}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=2) + "\n")
    bad = [
        f"{name} {part['outcome']}" for name, part in records.items() if part["outcome"] not in ("passed", "skipped")
    ]
    print(f"gpu_check: {', '.join(bad) or 'every part passed or was skipped'}; written to {target}", file=sys.stderr)
    print(json.dumps({"gpu_check": "ok" if is_ok else "failed", "written": str(target)}))
    return is_ok


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--long", action="store_true", help="also the offload benchmark, which takes up to two hours")
    options.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    options.add_argument("--dry-run", action="store_true", help="say what would be run, on any machine")
    options.add_argument("--output", type=pathlib.Path, help="the JSON file; by default one in benchmarks/results")
    chosen = options.parse_args(arguments)
    parts = short_parts() + (long_parts() if chosen.long else [])
    if chosen.only:
        unknown = sorted(set(chosen.only) - {part.name for part in parts})
        if unknown:
            options.error(f"no part is called {', '.join(unknown)}; there are {', '.join(p.name for p in parts)}")
        parts = [part for part in parts if part.name in chosen.only]
    if chosen.dry_run:
        for part in parts:
            words = [f"{key}={value}" for key, value in part.environment.items()]
            print(f"{part.name} ({part.limit_s:g} s): {' '.join([*words, *part.command])}")
        return 0
    reason = why_not()
    if reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    short = [part for part in parts if not part.name.startswith(OFFLOAD)]
    records = run_parts(short, SHORT_S) | run_parts([part for part in parts if part not in short], None)
    is_ok = finish(records, time.monotonic() - begin, "long" if chosen.long else "short", chosen.output)
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
