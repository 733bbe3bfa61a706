"""Checks the package on a GPU, in parts that fit into two calls of less than ten minutes.

The parts tell whether the package works on this device (smoke, tests, races, two processes), how fast it is beside
plain torch and the stock Trainer, where the seconds of a step went, and what the planner says of it at the device's own
rates. ``--rehearse`` runs all of them on the CPU tier with tiny sizes.

A part is a command of its own with a limit of time. A part that fails, hangs or cannot start is reported, and the
others run all the same. The record (JSON) and the log are written after every part, to ``$OUT`` if that is set and else
to ``benchmarks/results``; git is not needed, and ``$COMMIT`` may say what git would. A call ends by itself: it begins
no part for which too little time is left. The same command then goes on with the parts that have not passed, those that
failed last. It finds the record of this device and of these sources in its folder, in ``build/gpu_check`` and in
``benchmarks/results``.

Exit code 0: every part passed, or was skipped for a reason that the record names; 1: a part did not pass, or is left;
2: this machine has no accelerator.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, TextIO

BEGIN_S = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parent.parent
CALL_S = 570.0
"""Seconds of a call, so that it ends before ten minutes have passed."""
REHEARSAL_S = 900.0
TAIL_CHARS = {True: 700, False: 1700}
"""What the console shows of a part: of one that is fine, and of one that is not."""
KEPT_CHARS = 6000
LOGGED_CHARS = 1_500_000
"""The most characters of one part in the log, since ``$OUT`` may be a folder that takes no large files."""
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH")])),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # runs are compared bit for bit
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",  # the name of the machine may lead nowhere
    "NCCL_SOCKET_IFNAME": "lo",
}
NAME = "record.json"
FINE = ("passed", "skipped")
PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "trl", "numpy", "safetensors", "nvidia-ml-py"),
    "bitsandbytes",
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
# The device is busy all the time there: a smaller model would measure the host, which is what --deep is for.
OVERHEAD = "--layers 12 --hidden 1536 --batch_size 4 --length 1024 --steps 10 --repeats 1 --limit 1.05"
TINY_OVERHEAD = "--layers 2 --hidden 64 --batch_size 2 --length 16 --steps 2 --repeats 1 --limit 99"
DEEP, TINY_DEEP = "--deep 300 --steps 5 --repeats 1", "--deep 10 --steps 2 --repeats 1"
TINY_OFFLOAD = "--size tiny --batch_size 2 --length 16 --warmup 3 --steps 2"
# 0.95 of a device of 24 GiB, as "auto" takes, where torch's allocator gets 23 GiB: the libraries take the rest.
IN_24_GIB, CAP_24, CHUNKED = {"device_budget": "22.8GiB"}, "--cap_gib 23", {"chunked_loss": True}
IN_80_GB, CAP_80 = {"device_budget": "75GiB"}, "--cap_gib 76"
OFFLOAD = (
    ("3b_24GiB", "patrickstar", f"--size 3b --warmup 3 --steps 3 {CAP_24}", IN_24_GIB, 52),
    ("3b_24GiB_host", "patrickstar", f"--size 3b --warmup 3 --steps 3 {CAP_24}", {**IN_24_GIB, "updates": "host"}, 52),
    ("3b_24GiB_chunked", "patrickstar", f"--size 3b --warmup 3 --steps 3 {CAP_24}", {**IN_24_GIB, **CHUNKED}, 52),
    # Twice, so that a difference in the sixth digit of a loss can be told from the device's own.
    ("3b_plain", "plain", "--size 3b --warmup 2 --steps 3", {}, 26),
    ("3b_plain_again", "plain", "--size 3b --warmup 2 --steps 3", {}, 26),
    ("3b_auto", "patrickstar", "--size 3b --warmup 3 --steps 3", {}, 38),
    ("8b_auto", "patrickstar", "--size 8b --warmup 3 --steps 2", {}, 90),
    ("8b_16k", "patrickstar", f"--size 8b --batch_size 1 --length 16384 --warmup 2 --steps 2 {CAP_80}", IN_80_GB, 95),
    ("3b_trainer", "trainer", f"--size 3b --warmup 3 --steps 3 {CAP_24}", IN_24_GIB, 55),
    # Activations that leave, and logits that are never whole: without them the batch has no room in 24 GiB.
    (
        *("3b_32k_24GiB", "patrickstar", f"--size 3b --batch_size 1 --length 32768 --warmup 2 --steps 2 {CAP_24}"),
        *({**IN_24_GIB, **CHUNKED}, 65),
    ),
    ("3b_fsdp2", "fsdp2", "--size 3b --warmup 1 --steps 3", {}, 80),
)
"""Rows of ``bench_offload.py``: name, way to train, its words, settings of the engine, and the seconds it takes."""
PLANNED = (
    "llama:hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,num_key_value_heads=8,"
    "vocab_size=128256,tie_word_embeddings=true"
)
PLAN = f"{PLANNED} --batch-size 4 --seq-len 2048 --gradient-checkpointing --device-memory 22.8GiB"
TINY_PLAN = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=256 --seq-len 16 --device-memory 64MiB"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: Its name in the record.
        command: What is run; ``{output}`` stands for a file that the command may write its own JSON to, ``{junit}`` for
            one that pytest writes its report to, and ``{trace}`` for a trace of torch's profiler beside the record.
        seconds: What it takes. It is not begun if less is left, and may take twice as long and a little more.
        environment: Environment variables beside those of all parts, likewise.
        races: Whether a report of a race in its output is a failure, whatever its exit code is.
        skip: Why it is not run here; empty if it is.
        is_optional: Whether it runs only if it is named.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    races: bool = False
    skip: str = ""
    is_optional: bool = False

    @property
    def limit_s(self) -> float:
        """The most seconds that it may take."""
        return 2 * self.seconds + 20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where parts run and leave what later ones read.

    Attributes:
        device: The device.
        folder: A folder for results and traces of parts, and for a copy of the record.
        is_rehearsal: Whether sizes are tiny.
    """

    device: str
    folder: pathlib.Path
    is_rehearsal: bool

    def file(self, name: str) -> pathlib.Path:
        """What a part has written."""
        return self.folder / f"{name}.json"


