"""Seconds and memory of planning, and seconds of what a run computes before it allocates anything.

**Plans.** ``hf-patrickstar plan`` in a process of its own, which loads the libraries, too: the first question with an
empty cache and ``--no-advice``, the same question again, the same with another budget of the device, and a first
question with advice and an empty cache. The first row is a process that loads the libraries and does nothing. Printed
are wall seconds and the most memory of the process (``ru_maxrss``), beside the budgets of ``BUDGET_S`` and
``BUDGET_NBYTES``. The cache is a temporary folder (``HF_ASSETS_CACHE``).

**Runs.** A new process makes a model of fake tensors and an engine of it, which stops where it has decided everything
and would allocate chunks (``ModelDecided``). Timed is the construction of the engine up to there, without traces of a
plan and with those that a plan has left in the cache, beside the budget of ``RUN_BUDGET_S``. The machine is not here:
the engine gets streams of a device that carry nothing.

Both depend on what else the machine does; ``--rounds`` repeats everything, and all values are written down.

    python benchmarks/bench_plan_time.py [--plans 12b 70b] [--runs 1.5b 8b 70b] [--rounds 3]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import common
from transformers import LlamaConfig

from hf_patrickstar.units import GIB, format_nbytes

BUDGET_S, BUDGET_NBYTES = 60, 4 * GIB
"""Of the first plan."""
REPEAT_BUDGET_S = 1
"""Of a plan for a budget that differs; loading the libraries comes on top of it."""
LIBRARIES = "hf_patrickstar.planner.planning"
RUN_BUDGET_S = 2
"""Of what a run computes before it allocates."""
MACHINE, HOST_MEMORY = "h100", 1200 * GIB
"""Where all of these models fit; ``HOST_MEMORY`` is more than the machine of this name has."""


def llama(layers, hidden, inner, key_value_heads=None):
    """Sizes of a Llama-like model with heads of 128."""
    heads = hidden // 128
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 32_000}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads or heads}
    return {**sizes, **heads_of, "max_position_embeddings": 4096}


LLAMAS = {
    "tiny": llama(2, 256, 512),
    "1.5b": llama(28, 2048, 5632),
    "8b": llama(36, 4096, 12288),
    "70b": llama(80, 8192, 28672, key_value_heads=8),
}


def text_of(kind, sizes):
    """A model as the command line takes it."""
    return f"{kind}:" + ",".join(f"{name}={value}" for name, value in sizes.items())


PLANS = {
    "tiny": (text_of("gpt2", {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 1024}), "40GiB"),
    "12b": (text_of("gpt2", {"n_layer": 60, "n_embd": 4096, "n_head": 16, "n_positions": 1024}), "60GiB"),
    "70b": (text_of("llama", LLAMAS["70b"]), "70GiB"),
}
"""Models, and device memory for another plan."""


def measure_python(words, cache):
    """Wall seconds and peak bytes of a Python process with these arguments."""
    environment = {**os.environ, "HF_ASSETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=common.ROOT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)  # nobody else may wait for it
        if process.returncode:  # all of these fit
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-4000:]
            raise SystemExit(f"bench_plan_time: exit status {process.returncode} of {' '.join(words)}\n{said}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": seconds, "peak_nbytes": usage.ru_maxrss * unit}


def plan_times(name, options):
    """The four questions about a model."""
    model, other = PLANS[name]
    words = [
        "-m",
        "hf_patrickstar",
        "plan",
        model,
        "--machine",
        MACHINE,
        "--host-memory",
        str(HOST_MEMORY),
        "--gradient-checkpointing",
    ]
    words += ["--batch-size", str(options.batch_size), "--seq-len", "1024"]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as advised:
        questions = {
            "libraries alone": (["-c", f"import {LIBRARIES}"], first),
            "first": ([*words, "--no-advice"], first),
            "same again": ([*words, "--no-advice"], first),
            "another budget": ([*words, "--no-advice", "--device-memory", other], first),
            "first, with advice": (words, advised),
        }
        budgets = {"first": BUDGET_S, "another budget": REPEAT_BUDGET_S}
        rows = []
        for question, (asked, cache) in questions.items():
            row = {"model": name, "question": question, "budget_s": budgets.get(question)}
            rows.append({**row, **measure_python(asked, cache)})
            show_plan(rows[-1])
    return rows


def show_plan(row):
    """Prints a row."""
    budget = f"of {row['budget_s']} s" if row["budget_s"] else ""
    print(
        f"{row['model']:>6} {row['question']:<20}{row['seconds']:>9.1f} s {budget:<8}"
        f"{format_nbytes(row['peak_nbytes']):>12} of {format_nbytes(BUDGET_NBYTES)}",
        flush=True,
    )


class _NoDriver:
    """Below streams that carry nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _DecidedError(Exception):
    """Ends the construction of an engine where everything is decided."""


