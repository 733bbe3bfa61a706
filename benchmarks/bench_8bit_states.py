"""8-bit states of bitsandbytes over chunks: bytes against a formula, and step time against the stock way.

A model of the shape of Qwen2.5-0.5B with random weights trains with ``adamw_bnb_8bit``, as the Trainer makes it: the
embedding, and tensors of fewer than 4096 elements, have fp32 states. Each row runs in a process of its own:

    autocast   fp32 weights under bf16 autocast, as with ``--bf16``; under the engine, bf16 weights and fp32 masters
    16-bit     bf16 weights without masters, as a model that is loaded in bf16 trains

In a row the stock model, with everything resident, and the same model under the engine, whose chunks live on the host
and pass through a small budget, train on the same batches in turns. Losses must be equal bit for bit. The aim is 1.05
times the step of the stock model; the benchmark fails above ``--limit``.

The formula of the host, for parameters of b bytes whose masters take m (2 and 4 in 16-bit; 4 and 4 for those that
autocast leaves in fp32, and 2 and 2 without masters):

    param     b for each parameter
    master    m
    states    1 + 1, or 4 + 4 where the library keeps fp32
    absmax    4 + 4 for each block of 256 elements that a tensor of 8-bit states has begun
    padding   what chunks are longer than their tensors, in all lists

The ledger's peak must be within 1 % of it. The peak RSS of a process that trains the engine's model alone, and of one
that trains the stock one, are beside it: they have activations, gradients, and what the library computes with, too.
"""

import contextlib
import copy
import json
import resource
import statistics
import subprocess
import sys
import time

import common
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import format_nbytes

AIM = 1.05  # times the step of the stock model
TOLERANCE = 0.01  # of the formula
MAX_NORM = 1.0
BLOCK_NUMEL = 256
LEAST_NUMEL = 4096
ROWS = {"autocast": torch.float32, "16-bit": torch.bfloat16}
"""How a row's model is loaded."""
SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 304, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
}


def make_model(options):
    """A model of random weights, which are the same at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES[options.size],
        vocab_size=options.vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        loss_type="ForCausalLM",
    )
    return Qwen2ForCausalLM(config).to(ROWS[options.row]).train()


def make_optimizer(model):
    """``adamw_bnb_8bit`` as the Trainer makes it, which registers embeddings for fp32 states."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
    return bitsandbytes.optim.AdamW(model.parameters(), lr=1e-4, optim_bits=8)


def make_stock_step(model, options):
    """A step of the stock model; it returns the loss, and the seconds that the update took."""
    optimizer = make_optimizer(model)
    context = contextlib.nullcontext()
    if options.row == "autocast":
        context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    def step(batch):
        with context:
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        begin = time.perf_counter()
        optimizer.step()
        update_s = time.perf_counter() - begin
        optimizer.zero_grad()
        return loss.item(), update_s

    return step


def make_our_step(model, options):
    """The same under the engine, and the engine."""
    dtype = "bf16" if options.row == "autocast" else "auto"
    # The embedding is the largest parameter, and autocast leaves it in the type in which it was loaded.
    budget = {"chunk_budget": f"{int(options.budget * model.get_input_embeddings().weight.nbytes)}B"}
    engine = PatrickStarEngine(
        model, {"dtype": dtype, "placement": "host", **budget}, make_optimizer(model), device=options.device
    )
    model.zero_grad()  # as the Trainer does; without it gradients of the first step are kept beside the values

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        begin = time.perf_counter()
        engine.optimizer.step()
        update_s = time.perf_counter() - begin
        model.zero_grad()
        return loss.item(), update_s

    return step, engine


