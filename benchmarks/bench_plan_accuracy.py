"""What a plan says against what a run does: bytes on both tiers, bytes moved, loads, and seconds.

Each model is planned by ``hf_patrickstar.plan`` for the machine at hand, measured first, and then trained by the engine
on the CPU tier, in the same budgets. A dispatch mode measures activations: in a plan those of tensors without bytes.
"""

import dataclasses
import statistics
import time

import common
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_record
from hf_patrickstar.report.measure import measure_machine
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
        "host_nbytes": after["host_peak_nbytes"],
        **{key: after[key] - before[key] for key in ("host_to_device_nbytes", "device_to_host_nbytes", "chunk_loads")},
        "seconds": statistics.median(seconds[steps // 2 :]),
    }


def compare(name, machine, batch_size, length, share, steps):
    """One row: a plan beside a run."""
    shape = {"batch_size": batch_size, "length": length}
    common_arguments = {
        **{"task": None, "num_micro_batches": 1, "world_size": 1, "checkpointing": False},
        "dtype": "bf16" if name == "mixtral" else "fp32",  # its experts are one operator there
        **{"optimizer": "adamw", "max_norm": MAX_NORM, "settings": {"cpu_embedding": False}, "host_memory": "16GiB"},
    }
    whole, recording = plan_and_record(
        *arrange(MODELS[name], machine, **shape, **common_arguments, device_memory="16GiB")
    )
    others_nbytes = max(trace.non_model_peak_nbytes for trace in recording.traces)
    budget = others_nbytes + int(share * (whole.tier(Tier.DEVICE).need_nbytes - others_nbytes))
    subject, given = arrange(MODELS[name], machine, **shape, **common_arguments, device_memory=budget)
    plan, recording = plan_and_record(subject, given)
    row = {"model": name, "batch_size": batch_size, "length": length, "device_budget": budget, "fits": plan.fits}
    if not plan.fits:
        return row
    planned = {
        "device_nbytes": plan.tier(Tier.DEVICE).need_nbytes,
        "host_nbytes": plan.tier(Tier.HOST).need_nbytes,
        "host_to_device_nbytes": plan.speed.to_device_nbytes,
        "device_to_host_nbytes": plan.speed.to_host_nbytes,
        "chunk_loads": sum(made.num_loads for made in recording.plans),
        "seconds": plan.speed.seconds,
    }
    measured = train(subject, given, steps)
    ratios = {key: planned[key] / measured[key] if measured[key] else float(planned[key] == 0) for key in planned}
    return {**row, "planned": planned, "measured": measured, "planned_to_measured": ratios}


def show(row):
    """Prints a row."""
    head = f"{row['model']:>8} {row['batch_size']} x {row['length']:<4} {format_nbytes(row['device_budget']):>11}"
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
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    options.device = "cpu"
    machine = dataclasses.replace(measure_machine(), name="this machine")
    print("planned over measured")
    print(f"{'':>30}{'device':>9}{'host':>9}{'to dev':>9}{'to host':>9}{'loads':>9}{'seconds':>9}")
    rows = []
    for name in options.models:
        for batch_size, length in SHAPES:
            for share in SHARES:
                rows.append(compare(name, machine, batch_size, length, share, options.steps))
                show(rows[-1])
    common.finish("bench_plan_accuracy", options, {"machine": dataclasses.asdict(machine), "rows": rows})


if __name__ == "__main__":
    main()