def arranged(name):
    """What is trained, and where."""
    from hf_patrickstar.planner.planning import arrange

    return arrange(
        LlamaConfig(**LLAMAS[name]),
        MACHINE,
        task="causal-lm",
        batch_size=1,
        length=4096,
        num_micro_batches=1,
        world_size=1,
        checkpointing=True,
        dtype="bf16",
        optimizer="adamw",
        max_norm=1.0,
        device_memory=None,
        host_memory=HOST_MEMORY,
        settings=None,
    )


def plan_here(name):
    """Leaves a plan's traces in the cache."""
    from hf_patrickstar.planner.planning import plan_for_runs

    plan_for_runs(*arranged(name))
    return {}


def construct_here(name):
    """Makes a model and an engine of it in this process, up to the decision."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_patrickstar import PatrickStarEngine
    from hf_patrickstar.events import ModelDecided
    from hf_patrickstar.memory.streams import DeviceStreams
    from hf_patrickstar.tracing.answers import AnsweringMode

    subject, given = arranged(name)
    machine = given.machine
    settings = {
        **given.settings,
        "device_budget": machine.device_nbytes,
        "host_budget": machine.host_nbytes,
        "machine": machine,
        "pin_memory": False,  # there is no device that copies from it
        "overlap_optimizer": True,
    }
    texts = []

    def listen(event):
        if isinstance(event, ModelDecided):
            texts.append((time.perf_counter(), event.text))
            raise _DecidedError

    streams = DeviceStreams(torch.device("cpu"), _NoDriver())
    with FakeTensorMode(), AnsweringMode():
        model = subject.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        begin = time.perf_counter()
        try:
            PatrickStarEngine(model, settings, optimizer, device=streams, listener=listen)
        except _DecidedError:
            end, text = texts[0]
            return {"seconds": end - begin, "expected": text}
    raise SystemExit("bench_plan_time: the engine was made without ModelDecided")


HERE = {"plan": plan_here, "construct": construct_here}


def in_a_process(what, name, cache):
    """Does the same in a process of its own with a cache."""
    environment = {**os.environ, "HF_ASSETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, name], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"bench_plan_time: a process failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_times(name, options):
    """Seconds before allocation, without and with the traces of a plan."""
    rows = []
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as cache:
        for kept in (False, True):
            if kept:
                in_a_process("plan", name, cache)
            found = [in_a_process("construct", name, cache if kept else empty) for _ in range(options.rounds)]
            if any(("per step" in each["expected"]) is not kept for each in found):  # what only traces tell
                raise SystemExit(f"bench_plan_time: traces were {'not ' if kept else ''}found: {found[0]['expected']}")
            seconds = [each["seconds"] for each in found]
            row = {"model": name, "kept_traces": kept, "seconds": statistics.median(seconds), "all_seconds": seconds}
            rows.append({**row, "budget_s": RUN_BUDGET_S, "expected": found[0]["expected"]})
            what = "with traces of a plan" if kept else "without traces"
            print(f"{name:>6} {what:<24}{rows[-1]['seconds']:>8.2f} s of {RUN_BUDGET_S} s; {rows[-1]['expected']}")
    return rows


def main():
    """Prints both tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=["12b", "70b"])
    parser.add_argument("--runs", nargs="*", choices=list(LLAMAS), default=["1.5b", "8b", "70b"])
    parser.add_argument("--batch_size", type=int, default=16, help="sequences, for --plans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help="for itself")
    options = parser.parse_args()
    if options.child:
        what, name = options.child
        print(json.dumps(HERE[what](name)))
        return
    print(f"wall seconds; a process that loads the libraries, batch {options.batch_size} x 1024 on '{MACHINE}'")
    plans = [row for _ in range(options.rounds) for name in options.plans for row in plan_times(name, options)]
    print("seconds of making an engine until it would allocate, medians")
    runs = [row for name in options.runs for row in run_times(name, options)]
    result = {"budget_s": BUDGET_S, "budget_nbytes": BUDGET_NBYTES, "plans": plans, "runs": runs}
    common.finish("bench_plan_time", options, result)


if __name__ == "__main__":
    main()
