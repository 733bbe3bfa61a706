"""Virtual time beside measured time: the step of a GPT-2 on this machine, under several budgets.

The rates of this machine are measured first. Then the engine trains the same model with the same settings twice: in
earnest, and on fake tensors in virtual time. What moves must be the same; the ratio of the two times says how much the
clock can be trusted here. All chunks are at home on the host, blocks are recomputed, clipping is on.

Without an accelerator the two lanes that the clock keeps apart, the device and the host, share their cores: ratios on
the CPU tier tell little of those on a device.
"""

import dataclasses
import statistics
import sys
import time

import common
import torch
from bench_overhead import MAX_NORM, make_our_step
from tqdm import tqdm

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.report.measure import measure_machine
from hf_patrickstar.units import format_nbytes
from hf_patrickstar.virtual.recording import record_step

VOCABULARY = 256


def make_model(options):
    """The model; under fake tensors it has no bytes."""
    model = common.make_gpt2(options.layers, options.hidden, VOCABULARY, positions=options.length)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def settings_of(options, budget):
    """The settings of both engines."""
    return {
        "dtype": options.dtype,
        "autocast": False,
        "cpu_embedding": False,
        "placement": "host",
        "chunk_numel": options.chunk_numel,
        "chunk_budget": budget,
    }


def measure(options, budget):
    """Seconds of steps of a real engine, and how many chunks each has loaded."""
    device = torch.device(options.device)
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = PatrickStarEngine(model, settings_of(options, budget), optimizer, device=device)
    step = make_our_step(model, engine)
    seconds, loads = [], 0
    try:
        for number in range(options.warmup + options.steps):
            batch = common.make_batch(number, options.batch_size, options.length, VOCABULARY, device)
            common.synchronize(device)
            before, begin = engine.stats()["chunk_loads"], time.perf_counter()
            step(batch)
            common.synchronize(device)
            if number >= options.warmup:
                seconds.append(time.perf_counter() - begin)
            loads = engine.stats()["chunk_loads"] - before
    finally:
        engine.detach()
    return seconds, loads


def simulate(options, budget, machine):
    """The same in virtual time."""

    def make_inputs():
        tokens = torch.zeros((options.batch_size, options.length), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    config = settings_of(options, budget)
    return record_step(lambda: make_model(options), make_inputs, machine, config=config, max_norm=MAX_NORM)


def compare(options, fraction, model_nbytes, machine):
    """One row: both times under a budget of so many of the model's bytes."""
    budget = int(fraction * model_nbytes)
    seconds, loads = measure(options, budget)
    recording = simulate(options, budget, machine)
    virtual_s, measured_s = recording.timeline.duration_ns / 1e9, statistics.median(seconds)
    return {
        "fraction": fraction,
        "chunk_budget": budget,
        "measured_s": measured_s,
        "measured_quartiles_s": statistics.quantiles(seconds, n=4),
        "virtual_s": virtual_s,
        "virtual_over_measured": virtual_s / measured_s,
        "measured_loads": loads,
        "virtual_loads": sum(plan.num_loads for plan in recording.plans),
        "busy_s": {lane.value: nanoseconds / 1e9 for lane, nanoseconds in recording.timeline.busy_ns().items()},
    }


def show(row):
    """Prints a row."""
    quartiles = row["measured_quartiles_s"]
    print(
        f"{row['fraction']:>8.0%}{format_nbytes(row['chunk_budget']):>12}{row['measured_s']:>11.4f} s"
        f"  ({quartiles[0]:.4f} to {quartiles[2]:.4f}){row['virtual_s']:>10.4f} s"
        f"{row['virtual_over_measured']:>8.2f}{row['measured_loads']:>7}{row['virtual_loads']:>9}"
    )


def main():
    """Prints both times for each budget."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="bf16")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk_numel", type=int, default=2**21)
    parser.add_argument("--fractions", nargs="+", type=float, default=[1.25, 0.6, 0.3], help="of the model's bytes")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    machine = measure_machine(progress=lambda names: tqdm(names, desc="rates", disable=None, file=sys.stderr))
    model = make_model(options)
    num_parameters = model.num_parameters()
    model_nbytes = num_parameters * common.DTYPES[options.dtype].itemsize
    del model
    print(f"{machine.name}: {num_parameters / 1e6:.1f} M parameters, {options.dtype}")
    print("of model      budget   measured    quartiles                virtual   ratio  loads  virtual")
    rows = []
    for fraction in options.fractions:
        rows.append(compare(options, fraction, model_nbytes, machine))
        show(rows[-1])
    common.finish(
        "bench_virtual",
        options,
        {"machine": dataclasses.asdict(machine), "parameters": num_parameters, "rows": rows},
    )


if __name__ == "__main__":
    main()
