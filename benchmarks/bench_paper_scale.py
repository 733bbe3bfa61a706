"""The largest models that machines of the papers, and of today, can train: simulated, beside other ways to place bytes.

Model data of this package is placed by its planner (``hf_patrickstar.planner``), which simulates a step. Other systems
are arithmetic, bytes per parameter times parameters, with the activations that the planner found for the same model:

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

With fewer bytes (``--train``) they are, for optimizer states of 8 bits:

* paged: a plain Trainer with bitsandbytes' paged 8-bit AdamW and weights loaded in bf16; no process shares anything. On
  each device 2 + 2 M and the scales of the states, 8 / 256 M; on the host, in memory that the driver pages, states of
  2 M, but of 8 for embeddings (``Optimizer8bit.get_state_buffer`` and ``init_state`` of bitsandbytes 0.50.2). It gives
  up fp32 masters.
* zero3 bf16: zero3 with ``bf16_master_weights_and_grads`` and ``bf16_optimizer_states``, which go together with an
  offloaded optimizer since pull request 8010 of DeepSpeed. 16-bit values, masters, gradients and two moments are 10 M
  on the host. It gives up fp32 masters and moments.

And for a base of 4 bits with LoRA on all linear layers (embeddings and the head keep 16 bits; adapters, their gradients
and two moments take 16 bytes per parameter of theirs):

* plain: everything on each device, 0.5 + 4 / 64 M (``quantize_4bit`` of bitsandbytes 0.50.2: a scale of 4 bytes for a
  block of 64).
* fsdp: FSDP with QLoRA and CPU offload (Answer.AI, 2024). Packed weights, 0.5 M, are on the host of all devices
  together. Scales are no parameter but in the ``quant_state`` of the module, which FSDP neither shards nor moves
  (``fix_4bit_weight_quant_state_from_module`` of bitsandbytes 0.50.2); so every device has all of them, 4 / 64 M. It
  also has two layers of 0.5, and the embeddings, which belong to the outermost unit.

Their tokens per second are bounds ("at most"): a step of what nothing is known to hide, at the rates of the machine.
Computation is the device lane of our plan for our largest model, scaled by parameters (tokens are the same), a quarter
of it forward (a third where the base is frozen). Adam is 28 bytes per parameter at the host's bandwidth, after the last
gradient, since clipping needs all of them. Copies are hidden perfectly where the system's sources say that they are
hidden at all; links between devices, Python and casts are left out:

* static: gradients (2) leave beside backward, and new values (2) come beside Adam, tile by tile: so say Ren et al.,
  "ZeRO-Offload" (2021), of its schedule and its CPU Adam.
* zero3: values (2) come before use in forward and again in backward, beside computation (``prefetch_bucket_size`` and
  ``overlap_comm`` of ``runtime/zero/config.py``, DeepSpeed 0.19.8); gradients leave beside backward in the type of the
  masters (4, ``_offload_grad_partition_at_boundary`` of ``stage3.py``). That they cross as 16-bit ones before
  (``partition_grads``) is left out.
* fsdp2: fp32 values (4) come in forward and in backward, and are rounded on the device (``FSDPParam.all_gather_inputs``
  of torch 2.13), beside computation (implicit prefetching, ``_fsdp_param_group.py``); fp32 gradients (4) leave beside
  backward (``foreach_reduce``).
* paged: states (2) come beside the update, and leave beside it; the device updates, in no time.
* zero3 bf16: values and gradients (2) as in zero3; Adam is 14 bytes per parameter.
* fsdp: packed values (0.5) come in forward and in backward. plain: nothing moves. Adapters are left out.

After the largest models of the papers' machines come the TFLOP/s that the papers report, beside those of the plan of
the same model. What the papers' step takes longer is split (``terms_of``) into computation, as much slower as it is in
the papers' model that moves nothing; the optimizer and copies, as if nothing hid them; and a rest: the terms add up.

With ``--today`` it takes Llama-like models and machines that are bought or rented now, trained by AdamW or as
``--train`` says. In full fine-tuning a host may also have a drive (``DRIVE_NBYTES``) for optimizer states: the largest
model with it, its tokens per second and what a step writes are beside the rest, which has none. With
``--batches 4 8 16`` it finds the largest of the papers' models for each batch on one V100.
Nothing here was measured.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import common
from peers import HOST_NBYTES
from transformers import GPT2Config, LlamaConfig

from hf_patrickstar.errors import EngineError
from hf_patrickstar.machine import MACHINES, Card, Host, Machine, find_machine, peak
from hf_patrickstar.memory.tiers import DEVICE_SHARE, HOST_SHARE, Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate, plan_if_fits
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.clock import Lane
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
TO_405B = {"250B": (77, 16384), "300B": (93, 16384), "350B": (108, 16384), "405B": (126, 16384)}
"""Larger ones, for bases of 4 bits."""


class Numbers(NamedTuple):
    """Numbers of parameters of a model, and of the devices that train it.

    Attributes:
        blocks: Parameters of all layers, nearly: 12 hidden squares in each.
        embedding: Those of the embeddings of tokens and positions.
        head: Those of the head, if it is not the embedding.
        layer: Those of one layer.
        adapters: Those of LoRA with r=16 on all linear layers of a Llama.
        devices: Devices.
    """

    blocks: int
    embedding: int
    head: int
    layer: int
    adapters: int
    devices: int

    @property
    def all(self) -> int:
        """All parameters but those of adapters."""
        return self.blocks + self.embedding + self.head


Place = Callable[[Numbers], tuple[float, float]]
"""Bytes that a system keeps on each device, and on the host."""
PLACES: dict[str, Place] = {
    "static": lambda of: (2 * of.all / of.devices, 14 * of.all),
    "zero3": lambda of: (4 * of.layer, HOST_NBYTES["zero3"] * of.all),
    "zero3 x 1.5": lambda of: (4 * of.layer, HOST_NBYTES["zero3"] * 3 // 2 * of.all),
    "fsdp2": lambda of: (4 * of.layer, HOST_NBYTES["fsdp2"] * of.all),
    "paged": lambda of: ((2 + 2 + 8 / 256) * of.all, of.devices * (2 * of.all + 6 * of.embedding)),
    "zero3 bf16": lambda of: (4 * of.layer, 10 * of.all),
    "plain": lambda of: ((0.5 + 4 / 64) * of.blocks + 2 * (of.embedding + of.head) + 16 * of.adapters, 0),
    "fsdp": lambda of: (
        4 / 64 * of.blocks + 2 * 0.5 * of.layer + 2 * (of.embedding + of.head),
        0.5 * of.blocks + 2 * (of.embedding + of.head) + 16 * of.adapters,
    ),
}
"""Where other systems keep bytes; the docstring of the module names the sources."""


class Training(NamedTuple):
    """How models are trained.

    Attributes:
        nbytes: Bytes per parameter that this package keeps, on both tiers together.
        others: The systems that it is compared with.
        arguments: Arguments of the planner.
        larger: Models that are tried beside ``LLAMAS``.
        operations: Operations per parameter and token: 2 in forward, 2 to compute activations again, 2 for their
            gradients, and 2 for those of parameters that are trained.
        drive_nbytes: Bytes per parameter that a drive may take of ``nbytes``: masters and optimizer states.
    """

    nbytes: float
    others: tuple[str, ...]
    arguments: dict
    larger: dict
    operations: int = 8
    drive_nbytes: float = 0


TRAININGS = {
    "adamw": Training(14, ("static", "zero3", "zero3 x 1.5", "fsdp2"), {"optimizer": "adamw"}, {}, drive_nbytes=12),
    "8bit": Training(8, ("paged", "zero3 bf16"), {"optimizer": "adamw_8bit"}, {}, drive_nbytes=6),
    "qlora": Training(
        0.5 + 4 / 64,
        ("plain", "fsdp"),
        {"optimizer": "adamw", "bits": 4, "adapters": {"r": 16, "target_modules": "all-linear"}},
        TO_405B,
        operations=6,
    ),
}


class Copies(NamedTuple):
    """Bytes per parameter that cross the bus in a step of another system.

    Attributes:
        forward: To the device, beside forward.
        backward: To the device, beside backward.
        gradients: To the host, beside backward.
        update: To the device, beside Adam.
        adam: Bytes that Adam reads and writes on the host.
        is_shared: Whether several devices share copies and Adam.
    """

    forward: float
    backward: float
    gradients: float
    update: float
    adam: int = ADAM_NBYTES
    is_shared: bool = True


COPIES = {
    "static": Copies(0, 0, 2, 2),
    "zero3": Copies(2, 2, 4, 0),
    "zero3 x 1.5": Copies(2, 2, 4, 0),
    "fsdp2": Copies(4, 4, 4, 0),
    "paged": Copies(0, 0, 0, 2, adam=0, is_shared=False),
    "zero3 bf16": Copies(2, 2, 2, 0, adam=ADAM_NBYTES // 2),
    "plain": Copies(0, 0, 0, 0, adam=0, is_shared=False),
    "fsdp": Copies(0.5, 0.5, 0, 0, adam=0),
}
"""What crosses the bus in a step, and beside what; the docstring of the module names the sources."""
DRIVE_NBYTES = 1024 * GIB
"""What optimizer states may take on a drive of each host."""
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


PC = peak("PC: 8 GB, 16 GB", Card(51.6e12, 0.75, 6.5e12, 336e9, 15.75e9, 15.75e9, 8, (Host(51.2e9, 8, 15),) * 2, False))
LINK = 0.8 * 150e9
V100 = of_node(MACHINES["v100"], "V100, 240 GB", 240 * 10**9)
V100_120 = of_node(MACHINES["v100"], "V100, 120 GB", 120 * 10**9)
V100_X4_120 = of_node(MACHINES["v100"], "4 V100, 120 GB", 120 * 10**9, 4, link_bandwidth=LINK)
V100_X8 = of_node(MACHINES["v100"], "8 V100, 240 GB", 240 * 10**9, 8, link_bandwidth=LINK)
V100_X8_120 = of_node(MACHINES["v100"], "8 V100, 120 GB", 120 * 10**9, 8, link_bandwidth=LINK)
PAPER_MACHINES = [(V100, "12B"), (V100_120, None), (V100_X8, "12B"), (V100_X8_120, "8B"), (PC, "0.7B")]
"""Machines, and the largest model that the papers report for each."""


class Figure(NamedTuple):
    """TFLOP/s of one device that the papers report.

    Attributes:
        machine: Where.
        model: Which model of ``TABLE_2``.
        batch_size: Sequences per device of the plan beside it.
        tflops: What the papers report; the later paper where both do.
        source: Where they do.
        moves_nothing: Whether nothing has to move there, so that the figure tells how fast the papers compute.
    """

    machine: Machine
    model: str
    batch_size: int
    tflops: float
    source: str
    moves_nothing: bool = False


FIGURES = [
    Figure(V100, "1B", 16, 51, "2022 preprint, section 9.2.2", moves_nothing=True),
    Figure(V100, "6B", 16, 56, "PVLDB, section 9.2.2"),
    Figure(V100, "8B", 16, 40, "PVLDB, section 9.2.2"),
    Figure(V100, "10B", 16, 44, "PVLDB, section 9.2.2"),
    Figure(V100, "12B", 16, 34, "PVLDB, section 9.2.2"),
    Figure(V100_X8, "1B", 16, 434 / 8, "PVLDB, section 9.2.3: 434 of eight", moves_nothing=True),
    Figure(V100_X8, "12B", 16, 377 / 8, "PVLDB, section 9.2.3: 377 of eight"),
    Figure(V100_X8_120, "8B", 16, 48.78, "PVLDB, section 9.2.4"),
    Figure(V100_X4_120, "8B", 16, 48.28, "2022 preprint, section 9.2.4"),
    Figure(PC, "0.1B", 4, 21.02, "both, section 9.2.4: BERT of 0.11 B with plain PyTorch", moves_nothing=True),
    Figure(PC, "0.7B", 4, 18.46, "both, section 9.2.4"),
]
"""The papers' throughput; of each machine, or of one like it, the model that moves nothing comes first.

