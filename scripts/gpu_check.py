"""Checks the package on a GPU, in stages that fit into minutes, and writes what came of every part at once.

Stage ``one`` tells whether the package works on this device (smoke, all tests that need a GPU, overhead, races, rates),
stage ``two`` how fast it is beside plain torch and FSDP2. Stage ``plan`` needs no device: it makes the plans whose time
stage two compares with what it measures. ``--rehearse`` runs all three on the CPU tier with tiny sizes.

A part is a command of its own with a limit of time, and all parts together have another one. A part that fails, hangs
or cannot start is reported, and the others run all the same. The record (JSON) and the log of a stage are written after
every part, to ``$OUT`` if that is set and else to ``benchmarks/results``; git is not needed. Exit code 0: every part
passed, or was skipped for a reason that the record names; 1: a part did not pass; 2: this machine has no accelerator.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TextIO

BEGIN_S = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parent.parent
MACHINE = ROOT / "benchmarks" / "machines" / "h200_16_cores.json"
"""What plans are made for: the machine of the first record, at its measured rates. For a device with less memory pass
another one, since a plan that needs more memory than the run has cannot be timed."""
SECONDS = {"plan": 300.0, "one": 285.0, "two": 420.0}
"""Seconds for all parts of a stage; a start of the machine, stage one and stage two fit into fifteen minutes."""
REHEARSAL_S = 240.0
LEAST_S = 15.0
"""A part that has less time left is not begun: that much is gone before Python has imported torch."""
TAIL_CHARS = {True: 700, False: 1700}
"""What the console shows of a part: of one that is fine, and of one that is not."""
KEPT_CHARS = 6000
LOGGED_CHARS = 1_500_000
"""The most characters of one part in the log, since ``$OUT`` may be a folder that takes no large files."""
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # runs are compared bit for bit
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",  # the name of the machine may lead nowhere
    "NCCL_SOCKET_IFNAME": "lo",
}
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "trl", "numpy", "safetensors", "nvidia-ml-py"),
    "bitsandbytes",
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
OVERHEAD = {
    # The device is busy all the time there: a smaller model would measure the host, which is what --deep is for.
    "bf16": "--layers 12 --hidden 1536 --batch_size 4 --length 1024 --steps 10 --repeats 1 --limit 1.05",
    "fp32": "--layers 12 --hidden 1024 --batch_size 8 --length 512 --steps 10 --repeats 1 --limit 1.05",
}
TINY_OVERHEAD = "--layers 2 --hidden 64 --batch_size 2 --length 16 --steps 2 --repeats 1 --limit 99"
TINY_OFFLOAD = "--size tiny --batch_size 2 --length 16 --warmup 3 --steps 2"
LONG, CHUNKED = "--batch_size 1 --length 32768 --warmup 2 --steps 2", {"chunked_loss": True}
OFFLOAD = (
    ("3b_plain", "plain", "--size 3b --warmup 2 --steps 3", {}, 70),
    # 0.95 of the device, as "auto" takes; torch's allocator may cache no more than a device of 24 GiB has.
    ("3b_24GiB", "patrickstar", "--size 3b --warmup 3 --steps 3 --cap_gib 24", {"device_budget": "22.8GiB"}, 110),
    # Activations that leave, and logits that are never whole: without them the batch has no room in 24 GiB.
    ("3b_32k_24GiB", "patrickstar", f"--size 3b {LONG} --cap_gib 24", {"device_budget": "22.8GiB", **CHUNKED}, 80),
    ("3b_fsdp2", "fsdp2", "--size 3b --warmup 1 --steps 3", {}, 110),
    ("3b_auto", "patrickstar", "--size 3b --warmup 3 --steps 3", {}, 90),
    ("8b_auto", "patrickstar", "--size 8b --warmup 3 --steps 2", {}, 200),  # last, since 128 GiB of host just suffice
)
"""Stage two: name, way to train, words for ``bench_offload.py``, settings of the engine, and the limit in seconds."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: Its name in the record.
        command: What is run; ``{output}`` stands for a file that the command may write its own JSON to, ``{junit}`` for
            one that pytest writes its report to, and ``{trace}`` for a trace of torch's profiler beside the record.
        limit_s: The most seconds that it may take.
        environment: Environment variables beside those of all parts, likewise.
        races: Whether a report of a race in its output is a failure, whatever its exit code is.
        skip: Why it is not run here; empty if it is.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    races: bool = False
    skip: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where parts run and leave what later ones read.

    Attributes:
        device: The device.
        folder: A folder for results of parts. Plans are in a folder of their own in it, which can be carried to a
            machine without the rest.
        is_rehearsal: Whether sizes are tiny.
    """

    device: str
    folder: pathlib.Path
    is_rehearsal: bool

    @property
    def plans(self) -> pathlib.Path:
        """Where plans are."""
        return self.folder / "plans"

    def file(self, name: str) -> pathlib.Path:
        """What a part has written."""
        return self.folder / f"{name}.json"


HERE = Place("cuda:0", ROOT / "build" / "gpu_check", False)
REHEARSAL = Place("cpu", ROOT / "build" / "gpu_rehearsal", True)


def parts_of(stage: str, place: Place, machine: str = str(MACHINE)) -> list[Part]:
    """The parts of a stage, the most telling first; those of stage two read what the stages before have left.

    Args:
        stage: ``one``, ``two`` or ``plan``.
        place: Where they run.
        machine: For stage ``plan``: whose rates and sizes plans are made for.
    """
    if stage == "one":
        return stage_one(place)
    parts, rates = [], place.file("rates")
    for name, kind, words, settings, limit_s in OFFLOAD:
        if place.is_rehearsal:
            words, settings = TINY_OFFLOAD, {**settings, **({"device_budget": "1MiB"} if settings else {})}
        plan, is_ours = place.plans / name, kind == "patrickstar"
        command = [sys.executable, "benchmarks/bench_offload.py", "--device", place.device, *words.split()]
        command += ["--kind", kind, "--settings", json.dumps({"dtype": "bf16", **settings})]
        if stage == "plan":
            if is_ours:
                parts.append(Part(name, (*command, "--record", str(plan), "--machine", machine), 100))
            continue
        if is_ours:
            command += ["--plan", str(plan), "--rates", str(rates), "--profile", "{trace}"]
        parts.append(Part(name, (*command, "--output", "{output}"), limit_s))
    return parts if stage == "plan" else [liger(place), *parts]


def liger(place: Place) -> Part:
    """Trains with the kernels of Liger, among them its fused loss, where they are installed."""
    skip = "its kernels need CUDA" if place.is_rehearsal else ""
    if importlib.util.find_spec("liger_kernel") is None:
        skip = "liger_kernel is not installed"
    command = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv", "--tb=short")
    return Part(
        "liger",
        (*command, "--junitxml", "{junit}", "tests/gpu/test_gpu_liger.py"),
        60,
        {"GPU_TESTS_DEVICE": place.device},
        skip=skip,
    )


def stage_one(place: Place) -> list[Part]:
    """The parts of stage one."""
    here, python = {"GPU_TESTS_DEVICE": place.device}, sys.executable
    tests = ("-m", "gpu", "-p", "no:cacheprovider", "-vv", "-rfEs", "--tb=short", "--junitxml", "{junit}")
    pytest = (python, "-m", "pytest", *tests)
    # Less than the limit of the part, so that a test that hangs is named.
    most = {seconds: () if place.is_rehearsal else ("-o", f"timeout={seconds}") for seconds in (30, 45, 60)}
    measured, workers = "tests/gpu/test_measure_cuda.py", "2" if place.is_rehearsal else "4"
    growing = {} if place.is_rehearsal else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    numel = ("--numel", str(2**20 if place.is_rehearsal else 2**28))
    smoke = (python, "scripts/gpu_smoke.py", "--device", place.device, *numel, "--output", "{output}")
    races = ("tests/gpu/test_gpu_races.py", "-k", "gpt2 and plain")
    no_streams = "torch's sanitizer needs the streams of CUDA" if place.is_rehearsal else ""
    overhead = {
        f"overhead_{dtype}": Part(
            f"overhead_{dtype}",
            (
                *(python, "benchmarks/bench_overhead.py", "--device", place.device, "--dtype", dtype),
                *(TINY_OVERHEAD if place.is_rehearsal else words).split(),
                *("--output", "{output}"),
            ),
            40,
        )
        for dtype, words in OVERHEAD.items()
    }
    return [
        Part("smoke", smoke, 75),
        # Engines of a training have segments that grow; in these processes others take memory first.
        Part("tests", (*pytest, *most[60], "tests/gpu", "--ignore", measured, "-n", workers), 130, {**here, **growing}),
        overhead["overhead_bf16"],
        # torch's own sanitizer knows streams and events: it finds uses of memory that no event orders.
        Part(
            "races",
            (*pytest, *most[30], *races),
            45,
            {**here, "TORCH_CUDA_SANITIZER": "1"},
            races=True,
            skip=no_streams,
        ),
        Part("rates", (*pytest, *most[45], measured), 60, {**here, "MACHINE_JSON": "{output}"}),
        overhead["overhead_fp32"],
    ]


def run_part(part: Part, limit_s: float, place: Place, log: TextIO) -> dict:
    """Runs a part.

    Args:
        part: The part.
        limit_s: The most seconds that it may take now.
        place: Where it leaves what it writes.
        log: What it prints is added to this file.

    Returns:
        What came of it. ``outcome`` is ``passed``, ``failed``, ``timed out`` or ``skipped``, and ``why`` says why.
    """
    files = {"{output}": place.file(part.name), "{junit}": place.folder / f"{part.name}.xml"}
    files["{trace}"] = pathlib.Path(log.name).with_suffix(f".{part.name}.trace.json.gz")
    for file in files.values():
        file.unlink(missing_ok=True)
    words = {name: str(file) for name, file in files.items()}
    environment = {**os.environ, **ENVIRONMENT, **part.environment}
    environment = {key: words.get(value, value) for key, value in environment.items()}
    log.write(f"\n===== {part.name}\n")
    log.flush()
    begin, place_in_log = time.monotonic(), log.tell()
    code = run_command([words.get(word, word) for word in part.command], environment, limit_s, log)
    record = {"seconds": round(time.monotonic() - begin, 1), "limit_s": round(limit_s, 1), "exit_code": code}
    with open(log.name, errors="replace") as written:
        written.seek(place_in_log)
        text = written.read()
    if len(text) > LOGGED_CHARS:
        log.truncate(place_in_log)
        log.seek(place_in_log)
        log.write(f"{text[: LOGGED_CHARS // 2]}\n[...]\n{text[-LOGGED_CHARS // 2 :]}")
    record |= judge(part, code, text)
    readers = {"result": (json.loads, "{output}"), "tests": (read_junit, "{junit}")}
    for key, (read, name) in readers.items():
        if files[name].exists():
            try:
                record[key] = read(files[name].read_text())
            except (ValueError, xml.etree.ElementTree.ParseError) as error:
                record |= {"outcome": "failed", "why": f"{files[name]} cannot be read: {error}"}
    return {**record, "tail": text[-KEPT_CHARS:]}


def run_command(command: list[str], environment: dict[str, str], limit_s: float, log: TextIO) -> int | str:
    """The exit code of a command, or why there is none."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        return str(error)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:  # it, and whatever it has started and left
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(3)


