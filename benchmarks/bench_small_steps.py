"""What the engine costs per step where tensors are so small that Python is all that is felt.

Tiny models (GPT-2, BERT, T5) train with torch's fused AdamW and clipping: plainly, under an engine with everything at
home on the device, and under one whose chunk budget is so small that chunks are evicted in every step. All three see
the same batches, interleaved, and their losses must be equal bit for bit. On such models a step of plain torch takes
some milliseconds, nearly all of it in Python and in launching operators, so the ratio is the largest that there is; on
models whose operators take time ``bench_overhead.py`` and ``bench_movement.py`` say more.
"""

import gc
import itertools
import statistics
import time

import common
import torch
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from hf_patrickstar import PatrickStarEngine

MAX_NORM = 1.0
VOCABULARY = 256


def make_gpt2(options):
    """A causal model with a tied head."""
    return common.make_gpt2(options.layers, options.hidden, VOCABULARY, options.length)


def make_bert(options):
    """A classifier with pooler and token types."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=options.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def make_t5(options):
    """An encoder and a decoder, each of half the layers."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=options.hidden,
        d_kv=options.hidden // 2,
        d_ff=4 * options.hidden,
        num_layers=max(options.layers // 2, 1),
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


MODELS = {"gpt2": make_gpt2, "bert": make_bert, "t5": make_t5}


def make_model(name, options):
    """A model in training mode; the same weights at every call."""
    torch.manual_seed(0)
    return MODELS[name](options).train().to(options.device)


def make_batch(name, number, options):
    """Random tokens; BERT classifies them by their first one."""
    batch = common.make_batch(number, options.batch_size, options.length, VOCABULARY, torch.device(options.device))
    if name == "bert":
        batch["labels"] = batch["input_ids"][:, 0] % 2
    return batch


def make_plain_step(model):
    """Forward, backward, clipping and update as everybody writes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_our_step(model, config, device):
    """The same under an engine; returns that, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = PatrickStarEngine(model, config, optimizer, device=device)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return loss.detach()

    return step, engine


def measure(name, options):
    """Runs a model in all three ways, in changing order.

    Returns:
        What is reported of each of our two ways.
    """
    steps = {"plain": make_plain_step(make_model(name, options))}
    numel = make_model(name, options).num_parameters()
    configs = {"fits": {"cpu_embedding": False}, "evicts": {"chunk_budget": f"{int(options.share * 4 * numel)}B"}}
    engines = {}
    for way, config in configs.items():
        steps[way], engines[way] = make_our_step(make_model(name, options), config, options.device)
    orders = itertools.cycle(itertools.permutations(steps))
    seconds = {way: [] for way in steps}
    losses = {way: [] for way in steps}
    for number, order in zip(range(options.warmup + options.steps), orders, strict=False):
        batch = make_batch(name, number, options)
        if number == options.warmup:
            before = {way: engine.stats() for way, engine in engines.items()}
            gc.collect()
            gc.disable()  # of which way's objects it collects when is chance
        for way in order:
            common.synchronize(torch.device(options.device))
            begin = time.perf_counter()
            loss = steps[way](batch)
            common.synchronize(torch.device(options.device))
            if number >= options.warmup:
                seconds[way].append(time.perf_counter() - begin)
            losses[way].append(loss.item())
    gc.enable()
    for way in engines:
        if losses[way] != losses["plain"]:
            raise SystemExit(f"{name}, {way}: losses differ: {losses[way]} and {losses['plain']}")
    return {way: report(engines[way], before[way], seconds, way, options) for way in engines}


def report(engine, before, seconds, way, options):
    """Medians of times and of ratios of steps on the same batch, and what moved."""
    stats = engine.stats()
    evictions = (stats["chunk_evictions"] - before["chunk_evictions"]) / options.steps
    if (way == "evicts") != (evictions > 0):
        raise SystemExit(f"'{way}' evicted {evictions} chunks per step")
    ratios = [ours / plain for ours, plain in zip(seconds[way], seconds["plain"], strict=True)]
    engine.detach()
    return {
        "parameters": engine.model.num_parameters(),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "plain_seconds": statistics.median(seconds["plain"]),
        "patrickstar_seconds": statistics.median(seconds[way]),
        "chunks": stats["num_chunks"],
        "loads_per_step": (stats["chunk_loads"] - before["chunk_loads"]) / options.steps,
        "evictions_per_step": evictions,
    }


def main():
    """Prints the ratios of step times and fails if losses differ."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.4, help="chunk budget as a part of the parameters' bytes")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--limit", type=float, default=2.5, help="fail if a median ratio is above this")
    options = parser.parse_args()
    common.repeat_bit_for_bit(options.device)
    results = {}
    print(f"{'model':6}{'':8}{'plain ms':>10}{'ours ms':>10}{'ratio':>8}  quartiles     evictions per step")
    for name in options.models:
        results[name] = measure(name, options)
        for way, found in results[name].items():
            low, _, high = found["ratio_quartiles"]
            print(
                f"{name:6}{way:8}{found['plain_seconds'] * 1e3:10.2f}{found['patrickstar_seconds'] * 1e3:10.2f}"
                f"{found['ratio']:8.3f}  {low:.3f}..{high:.3f}  {found['evictions_per_step']:.1f}",
                flush=True,
            )
    print("losses: equal, bit for bit")
    common.finish("bench_small_steps", options, {"limit": options.limit, "losses_equal": True, "models": results})
    worst = max(found["ratio"] for ways in results.values() for found in ways.values())
    if worst > options.limit:
        raise SystemExit(f"bench_small_steps: {worst:.3f} is above the limit of {options.limit}")


if __name__ == "__main__":
    main()