The figures are the best of batches of 4 to 64. The preprint's Table 2 gives 16 as the largest batch of 12 B, on one to
eight V100; of the PC no batch is known.
"""
TODAY = [
    (of_node(MACHINES["rtx4090"], "RTX 4090, 64 GiB", 64 * GIB), None),
    (of_node(MACHINES["rtx4090"], "RTX 4090, 128 GiB", 128 * GIB), None),
    (of_node(MACHINES["a100-40"], "A100-40, 256 GiB", 256 * GIB), None),
    (of_node(MACHINES["h100"], "H100, 512 GiB", 512 * GIB), None),
    (dataclasses.replace(find_machine("8xh100"), name="8 H100, 2 TiB"), None),
]


def config_of(layers, hidden, is_today):
    """The configuration of a model."""
    if is_today:
        inner = -(-8 * hidden // 3 // 256) * 256
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 128}
        return LlamaConfig(num_hidden_layers=layers, vocab_size=32_000, max_position_embeddings=4096, **sizes)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": 16, "n_positions": 1024}
    return GPT2Config(**sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0), loss_type="ForCausalLM")


def arranged(sizes, machine, is_today, batch_size, train="adamw"):
    """What is trained, with activations that are computed again, and how: arguments of the planner."""
    return arrange(
        config_of(*sizes, is_today),
        machine,
        task="causal-lm",
        batch_size=batch_size,
        length=4096 if is_today else 1024,
        num_micro_batches=1,
        world_size=machine.num_devices,
        checkpointing=True,
        dtype="bf16" if is_today else "fp16",
        max_norm=1.0,
        device_memory=None,
        host_memory=None,
        settings=None,
        **TRAININGS[train].arguments,
    )


def plan_of(name, sizes, machine, options, batch_size=None):
    """The plan of a model; ``None`` if it does not fit."""
    batch_size = batch_size or (1 if options.today else options.batch_size)
    subject, given = arranged(sizes, machine, options.today, batch_size, options.train)
    begin = time.time()
    try:
        plan = plan_if_fits(subject, given)
    except EngineError:
        plan = None
    print(f"  {machine.name}, {name}: {'fits' if plan else 'does not fit'} ({time.time() - begin:.0f} s)", flush=True)
    return plan


def numbers_of(layers, hidden, is_today, devices=1):
    """Numbers of parameters, nearly."""
    embedding, head = (32_000 * hidden, 32_000 * hidden) if is_today else ((50_257 + 1024) * hidden, 0)
    adapters = 16 * layers * (4 * 2 + 3 * (1 + 8 / 3)) * hidden  # four square layers, and three of the feed-forward
    return Numbers(12 * layers * hidden**2, embedding, head, 12 * hidden**2, round(adapters), devices)


def num_parameters(layers, hidden, is_today):
    """Parameters, nearly."""
    return numbers_of(layers, hidden, is_today).all


def last_by_bytes(machine, models, options):
    """The place of the last model of which the bytes of all parameters fit into device, host and drive together."""
    there = machine.num_devices * (DEVICE_SHARE * machine.device_nbytes + HOST_SHARE * machine.host_nbytes)
    in_all, training = there + machine.num_devices * machine.disk_nbytes, TRAININGS[options.train]
    in_memory = training.nbytes - training.drive_nbytes
    numbers = [num_parameters(*sizes, options.today) for sizes in models.values()]
    return sum(training.nbytes * each <= in_all and in_memory * each <= there for each in numbers) - 1


def with_drive(machine):
    """The machine with a drive, of which each device has a part of the bytes and of the bandwidth."""
    return dataclasses.replace(machine, disk_nbytes=DRIVE_NBYTES // machine.num_devices)


def on_drive(machine, models, options):
    """The largest model if the host has a drive, as data; bytes are those of all processes."""
    name, plan, refused = largest(with_drive(machine), models, options)
    if plan is None:
        return {"largest": None, "refused": refused}
    return {
        "nbytes": DRIVE_NBYTES,
        "largest": name,
        "refused": refused,
        "parameters": plan.num_parameters,
        "seconds": plan.speed.seconds,
        "tokens_per_s": plan.speed.tokens_per_s,
        "binding": plan.speed.binding,
        "disk_nbytes": machine.num_devices * plan.tier(Tier.DISK).need_nbytes,
        "written_nbytes": machine.num_devices * plan.speed.disk_written_nbytes,
    }


def largest(machine, models, options):
    """The largest model that fits, its plan, and the next one, which does not; plans begin where bytes say so."""
    names = list(models)

    def plan_at(place):
        return plan_of(names[place], models[names[place]], machine, options)

    place = last_by_bytes(machine, models, options)
    plan = plan_at(place)
    if plan is None:
        while plan is None and place > 0:
            place -= 1
            plan = plan_at(place)
        return names[place], plan, names[place + 1]
    while place + 1 < len(names) and (larger := plan_at(place + 1)) is not None:
        place, plan = place + 1, larger
    return names[place], plan, names[place + 1] if place + 1 < len(names) else None


def by_arithmetic(machine, models, activations, options):
    """The largest model of every other system, with activations for each token, layer and hidden element."""
    device = DEVICE_SHARE * machine.device_nbytes
    host = HOST_SHARE * machine.host_nbytes * machine.num_devices
    found = {}
    for system in TRAININGS[options.train].others:
        found[system] = None
        for name, sizes in models.items():
            on_device, on_host = PLACES[system](numbers_of(*sizes, options.today, machine.num_devices))
            if on_device + activations(*sizes) <= device and on_host <= host:
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


def least_seconds(machine, numel, compute_s, copies, operations=8):
    """The least that a step of another system takes: forward, backward and Adam, with copies beside them.

    Args:
        machine: Where; rates of the host are the part of one device.
        numel: Parameters of the model.
        compute_s: Seconds that one device computes.
        copies: What crosses the bus.
        operations: See ``Training``.
    """
    own = numel / machine.num_devices if copies.is_shared else numel
    to_device, to_host = own / machine.to_device_bandwidth, own / machine.to_host_bandwidth
    forward_s = 2 / operations * compute_s
    forward = max(forward_s, copies.forward * to_device)
    backward = max(compute_s - forward_s, copies.backward * to_device, copies.gradients * to_host)
    return forward + backward + max(copies.adam * own / machine.host_bandwidth, copies.update * to_device)


def tokens_at_most(machine, models, row, is_today, operations=8):
    """Tokens per second that every other system trains its own largest model with, at most.

    Args:
        machine: Where.
        models: Layers and hidden sizes by name.
        row: A line of the table: our largest model, what the device does for it, and the others' largest models.
        is_today: Whether models are Llama-like.
        operations: See ``Training``.
    """
    tokens = row["batch_size"] * row["length"] * machine.num_devices
    each = row["device_s"] / num_parameters(*models[row["largest"]], is_today)
    found = {}
    for system, name in row["others"].items():
        found[system] = None
        if name is not None:
            numel = num_parameters(*models[name], is_today)
            found[system] = tokens / least_seconds(machine, numel, each * numel, COPIES[system], operations)
    return found


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
    operations = TRAININGS[options.train].operations
    flops = operations * plan.num_parameters * plan.speed.tokens_per_s / machine.num_devices
    row |= {
        "parameters": plan.num_parameters,
        "batch_size": plan.batch_size,
        "length": plan.length,
        "seconds": plan.speed.seconds,
        "tokens_per_s": plan.speed.tokens_per_s,
        "tflops_per_device": flops / 1e12,
        "device_s": plan.speed.busy["device"] * plan.speed.seconds,
        "papers_tflops": next((figure.tflops for figure in FIGURES if figure[:2] == (machine, papers)), None),
        "binding": plan.speed.binding,
        "activations_nbytes": seen,
        "device_nbytes": plan.tier(Tier.DEVICE).need_nbytes,
        "host_nbytes": plan.tier(Tier.HOST).need_nbytes,
        "others": by_arithmetic(machine, models, activations, options),
    }
    row |= {"others_tokens_per_s_at_most": tokens_at_most(machine, models, row, options.today, operations)}
    if options.today and TRAININGS[options.train].drive_nbytes:
        row["with_drive"] = on_drive(machine, models, options)
    return row


def show(row):
    """Prints one line of the table."""
    if row["largest"] is None:
        print(f"{row['machine']:>18}  not even {row['refused']}")
        return
    most = row["others_tokens_per_s_at_most"]
    others = "".join(
        f"{'-' if name is None else f'{name} {most[system]:,.0f}':>14}" for system, name in row["others"].items()
    )
    if (drive := row.get("with_drive")) is not None:
        written = f"{drive['written_nbytes'] / GIB:,.0f} GiB" if drive["largest"] else ""
        speed = f"{drive['largest']} {drive['tokens_per_s']:,.1f} {written}" if drive["largest"] else "-"
        others += f"{speed:>22}"
    papers = row["papers"] or "-"
    if row["papers_tflops"] is not None:
        papers += f" with {row['papers_tflops']:.1f} TFLOP/s"
    print(
        f"{row['machine']:>18}{row['largest']:>8}{row['tokens_per_s']:>10,.0f}{row['tflops_per_device']:>9.1f}"
        f"{others}   {papers}; {row['refused']} does not fit; {row['binding']} binds",
        flush=True,
    )


def terms_of(seconds, critical_s, hidden_s, factor):
    """Splits what the papers' step takes longer than ours; the terms add up to it.

    Args:
        seconds: Of our step, and of the papers'.
        critical_s: Seconds on the critical path of our step, by lane.
        hidden_s: Seconds that the optimizer on the host, copies over the bus and copies between devices take, in all.
        factor: How much slower the papers' programs compute than our plan.
    """
    ours, papers = seconds
    path = {
        "optimizer": critical_s[Lane.HOST_WORK],
        "copies": critical_s[Lane.TO_DEVICE] + critical_s[Lane.TO_HOST],
        "between devices": critical_s[Lane.GATHERS] + critical_s[Lane.REDUCTIONS],
    }
    terms = {"compute": (factor - 1) * critical_s[Lane.COMPUTE]}
    terms |= {name: hidden_s[name] - on_path for name, on_path in path.items()}
    return terms | {"rest": papers - ours - sum(terms.values())}


def speed_of(figure, factor):
    """Our plan of a model that the papers report TFLOP/s of, beside them.

    Args:
        figure: What they report.
        factor: How much slower the papers' programs compute than our plan; ``None`` if this figure tells.
    """
    machine = figure.machine
    plan, simulated = plan_and_simulate(*arranged(TABLE_2[figure.model], machine, False, figure.batch_size))
    if simulated is None:
        raise SystemExit(f"{figure.model} does not fit {machine.name} with a batch of {figure.batch_size}")
    timeline = simulated.timeline
    critical = {lane: nanoseconds / 1e9 for lane, nanoseconds in timeline.critical_ns().items()}
    busy = {lane: nanoseconds / 1e9 for lane, nanoseconds in timeline.busy_ns().items()}
    hidden = {
        "optimizer": machine.host_ns(0, ADAM_NBYTES * simulated.num_on_host) / 1e9,
        "copies": busy[Lane.TO_DEVICE] + busy[Lane.TO_HOST],
        "between devices": busy[Lane.GATHERS] + busy[Lane.REDUCTIONS],
    }
    flops = 8 * plan.num_parameters * plan.batch_size * plan.length  # with recomputation, as the papers count
    seconds, papers = plan.speed.seconds, flops / figure.tflops / 1e12
    factor = papers / seconds if factor is None else factor
    return {
        "machine": machine.name,
        "model": figure.model,
        "batch_size": figure.batch_size,
        "parameters": plan.num_parameters,
        "tflops": flops / seconds / 1e12,
        "papers_tflops": figure.tflops,
        "papers_source": figure.source,
        "seconds": seconds,
        "papers_seconds": papers,
        "factor_of_compute": factor,
        "critical_s": {lane.value: value for lane, value in critical.items()},
        "in_all_s": hidden,
        "terms_s": terms_of((seconds, papers), critical, hidden, factor),
    }


def speeds():
    """Prints our TFLOP/s beside the papers', and what the difference in seconds per step consists of."""
    print("\nsimulated TFLOP/s per device beside the papers'; seconds that the papers' step takes longer, by term")
    print(f"{'machine':>18}{'model':>6}{'batch':>6}{'TFLOP/s':>9}{'papers':>8}{'seconds':>9}{'papers':>8}", end="")
    print(f"{'compute':>9}{'optimizer':>11}{'copies':>8}{'between devices':>17}{'rest':>7}  source", flush=True)
    rows, factor = [], None
    for figure in FIGURES:
        row = speed_of(figure, None if figure.moves_nothing else factor)
        factor = row["factor_of_compute"]
        terms = row["terms_s"]
        print(
            f"{row['machine']:>18}{row['model']:>6}{row['batch_size']:>6}{row['tflops']:>9.1f}"
            f"{row['papers_tflops']:>8.1f}{row['seconds']:>9.2f}{row['papers_seconds']:>8.2f}{terms['compute']:>9.2f}"
            f"{terms['optimizer']:>11.2f}{terms['copies']:>8.2f}{terms['between devices']:>17.2f}{terms['rest']:>7.2f}"
            f"  {row['papers_source']}",
            flush=True,
        )
        rows.append(row)
    return rows


