"""Chunk loads and bytes moved by each eviction policy, against a lower bound.

Traces come from the real engine: of a small GPT-2 on real tensors, whose movement per step is also counted and must
be what the simulator says, exactly; of 1 B and 4 B parameters on fake tensors, where a step allocates nothing. Each
is recorded with and without activation checkpointing and replayed under budgets from 10 to 100 % of the parameters.

The lower bound is that of a step over n chunks of which k stay from forward to backward, 2 n - k loads. In loads: the
n distinct chunks that forward visits, plus those that backward visits, less the k smallest of them that fit the budget
together at the turn. In bytes: what forward visits, plus what backward visits, less what the budget can carry over. No
device copy outlives the step, since every parameter is trained.

``--save_traces DIR`` writes each recorded trace to DIR/MODEL_KIND.pickle. ``--traces DIR`` simulates
the traces in such files and records nothing, so that there is no engine to compare with.
"""

import itertools
import pathlib
import pickle
import time

import common
import torch
from movement import simulate

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.units import format_nbytes

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
POLICIES = ("list_order", "lru", "belady")
PREFETCH = {"list_order": 0, "lru": 0, "belady": 2}
LIMIT = 0.05
COUNTED = ("chunk_loads", "host_to_device_nbytes", "prefetches", "chunk_evictions")
MODELS = {"small": (8, 512, 256), "1B": (20, 2048, 50304), "4B": (64, 2304, 50304)}


