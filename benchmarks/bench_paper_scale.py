"""The largest models that machines of the papers, and of today, can train: simulated, beside other ways to place bytes.

Model data of this package is placed by its planner (``hf_patrickstar.planner``): the engine runs in virtual time with
tensors that have no bytes. Other systems are arithmetic, bytes per parameter times parameters, with the activations
that the planner found for the same model:

* static: 16-bit parameters and activations on the device, 2 M; gradients and optimizer states on the host, 14 M, of all
  devices together (Figure 3 and section 4 of the paper, of ZeRO-Offload).
* zero3: 18 M on the host and 4 bytes per parameter of one layer on the device. So counts
  ``estimate_zero3_model_states_mem_needs`` of DeepSpeed 0.19.8 (``runtime/zero/stage3.py``) with ``cpu_offload``,
  ``cpu_offload_params`` and ``zero_init``; without its ``additional_buffer_factor`` of 1.5, which "zero3 x 1.5" has.
  The estimate takes the largest layer, which is the embedding in some models: a block is taken here.
* fsdp2: 16 M on the host: fp32 parameters (``FSDPParam._init_sharded_param`` in ``_fsdp_param.py`` of torch 2.13 moves
  them to the CPU under ``CPUOffloadPolicy``), fp32 gradients (``foreach_reduce`` in ``_fsdp_collectives.py`` copies
  them there in the type of the parameters) and two moments; on the device two layers of 2 bytes per parameter, one that
  computes and one that is gathered ahead.

With ``--today`` it takes Llama-like models and machines that are bought or rented now. Nothing here was measured.
"""

import dataclasses
import time

import common
from transformers import GPT2Config, LlamaConfig

from hf_patrickstar.errors import EngineError
from hf_patrickstar.machine import MACHINES, Machine, peak
from hf_patrickstar.memory.tiers import DEVICE_SHARE, HOST_SHARE, Tier
from hf_patrickstar.planner.planning import arrange, plan_if_fits
from hf_patrickstar.units import GIB

TABLE_2 = {
    "0.1B": (12, 768),
    "0.4B": (24, 1024),
    "0.7B": (22, 1536),
    "1B": (20, 2048),
    "2B": (40, 2048),
    "4B": (64, 2304),
    "6B": (53, 3072),
    "8B": (72, 3072),
    "10B": (50, 4096),
    "12B": (60, 4096),
    "15B": (73, 4096),
    "18B": (88, 4096),
    "20B": (98, 4096),
}
"""Layers and hidden sizes of Table 2 of the papers, and of models beside it of the same kind."""
LLAMAS = {
    **{"1.5B": (28, 2048), "3B": (26, 3072), "4B": (36, 3072), "5B": (44, 3072), "6B": (29, 4096), "7B": (32, 4096)},
    **{"8B": (38, 4096), "9B": (42, 4096), "10B": (48, 4096), "13B": (40, 5120), "16B": (50, 5120), "20B": (42, 6144)},
    **{"24B": (52, 6144), "28B": (62, 6144), "33B": (60, 6656), "40B": (50, 8192), "46B": (57, 8192)},
    **{"52B": (64, 8192), "65B": (80, 8192), "100B": (80, 10240), "120B": (96, 10240), "150B": (84, 12288)},
    **{"175B": (96, 12288), "200B": (110, 12288)},
}
"""Layers and hidden sizes of Llama-like models: heads of 128, feed-forward of 8/3 of the hidden size, 32,000 tokens."""
PARTS = {"static": (2, 14, 0), "zero3": (0, 18, 4), "zero3 x 1.5": (0, 27, 4), "fsdp2": (0, 16, 4)}
"""Bytes per parameter on the device and on the host, and per parameter of one layer that the device holds beside."""
KEPT_NBYTES = 4
"""Bytes of an element that a block keeps for backward, its input: residual sums are fp32 under autocast."""