HERE = Place("cuda:0", ROOT / "build" / "gpu_check", False)
REHEARSAL = Place("cpu", ROOT / "build" / "gpu_rehearsal", True)


def parts_of(place: Place) -> list[Part]:
    """The parts, in their order."""
    here, python, is_tiny = {"GPU_TESTS_DEVICE": place.device}, sys.executable, place.is_rehearsal
    tests = ("-m", "gpu", "-p", "no:cacheprovider", "-vv", "-rfEs", "--tb=short", "--junitxml", "{junit}")

    def pytest(name: str, seconds: float, most: int, *words: str, **others: Any) -> Part:
        # Less than the limit of the part, so that a test that hangs is named.
        limit = () if is_tiny else ("-o", f"timeout={most}")
        environment = {**here, **others.pop("environment", {})}
        return Part(name, (python, "-m", "pytest", *tests, *limit, *words), seconds, environment, **others)

    def overhead(name: str, seconds: float, words: str) -> Part:
        command = (python, "benchmarks/bench_overhead.py", "--device", place.device, *words.split())
        return Part(name, (*command, "--output", "{output}"), seconds)

    def offload(name: str, kind: str, words: str, settings: Mapping[str, Any], seconds: float) -> Part:
        if is_tiny:
            words, settings = TINY_OFFLOAD, {**settings, **({"device_budget": "1MiB"} if settings else {})}
        command = [python, "benchmarks/bench_offload.py", "--device", place.device, "--kind", kind, *words.split()]
        command += ["--settings", json.dumps({"dtype": "bf16", **settings})]
        command += ["--profile", "{trace}"] if kind == "patrickstar" else []
        return Part(name, (*command, "--output", "{output}"), seconds, is_optional=kind == "fsdp2")

    rows = {name: offload(name, *others) for name, *others in OFFLOAD}
    first = rows.keys() - {"3b_trainer", "3b_32k_24GiB"}
    measured, together = "tests/gpu/test_measure_cuda.py", "tests/gpu/test_gpu_processes.py"
    numel = ("--numel", str(2**20 if is_tiny else 2**28))
    smoke = (python, "scripts/gpu_smoke.py", "--device", place.device, *numel, "--output", "{output}")
    growing = {} if is_tiny else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    no_streams = "torch's sanitizer needs the streams of CUDA" if is_tiny else ""
    plan = (python, "-m", "hf_patrickstar", "plan", *(TINY_PLAN if is_tiny else PLAN).split())
    return [
        Part("smoke", smoke, 45),
        pytest("rates", 25, 45, measured, environment={"MACHINE_JSON": "{output}"}),
        *(part for name, part in rows.items() if name in first),
        overhead("overhead_bf16", 32, f"--dtype bf16 {TINY_OVERHEAD if is_tiny else OVERHEAD}"),
        overhead("overhead_deep", 30, TINY_DEEP if is_tiny else DEEP),
        *(part for name, part in rows.items() if name not in first),
        pytest("two_processes", 35, 60, together),
        # Engines of a training have segments that grow; in these processes others take memory first.
        pytest(
            *("tests", 60, 60, "tests/gpu", "--ignore", measured, "--ignore", together, "-n", "2" if is_tiny else "4"),
            environment=growing,
        ),
        # torch's own sanitizer knows streams and events: it finds uses of memory that no event orders.
        pytest(
            *("races", 27, 30, "tests/gpu/test_gpu_races.py", "-k", "gpt2 and plain"),
            environment={"TORCH_CUDA_SANITIZER": "1"},
            races=True,
            skip=no_streams,
        ),
        Part("plan", (*plan, "--machine", "this", "--no-advice", "--json", "{output}"), 30),
        Part("replays", (python, "benchmarks/bench_offload.py", "--replay", "{record}", "--output", "{output}"), 40),
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
    files["{trace}"] = place.folder / f"{part.name}.trace.json"
    for file in files.values():
        file.unlink(missing_ok=True)
    words = {name: str(file) for name, file in files.items()} | {"{record}": str(place.folder / NAME)}
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


def run_parts(
    parts: Sequence[Part],
    deadline_s: float,
    place: Place,
    folder: pathlib.Path,
    *,
    named: Collection[str] = (),
    is_new: bool = False,
) -> bool:
    """Runs one part after the other, whatever comes of each, and writes the record and the log after every one.

    Args:
        parts: All parts.
        deadline_s: When all have to be done, by ``time.monotonic``.
        place: Where they run.
        folder: Where the record and the log go.
        named: Run these, whether they have passed or not; by default those that have not passed.
        is_new: Whether no record is gone on with.

    Returns:
        Whether every part that was to run passed, or was skipped.
    """
    begin, machine = time.monotonic(), describe_machine(not place.is_rehearsal)
    head = {"check": "gpu_check", "device": machine["device"], "sources": digest(), "is_rehearsal": place.is_rehearsal}
    target, copy = folder / name_of(machine["device"]), place.folder / NAME
    known = () if is_new else (target, copy, ROOT / "benchmarks" / "results" / target.name)
    before = find_record(known, head)
    records = {part.name: {"outcome": "left", "why": "", "seconds": 0.0} for part in parts if not part.is_optional}
    records |= before.get("parts", {})
    for each in (folder, place.folder):
        each.mkdir(parents=True, exist_ok=True)

    def is_ok() -> bool:
        return all(record["outcome"] in FINE for record in records.values())

    def write() -> None:
        seconds = round(before.get("seconds", 0.0) + time.monotonic() - begin, 1)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = {**head, "date": date, "ok": is_ok(), "seconds": seconds, **machine, "parts": records}
        for path in (target, copy):
            new = path.with_suffix(".new")
            new.write_text(json.dumps(record, indent=1) + "\n")
            new.replace(path)  # whatever ends this process, the record is whole

    def is_tried(part: Part) -> bool:
        return part.name in records and records[part.name]["outcome"] != "left"

    chosen = [part for part in parts if (part.name in named if named else not part.is_optional)]
    if not named:
        chosen = [part for part in chosen if records[part.name]["outcome"] not in FINE]
        chosen.sort(key=is_tried)  # what failed, or has ended the check, stands in the way of no other
    with open(target.with_suffix(".log"), "a" if before else "w", errors="replace") as log:
        for part in chosen:
            left = deadline_s - time.monotonic()
            if part.skip:
                records[part.name] = {"outcome": "skipped", "why": part.skip, "seconds": 0.0}
            elif left < part.seconds and not place.is_rehearsal:
                break  # another call is soon begun, and what comes later may read what this part leaves
            else:
                records[part.name] = {"outcome": "begun", "why": "the check ended before the part", "seconds": 0.0}
                write()
                # A rehearsal is no measurement: a machine that does other work has more time.
                limit_s = max(part.limit_s, 400) if place.is_rehearsal else part.limit_s
                records[part.name] = run_part(part, min(limit_s, left), place, log)
            write()
            show(part.name, records[part.name])
    write()
    left_over = [name for name, record in records.items() if record["outcome"] == "left"]
    more = f"; run the same command again for {', '.join(left_over)}" if left_over else ""
    print(f"gpu_check: {'ok' if is_ok() else 'not ok'}, written to {target}{more}", flush=True)
    return all(records[part.name]["outcome"] in FINE for part in chosen)


def name_of(device: str) -> str:
    """The name of the record of a device."""
    return f"gpu_check_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def find_record(paths: Iterable[pathlib.Path], head: Mapping[str, Any]) -> dict:
    """The latest record of these sources and this device; an empty one if there is none."""
    found: list[dict] = [{}]
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            if all(record.get(key) == value for key, value in head.items()):
                found.append(record)
    return max(found, key=lambda record: record.get("date", ""))


def digest() -> str:
    """A number of what is checked; git may not be here, and does not tell changes that are in no commit apart."""
    found = hashlib.sha256()
    for folder in ("hf_patrickstar", "benchmarks", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def show(name: str, record: Mapping) -> None:
    """Prints what came of a part."""
    is_fine = record["outcome"] in FINE
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


def find_commit() -> str:
    """The commit by git, or else what the environment says."""
    words = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    return os.environ.get("COMMIT", "unknown")


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
    options.add_argument("--rehearse", action="store_true", help="all parts with tiny sizes on the CPU tier, anew")
    options.add_argument("--seconds", type=float, help=f"of this call; by default {CALL_S:g}")
    options.add_argument("--only", nargs="+", metavar="PART", help="these parts alone, also if they have passed")
    options.add_argument("--anew", action="store_true", help="go on with no earlier record")
    options.add_argument("--dry-run", action="store_true", help="say what would be run, on any machine")
    options.add_argument("--output", type=pathlib.Path, help="the folder of the record and the log")
    chosen = options.parse_args(arguments)
    place = REHEARSAL if chosen.rehearse else HERE
    os.environ["COMMIT"] = find_commit()
    parts = parts_of(place)
    unknown = sorted({*(chosen.only or ())} - {part.name for part in parts})
    if unknown:
        options.error(f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    if chosen.dry_run:
        for part in parts:
            words = [f"{key}={value}" for key, value in part.environment.items()]
            about = "optional, " * part.is_optional
            print(f"{part.name} ({about}{part.seconds:g} s): {' '.join([*words, *part.command])}")
        return 0
    reason = "" if place.is_rehearsal else why_not()
    if reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    folder = os.environ.get("OUT") or (place.folder if place.is_rehearsal else ROOT / "benchmarks" / "results")
    deadline_s = BEGIN_S + (chosen.seconds or (REHEARSAL_S if place.is_rehearsal else CALL_S))
    how = {"named": chosen.only or (), "is_new": chosen.anew or place.is_rehearsal}
    return 0 if run_parts(parts, deadline_s, place, pathlib.Path(chosen.output or folder), **how) else 1


if __name__ == "__main__":
    sys.exit(main())