def terms_of(engine):
    """The named terms of the formula in bytes, from the parameters and the layout alone."""
    terms = dict.fromkeys(("param", "master", "state1", "state2", "absmax1", "absmax2", "padding"), 0)
    embedding = engine.model.get_input_embeddings().weight
    for chunk in engine.chunks:
        widths = {"param": chunk.param.dtype.itemsize, "master": chunk.state_dtype.itemsize}
        used_numel = num_blocks = 0
        for tensor in chunk.tensors:
            numel = tensor.spec.numel
            is_wide = numel < LEAST_NUMEL or tensor.parameter is embedding
            widths |= dict.fromkeys(("state1", "state2"), 4 if is_wide else 1)
            for name, width in widths.items():
                terms[name] += width * numel
            used_numel += numel
            num_blocks += 0 if is_wide else -(-numel // BLOCK_NUMEL)
        terms["absmax1"] += 4 * num_blocks
        terms["absmax2"] += 4 * num_blocks
        terms["padding"] += (chunk.spec.chunk_numel - used_numel) * sum(widths.values())
    return terms


def rss_peak():
    """The most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def batches(options, device):
    """The batches of a run."""
    for number in range(options.warmup + options.steps):
        yield common.make_batch(number, options.batch_size, options.length, options.vocabulary, device)


def measure_memory(options, device):
    """Trains one of the two models alone."""
    model = make_model(options)
    before = rss_peak()
    if options.alone == "stock":
        step, engine = make_stock_step(model, options), None
    else:
        step, engine = make_our_step(model, options)
    losses = [step(batch)[0] for batch in batches(options, device)]
    found = {"losses": losses, "rss_before": before, "rss_peak": rss_peak()}
    if engine is not None:
        found |= {
            "terms": terms_of(engine),
            "host_peak": engine.ledger.peak(Tier.HOST),
            "owner_peaks": engine.ledger.owner_peaks(Tier.HOST),
            "device_peak": engine.stats()["device_peak_nbytes"],
        }
    return found


def measure_time(options, device):
    """Trains both models in turns."""
    stock = make_model(options)
    ours = copy.deepcopy(stock)
    our_step, engine = make_our_step(ours, options)
    steps = {"stock": make_stock_step(stock, options), "patrickstar": our_step}
    found = {name: {"seconds": [], "update_seconds": [], "losses": []} for name in steps}
    for number, batch in enumerate(batches(options, device)):
        for name in sorted(steps, reverse=bool(number % 2)):
            begin = time.perf_counter()
            loss, update_s = steps[name](batch)
            seconds = time.perf_counter() - begin
            found[name]["losses"].append(loss)
            if number >= options.warmup:
                found[name]["seconds"].append(seconds)
                found[name]["update_seconds"].append(update_s)
    stats = engine.stats()
    found["parameters"] = sum(parameter.numel() for parameter in ours.parameters())
    found["chunk_budget"] = engine.ledger.chunk_budget
    found["chunk_loads_per_step"] = stats["chunk_loads"] / (options.warmup + options.steps)
    return found


def in_process(options, row, alone=None):
    """What a process of its own has measured."""
    words = ["--row", row, *(["--alone", alone] if alone else [])]
    command = [sys.executable, __file__, *sys.argv[1:], *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"{row}, {alone or 'in turns'}: failed:\n{finished.stderr}")
    return json.loads(finished.stdout.strip().splitlines()[-1])


def report_memory(row, ours, stock):
    """Prints the bytes of a row; returns what does not hold."""
    formula = sum(ours["terms"].values())
    for name, nbytes in ours["terms"].items():
        booked = format_nbytes(ours["owner_peaks"].get(name, 0))
        print(f"{row:>9}: {name:<8} {format_nbytes(nbytes):>11}  (ledger {booked})")
    off = ours["host_peak"] / formula - 1
    print(f"{row:>9}: host peak {format_nbytes(ours['host_peak'])}, formula {format_nbytes(formula)}: {off:+.2%}")
    print(f"{row:>9}: peak RSS {format_nbytes(ours['rss_peak'])}; stock {format_nbytes(stock['rss_peak'])}")
    problems = []
    if abs(off) > TOLERANCE:
        problems.append(f"{row}: host peak {ours['host_peak']} is not within {TOLERANCE:.0%} of {formula}")
    if ours["losses"] != stock["losses"]:
        problems.append(differ(row, stock, ours))
    return problems


def differ(row, stock, ours):
    """What is wrong if losses differ."""
    return f"{row}: losses differ: {ours['losses']}, and of the stock model {stock['losses']}"


def report_time(row, found, options):
    """Prints the times of a row and adds the ratios to it; returns what does not hold."""
    stock, ours = found["stock"], found["patrickstar"]
    ratios = [own / other for own, other in zip(ours["seconds"], stock["seconds"], strict=True)]
    found["ratio"], found["aim"] = statistics.median(ratios), AIM
    found["ratio_quartiles"] = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios
    found["aim_met"] = found["ratio"] <= AIM
    for name in ("stock", "patrickstar"):
        total, update = (statistics.median(found[name][key]) for key in ("seconds", "update_seconds"))
        print(f"{row:>9}: {name:<11} {total:.3f} s a step, {update:.3f} s of it in optimizer.step()")
    print(
        f"{row:>9}: ratio {found['ratio']:.3f} (quartiles "
        f"{', '.join(f'{ratio:.3f}' for ratio in found['ratio_quartiles'])}), "
        f"aim of {AIM}: {'met' if found['aim_met'] else 'not met'}"
    )
    problems = []
    if stock["losses"] != ours["losses"]:
        problems.append(differ(row, stock, ours))
    if found["ratio"] > options.limit:
        problems.append(f"{row}: {found['ratio']:.3f} is above the limit of {options.limit}")
    return problems


def main():
    """Measures the rows, and fails if a promise does not hold."""
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="0.5b")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--budget", type=float, default=1.2, help="the chunk budget, over the bytes of the embedding")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--parts", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--limit", type=float, default=AIM, help="fail if a median ratio is above this")
    parser.add_argument("--row", choices=list(ROWS), help="internal: measure one row in this process")
    parser.add_argument("--alone", choices=["stock", "patrickstar"], help="internal: its memory, of one model")
    options = parser.parse_args()
    device = torch.device(options.device)
    common.repeat_bit_for_bit(options.device)
    if options.row is not None:
        print(json.dumps((measure_memory if options.alone else measure_time)(options, device)))
        return
    rows, problems = {}, []
    for row in options.rows:
        rows[row] = {}
        if "memory" in options.parts:
            found = {name: in_process(options, row, name) for name in ("patrickstar", "stock")}
            rows[row]["memory"] = found
            problems += report_memory(row, found["patrickstar"], found["stock"])
        if "time" in options.parts:
            rows[row]["time"] = in_process(options, row)
            problems += report_time(row, rows[row]["time"], options)
    bitsandbytes = common.package_version("bitsandbytes")
    common.finish("bench_8bit_states", options, {"bitsandbytes": bitsandbytes, "rows": rows, "problems": problems})
    if problems:
        raise SystemExit("bench_8bit_states: " + "; ".join(problems))
    print("ledger within 1 % of the formula, losses equal, bit for bit: yes")


if __name__ == "__main__":
    main()
