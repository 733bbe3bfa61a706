"""Seconds and memory of planning, and seconds of what a run computes before it allocates anything.

**Plans.** ``hf-patrickstar plan`` in processes of their own: the first question with an empty cache and
``--no-advice``, the same question again, the same with another budget of the device, and a first question with advice
and an empty cache. Printed are wall seconds after libraries were loaded, beside the limits of ``PLANS``; the most
resident memory of the process, beside ``LIMIT_NBYTES``; and seconds of the whole process, in which it loads libraries,
too. The cache is a temporary folder (``HF_ASSETS_CACHE``).

**Runs.** A new process makes a model of fake tensors and an engine of it, which stops where it has decided everything
and would allocate chunks (``ModelDecided``). Timed is the construction of the engine up to there, without traces of a
plan and with those that a plan has left in the cache, beside ``RUN_LIMIT_S``. The machine is not here: the engine gets
streams of a device that carry nothing.

Both depend on what else the machine does; ``--rounds`` repeats everything, and all values are written down.

    python benchmarks/bench_plan_time.py [--plans 12b 70b] [--runs 1.5b 8b 70b] [--rounds 3]
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import common
from transformers import LlamaConfig

from hf_patrickstar.units import GIB, format_nbytes

LIMIT_NBYTES = GIB
"""Of a process that plans, libraries included."""
RUN_LIMIT_S = 2
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


FIRST, OTHER = "first", "another budget"
PLANS = {
    "tiny": (text_of("gpt2", {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 1024}), "40GiB", {}),
    "12b": (
        text_of("gpt2", {"n_layer": 60, "n_embd": 4096, "n_head": 16, "n_positions": 1024}),
        "60GiB",
        {FIRST: 8, OTHER: 0.3},
    ),
    "70b": (text_of("llama", LLAMAS["70b"]), "70GiB", {FIRST: 20, OTHER: 1}),
}
"""Models, device memory for another plan, and limits in seconds."""


def ask_here(*words):
    """Wall seconds of a command, and the most resident bytes of this process."""
    import hf_patrickstar.planner.planning  # noqa: F401  # which the command would load
    from hf_patrickstar.cli.main import main

    begin = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = main(words)
    seconds = time.perf_counter() - begin
    if status:  # all of these fit
        raise SystemExit(f"bench_plan_time: exit status {status} of {' '.join(words)}")
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {"seconds": seconds, "peak_nbytes": peak}


def plan_times(name, options):
    """The four questions about a model."""
    model, other, limits = PLANS[name]
    words = ["plan", model, "--machine", MACHINE, "--host-memory", str(HOST_MEMORY), "--gradient-checkpointing"]
    words += ["--batch-size", str(options.batch_size), "--seq-len", "1024"]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as advised:
        questions = {
            FIRST: ([*words, "--no-advice"], first),
            "same again": ([*words, "--no-advice"], first),
            OTHER: ([*words, "--no-advice", "--device-memory", other], first),
            "first, with advice": (words, advised),
        }
        rows = []
        for question, (asked, cache) in questions.items():
            begin = time.perf_counter()
            found = in_a_process(cache, "ask", *asked)
            found["process_s"] = time.perf_counter() - begin
            rows.append({"model": name, "question": question, "limit_s": limits.get(question), **found})
            show_plan(rows[-1])
    return rows


def show_plan(row):
    """Prints a row."""
    limit = f"of {row['limit_s']} s" if row["limit_s"] else ""
    print(
        f"{row['model']:>6} {row['question']:<20}{row['seconds']:>9.2f} s {limit:<9}"
        f"{format_nbytes(row['peak_nbytes']):>12} of {format_nbytes(LIMIT_NBYTES)}"
        f"{row['process_s']:>9.1f} s with libraries",
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

    def stop(text):
        texts.append((time.perf_counter(), text))
        raise _DecidedError

    streams = DeviceStreams(torch.device("cpu"), _NoDriver())
    with FakeTensorMode(), AnsweringMode():
        model = subject.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        begin = time.perf_counter()
        try:
            PatrickStarEngine(model, settings, optimizer, device=streams, on_decided=stop)
        except _DecidedError:
            end, text = texts[0]
            return {"seconds": end - begin, "expected": text}
    raise SystemExit("bench_plan_time: the engine was made without a decision")


HERE = {"ask": ask_here, "plan": plan_here, "construct": construct_here}


def in_a_process(cache, what, *words):
    """Does the same in a process of its own with a cache."""
    environment = {**os.environ, "HF_ASSETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", json.dumps([what, *words])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_plan_time: a process failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_times(name, options):
    """Seconds before allocation, without and with the traces of a plan."""
    rows = []
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as cache:
        for kept in (False, True):
            if kept:
                in_a_process(cache, "plan", name)
            found = [in_a_process(cache if kept else empty, "construct", name) for _ in range(options.rounds)]
            if any(("per step" in each["expected"]) is not kept for each in found):  # what only traces tell
                raise SystemExit(f"bench_plan_time: traces were {'not ' if kept else ''}found: {found[0]['expected']}")
            seconds = [each["seconds"] for each in found]
            row = {"model": name, "kept_traces": kept, "seconds": statistics.median(seconds), "all_seconds": seconds}
            rows.append({**row, "limit_s": RUN_LIMIT_S, "expected": found[0]["expected"]})
            what = "with traces of a plan" if kept else "without traces"
            print(f"{name:>6} {what:<24}{rows[-1]['seconds']:>8.2f} s of {RUN_LIMIT_S} s; {rows[-1]['expected']}")
    return rows


def main():
    """Prints both tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=["12b", "70b"])
    parser.add_argument("--runs", nargs="*", choices=list(LLAMAS), default=["1.5b", "8b", "70b"])
    parser.add_argument("--batch_size", type=int, default=16, help="sequences, for --plans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=json.loads, help="for itself")
    options = parser.parse_args()
    if options.child:
        what, *words = options.child
        print(json.dumps(HERE[what](*words)))
        return
    print(f"wall seconds beside their limits; batch {options.batch_size} x 1024 on '{MACHINE}'")
    plans = [row for _ in range(options.rounds) for name in options.plans for row in plan_times(name, options)]
    print("seconds of making an engine until it would allocate, medians")
    runs = [row for name in options.runs for row in run_times(name, options)]
    result = {"limit_nbytes": LIMIT_NBYTES, "plans": plans, "runs": runs}
    common.finish("bench_plan_time", options, result)


if __name__ == "__main__":
    main()
