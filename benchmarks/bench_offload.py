"""Training of models that are too large for the device: tokens per second and peaks, beside plain torch if that fits.

A Llama with random weights in bf16 under autocast, with fp32 masters, AdamW, gradient checkpointing and clipping to a
norm of 1.0. ``--kind plain`` has fp32 weights and states on the device, as the stock Trainer with ``--bf16`` does.
Where that does not fit, the result says so, and that is no failure. The largest model is loaded in bf16, since its fp32
values beside its chunks would be more than most hosts have.

``--shares`` measures the CPU tier instead: step time against plain torch where copies of chunks may be some shares of
the parameters' bytes, with ``overlap_optimizer`` and without. A GPT-2 trains on the same batches under all of them in
turns, and losses must be equal bit for bit. (On the CPU tier the cores that update are those that compute, so an update
is done when the step returns, with either setting.)
"""

import itertools
import resource
import statistics
import time

import bench_overhead
import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patrickstar import PatrickStarEngine

MAX_NORM = 1.0
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
MORE = {
    "tiny": {"vocab_size": 256, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "3b": {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False},
}


def make_llama(size, length, dtype):
    """A Llama on the host with cheap random weights: drawing billions of numbers would take minutes."""
    config = LlamaConfig(**SIZES[size], **MORE[size], max_position_embeddings=length, loss_type="ForCausalLM")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file, so they are made here
    block = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                flat[start : start + block.numel()].copy_(block[: flat.numel() - start])
    model.gradient_checkpointing_enable()
    return model.train()


def make_our_step(model, device):
    """The step of the engine, and a function that gives its figures."""
    engine = PatrickStarEngine(
        model, {"dtype": "bf16"}, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), device=device
    )

    def step(batch):
        def micro_batch():
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        loss = engine.attempt(micro_batch)
        engine.optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return loss

    return step, engine.stats


def make_plain_step(model, device):
    """The step of plain torch, with everything on the device."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, dict


def measure(step, device, options):
    """Seconds and losses of steps; those of the warm-up, in which the engine records, are not timed."""
    vocabulary = MORE[options.size]["vocab_size"]
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        batch = common.make_batch(number, options.batch_size, options.length, vocabulary, device)
        if number == options.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        common.synchronize(device)
        begin = time.perf_counter()
        loss = step(batch)
        common.synchronize(device)
        if number >= options.warmup:
            seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return seconds, losses


def make_steps_of_shares(options):
    """A step for plain torch and one for each share and setting, by name, and the engines."""
    steps, engine, _ = bench_overhead.make_steps(torch.device("cpu"), options)
    steps["resident"] = steps.pop("patrickstar")
    engines = {"resident": engine}
    for share, overlaps in itertools.product(options.shares, (True, False)):
        model = common.make_gpt2(options.layers, options.hidden, positions=options.length)
        nbytes = sum(p.numel() for p in model.parameters()) * common.DTYPES[options.dtype].itemsize
        config = {"dtype": options.dtype, "autocast": False, "cpu_embedding": False, "placement": "host"}
        config |= {"chunk_budget": int(share * nbytes), "overlap_optimizer": overlaps}
        made = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        name = f"{share:.0%}, {'overlapped' if overlaps else 'at once'}"
        engines[name] = PatrickStarEngine(model, config, made, device=torch.device("cpu"))
        steps[name] = bench_overhead.make_our_step(model, engines[name])
    return steps, engines


def compare_shares(options):
    """Prints ratios to plain torch; fails if losses differ."""
    seconds, loads = {}, {}
    for _ in range(options.repeats):
        steps, engines = make_steps_of_shares(options)
        found, losses = bench_overhead.measure(steps, torch.device("cpu"), options)
        for name, row in losses.items():
            if row != losses["plain"]:
                raise SystemExit(f"bench_offload: losses of '{name}' differ from those of plain torch: {row}")
        for name, row in found.items():
            seconds.setdefault(name, []).extend(row)
        for name, engine in engines.items():
            loads[name] = engine.stats()["chunk_loads"]
            engine.detach()
    rows = {}
    for name, row in seconds.items():
        ratios = [ours / plain for ours, plain in zip(row, seconds["plain"], strict=True)]
        rows[name] = {"seconds": statistics.median(row), "ratio": statistics.median(ratios)}
        rows[name] |= {"quartiles": statistics.quantiles(ratios, n=4), "chunk_loads": loads.get(name)}
        low, _, high = rows[name]["quartiles"]
        print(
            f"{name:>17}: {rows[name]['seconds']:.4f} s, {rows[name]['ratio']:.3f} of plain ({low:.3f} to {high:.3f}), "
            f"{loads.get(name, 0)} chunk loads"
        )
    print("losses: equal, bit for bit")
    common.finish(f"bench_offload_shares_{options.dtype}", options, {"rows": rows, "losses_equal": True})


def main():
    """Prints tokens per second."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--shares", type=float, nargs="+", help="measure the CPU tier at these shares of the parameters"
    )
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="bf16", help="for --shares")
    parser.add_argument("--layers", type=int, default=8, help="for --shares")
    parser.add_argument("--hidden", type=int, default=512, help="for --shares")
    parser.add_argument("--repeats", type=int, default=2, help="for --shares")
    parser.add_argument("--size", choices=list(SIZES), default="3b")
    parser.add_argument("--kind", choices=["patrickstar", "plain"], default="patrickstar")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.shares:
        options.device = "cpu"
        compare_shares(options)
        return
    device = torch.device(options.device)
    name = f"bench_offload_{options.size}_{options.kind}"
    dtype = torch.bfloat16 if (options.size, options.kind) == ("8b", "patrickstar") else torch.float32
    model = make_llama(options.size, options.length, dtype)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "max_norm": MAX_NORM}
    result["loaded_in"] = str(dtype).removeprefix("torch.")
    result |= {"batch_size": options.batch_size, "length": options.length, "fits": True}
    make = make_our_step if options.kind == "patrickstar" else make_plain_step
    try:
        step, stats = make(model, device)
        seconds, losses = measure(step, device, options)
    except torch.OutOfMemoryError as error:
        if options.kind != "plain":
            raise
        print(f"{name}: does not fit: {str(error).splitlines()[0]}")
        common.finish(name, options, {**result, "fits": False})
        return
    tokens = options.batch_size * options.length / statistics.median(seconds)
    # ru_maxrss is in KiB on Linux.
    result |= {
        "seconds_per_step": seconds,
        "tokens_per_second": tokens,
        "losses": losses,
        "host_peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_nbytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "device_reserved_peak_nbytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "stats": {key: value for key, value in stats().items() if isinstance(value, (int, float, str))},
    }
    print(f"{name}: {tokens:.0f} tokens per second, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    common.finish(name, options, result)


if __name__ == "__main__":
    main()