def judge(part: Part, code: int | str, text: str) -> dict:
    """The outcome of a command."""
    if code == "timed out":
        return {"outcome": code, "why": "it took longer than its limit"}
    if part.races and re.search(r"CSAN detected|possible data race", text):
        return {"outcome": "failed", "why": "the sanitizer has found a race"}
    return {"outcome": "failed", "why": f"exit code {code}"} if code != 0 else {"outcome": "passed", "why": ""}


def read_junit(text: str) -> dict:
    """How many tests there were, the first line of each failure, and why others were skipped."""
    found: dict = {"passed": 0, "failed": {}, "skipped": {}}
    for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        why = [child.get("message", "").strip().split("\n")[0][:300] for child in (*bad, *case.findall("skipped"))]
        if why:
            found["failed" if bad else "skipped"][case.get("name", "?")] = why[0]
        else:
            found["passed"] += 1
    return found


def run_stage(
    stage: str, parts: Iterable[Part], deadline_s: float, place: Place, folder: pathlib.Path, *, is_whole: bool = True
) -> bool:
    """Runs one part after the other, whatever comes of each, and writes the record and the log after every one.

    Args:
        stage: Its name.
        parts: Its parts.
        deadline_s: When all have to be done, by ``time.monotonic``; a part that finds too little time left has failed.
        place: Where they run.
        folder: Where the record and the log go.
        is_whole: Whether these are all of its parts; otherwise the record gets another name.

    Returns:
        Whether every part passed or was skipped.
    """
    begin, machine, records = time.monotonic(), describe_machine(needs_device(stage, place)), {}
    name = re.sub(r"\W+", "_", str(machine["device"])).strip("_").lower()
    target = folder / f"gpu_check_{stage}_{name}{'' if is_whole else '_only'}.json"
    for each in (folder, place.plans):
        each.mkdir(parents=True, exist_ok=True)
    head = {"check": "gpu_check", "stage": stage, "is_whole": is_whole, "is_rehearsal": place.is_rehearsal}
    head["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def is_ok() -> bool:
        return all(record["outcome"] in ("passed", "skipped") for record in records.values())

    def write() -> None:
        seconds = round(time.monotonic() - begin, 1)
        record = {**head, "ok": is_ok(), "seconds": seconds, **machine, "parts": records}
        new = target.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(target)  # whatever ends this process, the record is whole

    with open(target.with_suffix(".log"), "w", errors="replace") as log:
        for part in parts:
            left = deadline_s - time.monotonic()
            records[part.name] = {"outcome": "begun", "why": "the check ended before the part", "seconds": 0.0}
            write()
            if part.skip:
                records[part.name] |= {"outcome": "skipped", "why": part.skip}
            elif left < LEAST_S:
                records[part.name] |= {"outcome": "failed", "why": "no time was left for it"}
            else:
                # A rehearsal is no measurement: a machine that does other work has more time.
                limit_s = max(part.limit_s, 150) if place.is_rehearsal else part.limit_s
                records[part.name] = run_part(part, min(limit_s, left), place, log)
            write()
            show(part.name, records[part.name])
    print(f"gpu_check: stage {stage} {'ok' if is_ok() else 'failed'}, written to {target}", flush=True)
    return is_ok()


def show(name: str, record: Mapping) -> None:
    """Prints what came of a part."""
    is_fine = record["outcome"] in ("passed", "skipped")
    why = f" ({record['why']})" if record["why"] else ""
    print(f"== {name}: {record['outcome']}{why} in {record['seconds']} s")
    print(record.get("tail", "")[-TAIL_CHARS[is_fine] :].strip(), flush=True)


def describe_machine(asks_device: bool) -> dict:
    """Hardware, versions and commit; the device is asked through NVML, so that this process takes none of it."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    found: dict = {"device": "cpu"}
    if asks_device:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            found = {
                "device": pynvml.nvmlDeviceGetName(handle),
                "num_devices": pynvml.nvmlDeviceGetCount(),
                "device_nbytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "driver": pynvml.nvmlSystemGetDriverVersion(),
            }
        except Exception as error:  # no library, no rights, a device that NVML does not know
            found = {"device": "unknown", "nvml": str(error)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found["host_nbytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {**found, "cores": cores, "versions": versions, "commit": os.environ["COMMIT"]}


def find_commit(place: Place) -> str:
    """The commit by git, or else the one that the plans were made of, which are carried to machines without git."""
    words = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    kept = place.plans / "commit"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    return os.environ.get("COMMIT") or (f"{kept.read_text()} (of the plans)" if kept.exists() else "unknown")


def needs_device(stage: str, place: Place) -> bool:
    """Whether a stage runs on an accelerator."""
    return stage != "plan" and not place.is_rehearsal


def why_not() -> str:
    """Why nothing can be checked here; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else "torch finds no accelerator on this machine; run it on one with a GPU"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--stage", choices=list(SECONDS), default="one", help="by default 'one'")
    options.add_argument("--rehearse", action="store_true", help="all stages with tiny sizes on the CPU tier")
    options.add_argument("--seconds", type=float, help=f"for all parts; by default {SECONDS}")
    options.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    options.add_argument("--dry-run", action="store_true", help="say what would be run, on any machine")
    options.add_argument("--output", type=pathlib.Path, help="the folder of the record and the log")
    options.add_argument("--machine", default=str(MACHINE), help="for stage plan: a known machine, or a file of rates")
    chosen = options.parse_args(arguments)
    place = REHEARSAL if chosen.rehearse else HERE
    os.environ["COMMIT"] = find_commit(place)
    stages = list(SECONDS) if chosen.rehearse else [chosen.stage]
    if chosen.only:
        known = [part.name for stage in stages for part in parts_of(stage, place)]
        unknown = sorted(set(chosen.only) - set(known))
        if unknown:
            options.error(f"no part is called {', '.join(unknown)}; there are {', '.join(dict.fromkeys(known))}")
    if chosen.dry_run:
        for part in (part for stage in stages for part in parts_of(stage, place, chosen.machine)):
            words = [f"{key}={value}" for key, value in part.environment.items()]
            print(f"{part.name} ({part.limit_s:g} s): {' '.join([*words, *part.command])}")
        return 0
    on_device = needs_device(chosen.stage, place)
    reason = why_not() if on_device else ""
    if reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    folder = os.environ.get("OUT") or (ROOT / "benchmarks" / "results" if on_device else place.folder)
    deadline_s, is_ok = BEGIN_S + (chosen.seconds or (REHEARSAL_S if chosen.rehearse else SECONDS[chosen.stage])), True
    for stage in stages:
        parts = parts_of(stage, place, chosen.machine)  # now, since it depends on what the stages before have left
        parts = [part for part in parts if not chosen.only or part.name in chosen.only]
        if not parts:
            continue
        target = pathlib.Path(chosen.output or folder)
        is_ok &= run_stage(stage, parts, deadline_s, place, target, is_whole=not chosen.only)
        if stage == "plan":
            (place.plans / "commit").write_text(os.environ["COMMIT"])
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
