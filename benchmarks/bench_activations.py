"""Activations that leave the device: a step whose activations have no room without that, against one with room.

A GPT-2 and a Llama, with recomputed blocks and without, are trained on the CPU tier, where a part of the host's memory
takes the place of the device, and bytes are really copied. The run with room and the tight one take turns, step by
step. Chunks may take the same bytes of the device in both, so that activations are all that differs. The tight budget
lets a part of them stay (``--stay``). Printed are medians of seconds per step, the peak beside that of the plan, and
the bytes that left; losses and weights must be the same to the last bit.
"""

import statistics
import time

import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patrickstar import BudgetError, PatrickStarEngine
from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.units import format_nbytes

ROOM_NBYTES = 64 * 2**30
VOCABULARY = 256


def make_llama(options):
    """A Llama; the same weights at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": options.hidden // 64, "max_position_embeddings": options.length}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=options.layers, use_cache=False)).train()


MODELS = {
    "gpt2": lambda options: common.make_gpt2(options.layers, options.hidden, VOCABULARY, options.length),
    "llama": make_llama,
}


def chunk_nbytes(model, options):
    """What chunks may take of the device: as much as one layer and its share of the embeddings, so that most move."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    return numel * common.DTYPES[options.dtype].itemsize // options.layers


class Run:
    """A model that trains under a device budget."""

    def __init__(self, name, is_recomputed, budget, options, offload="auto"):
        self.model = MODELS[name](options)
        if is_recomputed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        chunks = f"{chunk_nbytes(self.model, options)}B"
        config = {"dtype": options.dtype, "autocast": False, "activation_offload": offload, "reuse_plan": False}
        config |= {"device_budget": f"{budget}B", "chunk_budget": chunks, "placement": "host"}
        self.engine = PatrickStarEngine(self.model, config, optimizer, device="cpu")
        self.options, self.losses, self.seconds = options, [], []

    def step(self):
        """Trains one step, and notes its seconds."""
        options, number = self.options, len(self.losses)
        batch = common.make_batch(number, options.batch_size, options.length, VOCABULARY, torch.device("cpu"))
        begin = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())

    @property
    def peak(self):
        """The most bytes in a step by the plan."""
        return max(max(tide.totals) for tide in self.engine.survey().tides)

    @property
    def trace(self):
        """What a micro-batch does."""
        return next(made for made in self.engine.traces.values() if made.kind.is_training)

    def weights(self):
        """All values."""
        return [value.clone() for value in self.model.state_dict().values()]


def does_not_fit(name, is_recomputed, budget, options):
    """Whether a training has no room if no activations leave."""
    try:
        Run(name, is_recomputed, budget, options, offload=False).step()
    except (BudgetError, DeviceMemoryError):
        return True
    return False


def measure(name, is_recomputed, options):
    """One line of the table."""
    room = Run(name, is_recomputed, ROOM_NBYTES, options)
    room.step()
    trace = room.trace
    most, least = trace.non_model_peak_nbytes, trace.offloading(len(trace.activations)).non_model_peak_nbytes
    budget = int(chunk_nbytes(room.model, options) + least + options.stay * (most - least))
    tight = Run(name, is_recomputed, budget, options)
    tight.step()
    for number in range(options.steps):
        for run in (room, tight) if number % 2 else (tight, room):
            run.step()
    seconds = [statistics.median(run.seconds[2:]) for run in (room, tight)]
    stats, made = tight.engine.stats(), tight.trace
    pairs = zip(room.weights(), tight.weights(), strict=True)
    return {
        "model": name,
        "recomputed": is_recomputed,
        "budget_nbytes": budget,
        "does_not_fit_without": does_not_fit(name, is_recomputed, budget, options),
        "room_s": seconds[0],
        "tight_s": seconds[1],
        "ratio": seconds[1] / seconds[0],
        "planned_peak_nbytes": tight.peak,
        "peak_nbytes": stats["device_total_step_peak_nbytes"],
        "activations": len(made.activations),
        "left": made.num_offloaded,
        "planned_offloaded_nbytes": made.offloaded_nbytes * (options.steps + 1),
        "offloaded_nbytes": stats["offloaded_nbytes"],
        "same_bits": room.losses == tight.losses and all(torch.equal(*pair) for pair in pairs),
    }


def main():
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=list(common.DTYPES))
    parser.add_argument("--steps", type=int, default=20, help="that count, of each run")
    parser.add_argument("--stay", type=float, default=0.25, help="the part of activations that has room on the device")
    options = parser.parse_args()
    rows = []
    print("model  recomputed   budget       peak       plan  left of     bytes per step   room s  tight s  ratio  bits")
    for name in MODELS:
        for is_recomputed in (True, False):
            row = measure(name, is_recomputed, options)
            rows.append(row)
            per_step = row["offloaded_nbytes"] // (options.steps + 1)
            print(
                f"{name:<7}{'yes' if is_recomputed else 'no':<9}{format_nbytes(row['budget_nbytes']):>12}"
                f"{format_nbytes(row['peak_nbytes']):>12}{format_nbytes(row['planned_peak_nbytes']):>12}"
                f"{row['left']:>5} {row['activations']:>3}{format_nbytes(per_step):>15}"
                f"{row['room_s']:>9.3f}{row['tight_s']:>9.3f}{row['ratio']:>7.3f}  "
                f"{'same' if row['same_bits'] else 'DIFFERENT'}"
                + ("" if row["does_not_fit_without"] else ", FITS WITHOUT")
            )
    common.finish("bench_activations", options, {"rows": rows})


if __name__ == "__main__":
    main()
