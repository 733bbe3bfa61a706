"""What a plan says against what a run does: bytes on both tiers, bytes moved, loads, and seconds.

Each model is planned as ``hf-patrickstar plan --machine this`` does it: for the machine at hand, measured first, with
operators that are timed. Then the engine trains it on the CPU tier, in the same budgets. A dispatch mode measures
activations: in a plan those of tensors without bytes. Two processes have a thread each, and measure the machine and
their link together; one of them plans. Cores that are shared change their speed within minutes, so planning, with
operators that are timed anew, and training take turns. Of seconds the median of the ratios of all rounds counts, of
bytes the ratio that is farthest from 1. The other rates of the machine are measured once, at the beginning.
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time

import common
import torch
import torch.distributed as dist
import torch.multiprocessing

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.local_machine import seconds_of_a_visit
from hf_patrickstar.planner.planning import arrange, plan_and_simulate, time_operators
from hf_patrickstar.report.measure import measure_machine, measure_together
from hf_patrickstar.units import format_nbytes

MAX_NORM = 1.0
MODELS = {
    "gpt2": "gpt2:n_layer=8,n_embd=256,n_head=4,vocab_size=1000,resid_pdrop=0.0,embd_pdrop=0.0",
    "bert": "bert:num_hidden_layers=8,hidden_size=256,num_attention_heads=4,intermediate_size=1024,vocab_size=1000,"
    "hidden_dropout_prob=0.0",
    "llama": "llama:num_hidden_layers=8,hidden_size=256,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=688,vocab_size=1000",
    "mixtral": "mixtral:num_hidden_layers=4,hidden_size=128,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=256,num_local_experts=4,vocab_size=1000",
}
SHAPES = ((1, 128), (4, 128), (2, 256))
SHARES = (0.2, 0.6)
"""What the device budget leaves beside activations, as shares of what model data would take if all of it were there."""


def together():
    """Lets processes begin a step at the same time."""
    if dist.is_initialized():
        dist.barrier()


def train(subject, given, steps):
    """Trains for real; returns the figures of the last step."""
    torch.manual_seed(0)
    model = subject.make_model()
    budgets = {"device_budget": given.machine.device_nbytes, "host_budget": given.machine.host_nbytes}
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = PatrickStarEngine(model, {**given.settings, **budgets}, made, device=torch.device("cpu"))
    engine.optimizer.zero_grad()
    seconds, before = [], None
    for _ in range(steps):
        before = engine.stats()
        together()
        begin = time.perf_counter()
        inputs = subject.make_inputs()  # a program has its batch until the next one
        engine.attempt(lambda inputs=inputs: model(**inputs).loss.backward())
        engine.optimizer.clip_grad_norm_(None, MAX_NORM)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    after = engine.stats()
    engine.detach()
    return {
        "device_nbytes": after["device_total_step_peak_nbytes"],
        "host_nbytes": after["host_step_peak_nbytes"],
        **{key: after[key] - before[key] for key in ("host_to_device_nbytes", "device_to_host_nbytes", "chunk_loads")},
        "seconds": statistics.median(seconds[steps // 2 :]),
    }


def arrange_cell(cell, machine, device_memory):
    """What is trained, and how."""
    return arrange(
        MODELS[cell["model"]],
        machine,
        batch_size=cell["batch_size"],
        length=cell["length"],
        world_size=cell["processes"],
        **{"task": None, "num_micro_batches": 1, "checkpointing": False},
        dtype="bf16" if cell["model"] == "mixtral" else "fp32",  # its experts are one operator there
        # kept traces of plans for other shapes would decide about the margin of a run, too
        **{"optimizer": "adamw", "max_norm": MAX_NORM, "settings": {"cpu_embedding": False, "reuse_plan": False}},
        **{"device_memory": device_memory, "host_memory": "8GiB"},
    )


def plan_cell(cell, machine, times):
    """The budget of a cell, and what is planned; ``None`` if it does not fit."""
    whole, simulated = plan_and_simulate(*arrange_cell(cell, machine, "8GiB"))
    others_nbytes = max(trace.non_model_peak_nbytes for trace in simulated.traces)
    budget = others_nbytes + int(cell["share"] * (whole.tier(Tier.DEVICE).need_nbytes - others_nbytes))
    subject, given = arrange_cell(cell, machine, budget)
    plan, simulated = plan_and_simulate(subject, dataclasses.replace(given, times=times))
    if not plan.fits:
        return budget, None
    return budget, {
        "device_nbytes": plan.tier(Tier.DEVICE).need_nbytes,
        "host_nbytes": plan.tier(Tier.HOST).need_nbytes,
        "host_to_device_nbytes": plan.speed.to_device_nbytes,
        "device_to_host_nbytes": plan.speed.to_host_nbytes,
        "chunk_loads": sum(made.num_loads for made in simulated.plans),
        "seconds": plan.speed.seconds,
    }


def compare(cell, machine, steps, rounds):
    """One row: plans beside runs. Of several processes the first one plans; ``None`` on the others."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    pairs = []
    for _ in range(max(rounds, 1)):
        times = time_operators(cell["processes"])
        found = [plan_cell(cell, machine, times) if is_first else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        budget, planned = found[0]
        if planned is None:
            return {**cell, "device_budget": budget, "fits": False} if is_first else None
        pairs.append((planned, train(*arrange_cell(cell, machine, budget), steps)))
    if not is_first:
        return None
    return {
        **cell,
        "device_budget": budget,
        "fits": True,
        "rounds": [{"planned": planned, "measured": measured} for planned, measured in pairs],
        "planned_to_measured": {key: ratio(key, pairs) for key in planned},
    }


def ratio(key, pairs):
    """Planned by measured: the median of seconds, and of bytes the ratio that is farthest from 1."""
    ratios = [planned[key] / run[key] if run[key] else float(planned[key] == 0) for planned, run in pairs]
    return statistics.median(ratios) if key == "seconds" else max(ratios, key=lambda found: abs(found - 1))


def compare_all(cells, steps, rounds):
    """Measures the machine; prints the rows and returns them with it."""
    measure = measure_together if dist.is_initialized() else measure_machine
    machine = measure(visit=seconds_of_a_visit)
    machine = dataclasses.replace(machine, name="this machine")
    rows = []
    for cell in cells:
        rows.append(compare(cell, machine, steps, rounds))
        if rows[-1] is not None:
            show(rows[-1])
    return dataclasses.asdict(machine), rows


def compare_together(rank, cells, steps, rounds, directory):
    """The same in one of two processes; the first one writes what it has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{directory}/store")
    found = compare_all(cells, steps, rounds)
    if rank == 0:
        (pathlib.Path(directory) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def show(row):
    """Prints a row."""
    shape, budget = f"{row['batch_size']} x {row['length']:<4}", format_nbytes(row["device_budget"])
    head = f"{row['processes']} {row['model']:>8} {shape} {budget:>11}"
    if not row["fits"]:
        print(f"{head}  does not fit")
        return
    ratios = row["planned_to_measured"]
    cells = [f"{ratios[key]:>9.3f}" for key in ratios]
    print(f"{head}{''.join(cells)}", flush=True)


def main():
    """Prints planned over measured figures."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--processes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.device = "cpu"
    print("planned over measured")
    print(f"{'':>32}{'device':>9}{'host':>9}{'to dev':>9}{'to host':>9}{'loads':>9}{'seconds':>9}")
    result = {}
    for processes in options.processes:
        names = ("model", "batch_size", "length", "share", "processes")
        grid = itertools.product(options.models, SHAPES, SHARES)
        cells = [dict(zip(names, (model, *shape, share, processes), strict=True)) for model, shape, share in grid]
        if processes == 1:
            machine, rows = compare_all(cells, options.steps, options.rounds)
        else:
            with tempfile.TemporaryDirectory() as directory:
                torch.multiprocessing.spawn(
                    compare_together, (cells, options.steps, options.rounds, directory), nprocs=2
                )
                machine, rows = json.loads((pathlib.Path(directory) / "found.json").read_text())
        result[f"processes_{processes}"] = {"machine": machine, "rows": rows}
    common.finish("bench_plan_accuracy", options, result)


if __name__ == "__main__":
    main()