def last_fitting(fits, high):
    """The last place of 0 to ``high`` that fits, where all before it do; -1 for none. ``high`` is tried first."""
    low, place = -1, high
    while low < high:
        if fits(place):
            low = place
        else:
            high = place - 1
        place = (low + high + 1) // 2
    return low


def largest_by_batch(machine, options):
    """The largest of the papers' models for each batch, on one machine; a larger batch never trains a larger model.

    The search halves the list, as if every model needed more than the one before. It does, but for 8B, which has more
    activations than 10B.
    """
    names = list(TABLE_2)
    high = last_by_bytes(machine, TABLE_2, options)
    for batch_size in sorted(options.batches):
        plans = {}

        def fits(place, plans=plans, batch_size=batch_size):
            plans[place] = plan_of(names[place], TABLE_2[names[place]], machine, options, batch_size)
            return plans[place] is not None

        print(f" {machine.name}, batch {batch_size}")
        high = last_fitting(fits, high) if high >= 0 else high
        plan = plans.get(high)
        row = {"machine": machine.name, "batch_size": batch_size, "largest": None if high < 0 else names[high]}
        if plan is not None:
            row["tokens_per_s"] = plan.speed.tokens_per_s
            row["tflops_per_device"] = 8 * plan.num_parameters * plan.speed.tokens_per_s / 1e12
            row["activations_nbytes"] = plan.tier(Tier.DEVICE).owners["non-model data"]
        yield row