def of_node(machine: Machine, name: str, host_nbytes: int, num_devices: int = 1, **others) -> Machine:
    """A machine of which ``num_devices`` share a host."""
    shared = {"host_nbytes": host_nbytes // num_devices, "num_devices": num_devices, **others}
    if num_devices > 1:
        shared |= {
            "host_bandwidth": machine.host_bandwidth / num_devices,
            "host_flops": machine.host_flops / num_devices,
        }
        shared |= {"num_cores": max(machine.num_cores // num_devices, 1)}
    return dataclasses.replace(machine, name=name, **shared)


PC = peak(
    "PC: 8 GB, 16 GB",
    matmul={"float32": 6.5e12, "float16": 51.6e12},
    memory=336e9,
    bus=15.75e9,
    host_memory=51.2e9,
    cores=8,
    device_gib=8,
    host_gib=15,
)
LINK = 0.8 * 150e9
PAPER_MACHINES = [
    (of_node(MACHINES["v100"], "V100, 240 GB", 240 * 10**9), "12B"),
    (of_node(MACHINES["v100"], "V100, 120 GB", 120 * 10**9), None),
    (of_node(MACHINES["v100"], "8 V100, 240 GB", 240 * 10**9, 8, link_bandwidth=LINK), "12B"),
    (of_node(MACHINES["v100"], "8 V100, 120 GB", 120 * 10**9, 8, link_bandwidth=LINK), "8B"),
    (PC, "0.7B"),
]
"""Machines, and the largest model that the papers report for each."""
TODAY = [
    (of_node(MACHINES["rtx4090"], "RTX 4090, 64 GiB", 64 * GIB), None),
    (of_node(MACHINES["rtx4090"], "RTX 4090, 128 GiB", 128 * GIB), None),
    (of_node(MACHINES["a100-40"], "A100-40, 256 GiB", 256 * GIB), None),
    (of_node(MACHINES["h100"], "H100, 512 GiB", 512 * GIB), None),
    (dataclasses.replace(MACHINES["8xh100"], name="8 H100, 2 TiB"), None),
]


def config_of(layers, hidden, is_today):
    """The configuration of a model."""
    if is_today:
        inner = -(-8 * hidden // 3 // 256) * 256
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 128}
        return LlamaConfig(num_hidden_layers=layers, vocab_size=32_000, max_position_embeddings=4096, **sizes)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": 16, "n_positions": 1024}
    return GPT2Config(**sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0), loss_type="ForCausalLM")


def plan_of(name, machine, options):
    """The plan of a model with activations that are computed again; ``None`` if it does not fit."""
    layers, hidden = (LLAMAS if options.today else TABLE_2)[name]
    subject, given = arrange(
        config_of(layers, hidden, options.today),
        machine,
        task="causal-lm",
        batch_size=1 if options.today else options.batch_size,
        length=4096 if options.today else 1024,
        num_micro_batches=1,
        world_size=machine.num_devices,
        checkpointing=True,
        dtype="bf16" if options.today else "fp16",
        optimizer="adamw",
        max_norm=1.0,
        device_memory=None,
        host_memory=None,
        settings=None,
    )
    begin = time.time()
    try:
        plan = plan_if_fits(subject, given)
    except EngineError:
        plan = None
    print(f"  {machine.name}, {name}: {'fits' if plan else 'does not fit'} ({time.time() - begin:.0f} s)", flush=True)
    return plan


def num_parameters(layers, hidden, is_today):
    """Parameters, nearly: 12 hidden squares in each layer, and embeddings."""
    return 12 * layers * hidden**2 + (2 * 32_000 if is_today else 50_257 + 1024) * hidden


def largest(machine, models, options):
    """The largest model that fits, its plan, and the next one, which does not; plans begin where bytes say so."""
    names = list(models)
    there = machine.num_devices * (DEVICE_SHARE * machine.device_nbytes + HOST_SHARE * machine.host_nbytes)
    fitting = [name for name in names if 14 * num_parameters(*models[name], options.today) <= there]
    place = len(fitting) - 1
    plan = plan_of(names[place], machine, options)
    if plan is None:
        while plan is None and place > 0:
            place -= 1
            plan = plan_of(names[place], machine, options)
        return names[place], plan, names[place + 1]
    while place + 1 < len(names) and (larger := plan_of(names[place + 1], machine, options)) is not None:
        place, plan = place + 1, larger
    return names[place], plan, names[place + 1] if place + 1 < len(names) else None


def by_arithmetic(machine, models, activations, options):
    """The largest model of every other system, with activations for each token, layer and hidden element."""
    device = DEVICE_SHARE * machine.device_nbytes
    host = HOST_SHARE * machine.host_nbytes * machine.num_devices
    found = {}
    for system, (on_device, on_host, of_layer) in PARTS.items():
        found[system] = None
        for name, (layers, hidden) in models.items():
            numel = num_parameters(layers, hidden, options.today)
            beside = activations(layers, hidden) + of_layer * 12 * hidden**2
            if on_device * numel / machine.num_devices + beside <= device and on_host * numel <= host:
                found[system] = name
    return found


def activations_of(seen_nbytes, tokens, layers, hidden):
    """How many bytes of activations a model of other sizes has, from those that the planner found for one model.

    Inputs of blocks grow with layers and hidden size; the rest is that of one block and of the loss, and grows with the
    hidden size alone.
    """
    rest = max(seen_nbytes - KEPT_NBYTES * tokens * layers * hidden, 0) / hidden

    def activations(other_layers, other_hidden):
        return KEPT_NBYTES * tokens * other_layers * other_hidden + rest * other_hidden

    return activations


def row_of(machine, papers, models, options):
    """One line of the table as data."""
    name, plan, refused = largest(machine, models, options)
    row = {"machine": machine.name, "papers": papers, "largest": name if plan else None, "refused": refused}
    if plan is None:
        return row
    layers, hidden = models[name]
    seen = plan.tier(Tier.DEVICE).owners["non-model data"]
    tokens = plan.batch_size * plan.length
    activations = activations_of(seen, tokens, layers, hidden)
    flops = 8 * plan.num_parameters * plan.speed.tokens_per_s / machine.num_devices
    return {
        **row,
        "parameters": plan.num_parameters,
        "batch_size": plan.batch_size,
        "length": plan.length,
        "seconds": plan.speed.seconds,
        "tokens_per_s": plan.speed.tokens_per_s,
        "tflops_per_device": flops / 1e12,
        "binding": plan.speed.binding,
        "activations_nbytes": seen,
        "device_nbytes": plan.tier(Tier.DEVICE).need_nbytes,
        "host_nbytes": plan.tier(Tier.HOST).need_nbytes,
        "others": by_arithmetic(machine, models, activations, options),
    }


def show(row):
    """Prints one line of the table."""
    if row["largest"] is None:
        print(f"{row['machine']:>18}  not even {row['refused']}")
        return
    others = "".join(f"{name or '-':>12}" for name in row["others"].values())
    print(
        f"{row['machine']:>18}{row['largest']:>8}{row['tokens_per_s']:>10,.0f}{row['tflops_per_device']:>9.1f}"
        f"{others}   {row['papers'] or '-'}; {row['refused']} does not fit; {row['binding']} binds",
        flush=True,
    )


def main():
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--today", action="store_true", help="Llama-like models on machines of today, 4096 tokens")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per device, for the papers' models")
    parser.add_argument("--machines", type=int, nargs="+", help="only these lines of the table, from 0")
    options = parser.parse_args()
    machines, models = (TODAY, LLAMAS) if options.today else (PAPER_MACHINES, TABLE_2)
    print("simulated; the largest model of a list, activations computed again")
    print(f"{'machine':>18}{'model':>8}{'tokens/s':>10}{'TFLOP/s':>9}" + "".join(f"{name:>12}" for name in PARTS))
    rows = []
    for place in options.machines or range(len(machines)):
        rows.append(row_of(*machines[place], models, options))
        show(rows[-1])
        name = "bench_paper_scale_today" if options.today else "bench_paper_scale"
        common.finish(name, options, {"simulated": True, "rows": rows})


if __name__ == "__main__":
    main()