def record(name, checkpointing, budget_share, policy, num_steps, fake):
    """Trains a few steps; returns the engine, the numel, and loads and bytes of the last step."""
    layers, hidden, vocabulary = MODELS[name]
    model = common.make_gpt2(layers, hidden, vocabulary)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    numel = model.num_parameters()
    # A lower share would make "auto" choose smaller chunks: every budget of a model uses the chunks of the smallest.
    config = {
        "dtype": "bf16",
        "autocast": False,
        "eviction": policy,
        "chunk_budget": f"{int(budget_share * 2 * numel)}B",
        "placement": "host",
        "prefetch_depth": PREFETCH[policy],
        "host_budget": f"{20 * numel}B",
        "chunk_numel": 2 * hidden * hidden + 64,
        "cpu_embedding": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = PatrickStarEngine(model, config, optimizer)
    moved = ()
    for step in range(num_steps):
        before = engine.stats()
        if fake:
            tokens = torch.zeros(1, 32, dtype=torch.long)
            batch = {"input_ids": tokens, "labels": tokens}
        else:
            batch = common.make_batch(step, 1, 32, vocabulary, torch.device("cpu"))
        model(**batch).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        after = engine.stats()
        moved = tuple(after[key] - before[key] for key in COUNTED)
    return engine, numel, moved


def record_fake(name, checkpointing):
    """The trace of one step on fake tensors, recorded with room for everything that a module needs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        engine, numel, _ = record(name, checkpointing, 1.0, "belady", 1, fake=True)
        return trace_of(engine), numel


def record_and_count(name, checkpointing):
    """The trace of a step on real tensors, and what the engine moves under each budget and policy where that fits."""
    engine, numel, _ = record(name, checkpointing, 1.0, "belady", 1, fake=False)
    counted = {}
    for share in SHARES:
        for policy in POLICIES:
            try:
                counted[share, policy] = record(name, checkpointing, share, policy, 3, fake=False)[2]
            except BudgetError:
                continue
    return trace_of(engine), numel, counted


def read(folder, name, checkpointing):
    """A trace that ``--save_traces`` has written; only the model is made, on fake tensors, to count its parameters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        trace = pickle.loads(trace_path(folder, name, checkpointing).read_bytes())
    except OSError as error:
        raise SystemExit(f"bench_movement: {error}; write it with --save_traces") from None
    with FakeTensorMode():
        layers, hidden, vocabulary = MODELS[name]
        return trace, common.make_gpt2(layers, hidden, vocabulary).num_parameters()


def kind_of(checkpointing):
    """The word for it in the table and in file names."""
    return "checkpointing" if checkpointing else "plain"


def trace_path(folder, name, checkpointing):
    """Where the trace of a model is written."""
    return pathlib.Path(folder) / f"{name}_{kind_of(checkpointing)}.pickle"


def trace_of(engine):
    """The trace of the training step; there is one, since all batches have one shape."""
    (trace,) = (t for key, t in engine.traces.items() if key.startswith("training"))
    return trace


def lower_bound(trace, budget):
    """Loads and bytes that no policy can do without; the last new chunk is the turn from forward to backward."""
    first, last = {}, {}
    for moment, visit in enumerate(trace.visits):
        first.setdefault(visit.chunk_index, moment)
        last[visit.chunk_index] = moment
    turn = max(first.values())
    forward = sum(trace.chunk_nbytes[index] for index in first)
    again = sorted(trace.chunk_nbytes[index] for index, moment in last.items() if moment > turn)
    stay = sum(nbytes <= budget for nbytes in itertools.accumulate(again))
    return len(first) + len(again) - stay, forward + max(sum(again) - budget, 0)


def compare(name, checkpointing, trace, numel, counted):
    """Prints and returns one row per budget."""
    rows = []
    updated = frozenset(range(len(trace.chunk_nbytes)))
    for share in SHARES:
        budget = int(share * 2 * numel)
        bound_loads, bound = lower_bound(trace, budget)
        row = {"model": name, "checkpointing": checkpointing, "share": share}
        row |= {"bound_loads": bound_loads, "bound_nbytes": bound}
        for policy in POLICIES:
            real = counted.get((share, policy))
            try:
                moved = simulate(trace, budget, policy, dropped_after=updated, prefetch_depth=PREFETCH[policy])
            except BudgetError:
                if real is not None:
                    raise SystemExit(f"bench_movement: {name} {share} {policy}: only the engine fits") from None
                continue
            if counted and real is None:
                raise SystemExit(f"bench_movement: {name} {share} {policy}: only the simulator fits")
            if moved.loads < bound_loads or moved.host_to_device_nbytes < bound:
                raise SystemExit(f"bench_movement: {name} {share} {policy}: {moved} is less than the bound")
            row[policy] = {"loads": moved.loads, "nbytes": moved.host_to_device_nbytes, "ahead": moved.prefetches}
            simulated = (moved.loads, moved.host_to_device_nbytes, moved.prefetches, moved.evictions)
            if real is not None and real != simulated:
                raise SystemExit(f"bench_movement: {name} {share} {policy}: engine {real}, simulator {moved}")
        kind = kind_of(checkpointing)
        if "belady" not in row:
            print(f"{name:>6} {kind:>14} {share:>5.0%}  the chunks in use at one moment do not fit")
            continue
        cells = "".join(f"{row[policy]['loads']:>9}{format_nbytes(row[policy]['nbytes']):>12}" for policy in POLICIES)
        over = row["belady"]["nbytes"] / bound - 1
        row["belady_over_bound"] = over
        if over > LIMIT:
            raise SystemExit(f"bench_movement: {name} {share}: Belady is {over:.1%} over the bound")
        print(f"{name:>6} {kind:>14} {share:>5.0%}{cells}{bound_loads:>9}{format_nbytes(bound):>12}{over:>8.1%}")
        rows.append(row)
    return rows


def main():
    """Prints the table and fails if the simulator and the engine disagree."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--save_traces", metavar="DIR", help="write the recorded traces to this folder")
    parser.add_argument("--traces", metavar="DIR", help="simulate the traces in this folder and record nothing")
    options = parser.parse_args()
    head = "".join(f"{policy:>21}" for policy in (*POLICIES, "bound"))
    print(f"{'model':>6} {'':>14} {'share':>5}{head}{'over':>8}")
    rows = []
    for name in options.models:
        for checkpointing in (False, True):
            begin = time.time()
            counted = {}
            if options.traces is not None:
                trace, numel = read(options.traces, name, checkpointing)
            elif name == "small":
                trace, numel, counted = record_and_count(name, checkpointing)
            else:
                trace, numel = record_fake(name, checkpointing)
            if options.save_traces is not None:
                path = trace_path(options.save_traces, name, checkpointing)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pickle.dumps(trace))
            rows += compare(name, checkpointing, trace, numel, counted)
            done = "recorded and replayed" if options.traces is None else "replayed"
            print(f"{name:>6} {done} in {time.time() - begin:.0f} s")
    print(f"Belady within {LIMIT:.0%} of the bound everywhere")
    if options.traces is None and "small" in options.models:
        print("the engine's counts equal the simulator's, exactly")
    common.finish("bench_movement", options, {"rows": rows})


if __name__ == "__main__":
    main()