def batches(options):
    """Prints the largest model for each machine and batch."""
    rows = []
    for machine in (V100, V100_120):
        for row in largest_by_batch(machine, options):
            rows.append(row)
            common.finish("bench_paper_scale_batches", options, {"simulated": True, "rows": rows})
    print(f"{'machine':>18}{'batch':>7}{'model':>8}{'tokens/s':>10}{'TFLOP/s':>9}")
    for row in rows:
        speed = f"{row['tokens_per_s']:>10,.0f}{row['tflops_per_device']:>9.1f}" if row["largest"] else ""
        print(f"{row['machine']:>18}{row['batch_size']:>7}{row['largest'] or '-':>8}{speed}")


def main():
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--today", action="store_true", help="Llama-like models on machines of today, 4096 tokens")
    parser.add_argument("--train", choices=TRAININGS, default="adamw", help="what is trained, with --today")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per device, for the papers' models")
    parser.add_argument("--machines", type=int, nargs="+", help="only these lines of the table, from 0")
    parser.add_argument("--batches", type=int, nargs="+", help="the largest model for each of these, on one V100")
    options = parser.parse_args()
    if options.batches is not None:
        batches(options)
        return
    training = TRAININGS[options.train]
    if training is not TRAININGS["adamw"] and not options.today:
        parser.error("--train needs --today")
    machines, models = (TODAY, LLAMAS | training.larger) if options.today else (PAPER_MACHINES, TABLE_2)
    print("simulated; the largest model of a list, activations computed again; of other systems tokens/s at most")
    others = "".join(f"{name:>14}" for name in training.others)
    others += f"{'with a drive, written':>22}" if options.today and training.drive_nbytes else ""
    print(f"{'machine':>18}{'model':>8}{'tokens/s':>10}{'TFLOP/s':>9}{others}")
    name = "bench_paper_scale_today" if options.today else "bench_paper_scale"
    name += "" if options.train == "adamw" else f"_{options.train}"
    result = {"simulated": True, "rows": []}
    for place in options.machines or range(len(machines)):
        result["rows"].append(row_of(*machines[place], models, options))
        show(result["rows"][-1])
        common.finish(name, options, result)
    if not options.today and options.machines is None:
        result["speeds"] = speeds()
        common.finish(name, options, result)


if __name__ == "__main__":
    main()
