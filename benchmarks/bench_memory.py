"""Where the bytes are: peaks per tier against the formula of the memory model, and the process's peak RSS.

Every budget runs in a process of its own. The ledger's peaks must be within 2 % of the formula, the budgets must
hold, and all budgets must train to the same losses.

The formula, for M trainable parameters of b bytes (2 in 16-bit, 4 in fp32), A micro-batches per step, host-homed:

    host    = param b M + master 4 M + exp_avg 4 M + exp_avg_sq 4 M  [+ grad 4 M if A > 1]
              + padding of the chunks
    device  = the most that a least-recently-used cache of the budget's size holds while the param chunks are
              visited module by module, forward and backward

With a budget that everything fits in, all of it is on the device and nothing on the host. "RSS growth" is what the
process took beyond the plain fp32 model, whose memory the chunks take over: it shows activations and the allocator too,
and is there to be compared with the sum of the formulas less 4 M.
"""

import json
import resource
import subprocess
import sys

import common
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.units import format_nbytes

SHARES = (None, 1.0, 0.5, 0.25, 0.1)


def formula(engine, numel, accumulation):
    """The named terms, in bytes per tier, from the layout alone."""
    layout = engine.chunks
    itemsize = engine.dtype.itemsize
    lists = {"param": itemsize, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
    if accumulation > 1:
        lists["grad"] = 4
    terms = {name: width * numel for name, width in lists.items()}
    capacity = sum(chunk.spec.capacity_numel for chunk in layout)
    terms["padding"] = (capacity - numel) * sum(lists.values())
    home = sum(terms.values())
    budget = engine.ledger.chunk_budget
    if budget is None or budget >= home:
        return terms, {"device": home, "host": 0}
    return terms, {"device": cache_peak(engine, budget), "host": home}


def cache_peak(engine, budget):
    """Bytes that an LRU cache of whole chunks reaches over one forward and backward; written without the engine."""
    of_parameter = {id(tensor.parameter): tensor.chunk for chunk in engine.chunks for tensor in chunk.tensors}
    visits = []
    for module in engine.model.modules():
        visits += [of_parameter[id(p)] for p in module._parameters.values() if p is not None]
    cache: dict[int, int] = {}
    peak = 0
    for chunk in visits + visits[::-1]:
        size = cache.pop(chunk.spec.index, None)
        if size is None:
            size = chunk.spec.capacity_numel * engine.dtype.itemsize
            while sum(cache.values()) + size > budget:
                del cache[next(iter(cache))]
        cache[chunk.spec.index] = size
        peak = max(peak, sum(cache.values()))
    return peak


def child(options):
    """Trains a few steps in one budget; prints what it measured as JSON."""
    share = None if options.share == "all" else float(options.share)
    model = common.make_gpt2(options.layers, options.hidden)
    numel = model.num_parameters()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # An LRU cache without prefetch and with all homes on the host is what the formula of the device peak describes.
    config = {"dtype": options.dtype, "autocast": False, "eviction": "lru", "prefetch_depth": 0, "placement": "host"}
    if share is not None:
        config["chunk_budget"] = int(share * numel * 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = PatrickStarEngine(
        model, config, optimizer, device=options.device, gradient_accumulation_steps=options.accumulation
    )
    losses = []
    model.zero_grad()  # as the Trainer does; without it gradients of the first step are kept beside the values
    for step in range(options.steps):
        for micro in range(options.accumulation):
            batch = common.make_batch(step * 97 + micro, 2, 64, 256, torch.device(options.device))
            loss = model(**batch).loss / options.accumulation
            loss.backward()
            losses.append(loss.item())
        engine.optimizer.clip_grad_norm_(model.parameters(), 1.0)
        engine.optimizer.step()
        model.zero_grad()
    terms, expected = formula(engine, numel, options.accumulation)
    stats = engine.stats()
    result = {
        "parameters": numel,
        "budget": engine.ledger.chunk_budget,
        "terms": terms,
        "expected": expected,
        "measured": {tier: stats[f"{tier}_peak_nbytes"] for tier in ("device", "host")},
        "rss_before_engine": before,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "chunk_loads_per_step": stats["chunk_loads"] / options.steps,
        "host_to_device_per_step": stats["host_to_device_nbytes"] // options.steps,
        "device_to_host_per_step": stats["device_to_host_nbytes"] // options.steps,
        "losses": losses,
    }
    print(json.dumps(result))


def main():
    """Runs every budget and checks what it measured."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="bf16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--share", help="internal: run one budget in this process")
    options = parser.parse_args()
    if options.share is not None:
        child(options)
        return
    runs = {}
    for share in SHARES:
        name = "all" if share is None else str(share)
        command = [sys.executable, __file__, *sys.argv[1:], "--share", name]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise SystemExit(f"budget {name} failed:\n{finished.stderr}")
        runs[name] = json.loads(finished.stdout.strip().splitlines()[-1])
    report(runs, options)


def report(runs, options):
    """Prints the table, writes the result, and fails if a promise did not hold."""
    first = next(iter(runs.values()))
    print(f"{first['parameters'] / 1e6:.1f} M parameters, {options.dtype}, A = {options.accumulation}")
    print("terms: " + ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in first["terms"].items()))
    widths = (16, 14, 14, 14, 14, 12, 14, 14)
    head = ("budget", "device peak", "formula", "host peak", "formula", "RSS peak", "RSS growth", "to dev/step")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    problems = []
    for name, run in runs.items():
        cells = [format_nbytes(run["budget"]) if run["budget"] else "unlimited"]
        for tier in ("device", "host"):
            measured, expected = run["measured"][tier], run["expected"][tier]
            cells += [format_nbytes(measured), format_nbytes(expected)]
            if abs(measured - expected) > 0.02 * expected:
                problems.append(f"budget {name}: {tier} peak {measured} is not within 2 % of {expected}")
        if run["budget"] and run["measured"]["device"] > run["budget"]:
            problems.append(f"budget {name}: {run['measured']['device']} bytes on the device, over the budget")
        if run["losses"] != first["losses"]:
            problems.append(f"budget {name}: losses differ: {run['losses']} against {first['losses']}")
        growth = run["rss_peak"] - run["rss_before_engine"]
        cells += [format_nbytes(n) for n in (run["rss_peak"], growth, run["host_to_device_per_step"])]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    result = {"dtype": options.dtype, "accumulation": options.accumulation, "runs": runs, "problems": problems}
    common.finish(f"bench_memory_{options.dtype}", options, result)
    if problems:
        raise SystemExit("bench_memory: " + "; ".join(problems))
    print("ledger within 2 % of the formula, budgets held, losses equal: yes")


if __name__ == "__main__":
    main()
