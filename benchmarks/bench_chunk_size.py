"""What the size of chunks changes in a step: simulated, nothing here was measured.

Plans of the same training with the size that ``chunk_numel="auto"`` chooses, and with sizes that hold the matrices of
half a decoder block, of one block and of two blocks. First it finds the least device memory that each size needs; then
each size gets the same memory: 1.3 times the least of ``auto``, the middle (geometric) between that and all, and all
memory of the device. Activations are computed again in backward, and gradients are clipped.
"""

import itertools
import statistics

import common
from transformers import GPT2Config, LlamaConfig

from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.tiers import DEVICE_SHARE
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.units import GIB, MIB, align

TIGHT = 1.3
"""How much more than the least device memory a tight budget is."""
LEAST = 2**28
"""Device memory that is too small for each of the models, so that the plan says how much they need."""
BLOCKS = (0.5, 1, 2)


def llama(layers, hidden, inner):
    """A Llama-like model with heads of 128."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 128}
    return LlamaConfig(num_hidden_layers=layers, vocab_size=32_000, max_position_embeddings=4096, **sizes)


MODELS = {
    "llama-1b": (llama(20, 2048, 5632), (4 * 2048 + 3 * 5632) * 2048),
    "llama-7b": (llama(32, 4096, 11008), (4 * 4096 + 3 * 11008) * 4096),
    "gpt2-1.5b": (GPT2Config(n_layer=48, n_embd=1600, n_head=25, loss_type="ForCausalLM"), 12 * 1600**2 + 9 * 1600),
}
"""Configuration, and the elements of the matrices of a block, for GPT-2 with their biases, which have the same type."""
MOST_LENGTH = 1024
"""Tokens of a sequence at most: the positions of GPT-2."""


def plan_of(name, num_tokens, machine, device_nbytes, chunk_numel):
    """The plan with so much device memory, and its simulation if it fits."""
    length = min(num_tokens, MOST_LENGTH)
    return plan_and_simulate(
        *arrange(
            MODELS[name][0],
            machine,
            task="causal-lm",
            batch_size=num_tokens // length,
            length=length,
            num_micro_batches=1,
            world_size=1,
            checkpointing=True,
            dtype="bf16",
            optimizer="adamw",
            max_norm=1.0,
            device_memory=device_nbytes,
            host_memory=None,
            settings={"chunk_numel": chunk_numel},
        )
    )


def row_of(name, num_tokens, machine, size, chunk_numel, budget, device_nbytes, least_nbytes):
    """One line of the table."""
    row = {"model": name, "tokens": num_tokens, "machine": machine, "size": size, "least_nbytes": least_nbytes}
    row |= {"budget": budget, "device_nbytes": device_nbytes}
    plan, simulated = plan_of(name, num_tokens, machine, device_nbytes, chunk_numel)
    if simulated is None:
        return {**row, "seconds": None}
    busy, spans = simulated.timeline.busy_ns(), simulated.timeline.own_spans
    return {
        **row,
        "seconds": plan.speed.seconds,
        "num_chunks": plan.chunks.num,
        "chunk_numel": plan.chunks.numel,
        "largest_chunk_nbytes": max(load.nbytes for load in simulated.loads),
        "median_chunk_nbytes": statistics.median(load.nbytes for load in simulated.loads),
        "utilisation": plan.chunks.utilisation,
        "on_device": plan.chunks.num_on_device,
        "num_copies": sum(span.lane in (Lane.TO_DEVICE, Lane.TO_HOST) for span in spans),
        "moved_nbytes": sum(simulated.moved_nbytes),
        "host_s": busy[Lane.HOST] / 1e9,
    }


def rows_of(name, num_tokens, machine):
    """The table of a model on a machine, line by line."""
    sizes = {"auto": "auto"} | {f"{blocks:g} block": align(round(blocks * MODELS[name][1])) for blocks in BLOCKS}
    least = {
        size: plan_of(name, num_tokens, machine, LEAST, numel)[0].tiers["device"].need_nbytes
        for size, numel in sizes.items()
    }
    most = DEVICE_SHARE * find_machine(machine).device_nbytes
    tight = TIGHT * least["auto"]
    budgets = {"tight": int(tight), "medium": int((tight * most) ** 0.5), "all": int(most)}
    for (budget, device_nbytes), (size, numel) in itertools.product(budgets.items(), sizes.items()):
        yield row_of(name, num_tokens, machine, size, numel, budget, device_nbytes, least[size])


def show(row):
    """Prints a line of the table."""
    print(
        f"{row['model']:>10}{row['tokens']:>7}{row['machine']:>9}{row['budget']:>8}{row['device_nbytes'] / GIB:7.2f}  "
        f"{row['size']:10}{row['least_nbytes'] / GIB:6.2f}",
        "  does not fit"
        if row["seconds"] is None
        else f"{row['num_chunks']:6}{row['median_chunk_nbytes'] / MIB:8.2f}{row['utilisation']:8.2%}"
        f"{row['num_copies']:7}{row['moved_nbytes'] / GIB:7.2f}{row['host_s']:7.3f}{row['seconds']:9.4f}",
        flush=True,
    )


def main():
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 4096], help="of a step")
    parser.add_argument("--machines", nargs="+", default=["rtx4090", "h100"], help="known names, or JSON files")
    options = parser.parse_args()
    print("simulated")
    print(
        f"{'model':>10}{'tokens':>7}{'machine':>9}{'budget':>8}{'GiB':>7}  {'size':10}{'least':>6} {'chunks':>6}"
        f"{'MiB':>8}{'used':>8}{'copies':>7}{'GiB':>7}{'host s':>7}{'seconds':>9}"
    )
    rows = []
    for name, num_tokens, machine in itertools.product(options.models, options.tokens, options.machines):
        for row in rows_of(name, num_tokens, machine):
            rows.append(row)
            show(row)
    common.finish("bench_chunk_size", options, {"simulated": True, "rows": rows})


if __name__ == "__main__":
    main()
