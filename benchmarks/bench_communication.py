"""What processes that train one model together send each other: bytes, collectives, bandwidth.

A GPT-2 with untied embeddings is trained in bf16 by 1, 2 and 4 processes of one thread that talk over gloo, with one
micro-batch per step. Bytes are those that one rank sends in one step, counted where collectives are called. With M
elements in all communication groups, padding included, ``reshard_after_forward=true`` has to send exactly what
PatrickStar section 7 says, on every rank, in every step:

    6 (p-1)/p M    2 for each of: gathering groups in forward, gathering them in backward, reducing gradients

beside 10 (p-1)/p M of a scheme that broadcasts each chunk from its owner and reduces to it. Activation checkpointing
adds nothing: a group is gathered once for recomputation and backward. ``false`` keeps groups from forward to backward
where there is room, and sends 4 (p-1)/p M if all of them stay.

The share of a step is the time inside of collectives, waiting for others included. It tells nothing of networks: these
processes share the cores and the memory of one machine.

Bandwidth is that of the package's gathers and reductions, for the groups that occurred, relative to plain
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` on the same buffers. The two take turns; a repeat lasts from
when the first process begins to when the last one ends; the ratio is the median of those of neighbouring repeats. The
reduction of the package also divides, and adds in fp32. The ratio has to be 0.9 at least.
"""

import datetime
import functools
import json
import os
import pathlib
import pickle
import statistics
import tempfile
import time
import warnings

import common
import torch
import torch.distributed as dist
import transformers

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.units import MIB, format_nbytes

LIMIT = 0.9
DTYPE = torch.bfloat16
LONGEST = datetime.timedelta(minutes=5)
TIMED = ("all_gather", "reduce_scatter", "exchange", "begin_broadcast", "all_reduce")
COUNTED = ("sent_nbytes", "all_gathers", "reduce_scatters", "messages", "recorded_steps", "diverged_steps")


class Stopwatch:
    """Adds up the time inside of collectives, and the bytes of short messages, which ``stats`` does not tell."""

    def __init__(self, collectives):
        self.seconds = 0.0
        self.message_nbytes = 0
        self._num_others = collectives.world_size - 1
        for name in TIMED:
            setattr(collectives, name, self._timed(getattr(collectives, name)))

    def _timed(self, method):
        @functools.wraps(method)
        def timed(*args, **kwargs):
            if method.__name__ == "exchange":
                self.message_nbytes += len(pickle.dumps(args[0])) * self._num_others
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


# In the processes that train


def work(rank, world_size, options, folder):
    """Trains in every way, then measures bandwidth; rank 0 writes what all of them saw."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # the plain collectives have newer names too
    address = f"file://{folder}/store{world_size}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=LONGEST)
    if dist.get_world_size() != world_size:
        raise RuntimeError(f"the process group has {dist.get_world_size()} members, not {world_size}")
    seen = {"cases": [], "bandwidth": []}
    numels = set()
    for checkpointing in (False, True):
        for reshard in (True, False):
            case = train(options, rank, world_size, reshard, checkpointing)
            numels |= set(case["group_numels"])
            seen["cases"].append(case)
    if world_size > 1 and not options.no_bandwidth:
        seen["bandwidth"] = [measure(options, rank, world_size, numel) for numel in sorted(numels)]
    everybody = [None] * world_size
    dist.all_gather_object(everybody, seen)
    if rank == 0:
        (pathlib.Path(folder) / f"{world_size}.json").write_text(json.dumps(everybody))
    dist.barrier()
    dist.destroy_process_group()


def train(options, rank, world_size, reshard, checkpointing):
    """Trains some steps; returns what each of the last ones sent, and how long it took."""
    model = common.make_gpt2(options.layers, options.hidden, options.vocabulary, options.length, tied=False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    numel = model.num_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {"dtype": "bf16", "autocast": False, "chunk_numel": options.chunk_numel, "reshard_after_forward": reshard}
    engine = PatrickStarEngine(model, config, optimizer, device="cpu")
    if engine.collectives.world_size != world_size:
        raise RuntimeError(f"the engine has {engine.collectives.world_size} processes, not {world_size}")
    watch = Stopwatch(engine.collectives)
    steps, losses = [], []
    for step in range(options.warmup + options.steps):
        batch = common.make_batch(step * world_size + rank, 1, options.length, options.vocabulary, engine.device)
        if world_size > 1:
            dist.barrier()  # what the step waits for shall be its own
        before = read(engine, watch)
        begin = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        losses.append(loss.item())
        after = read(engine, watch)
        steps.append({"seconds": seconds, **{key: after[key] - before[key] for key in after}})
    case = {
        "processes": world_size,
        "reshard_after_forward": reshard,
        "checkpointing": checkpointing,
        "parameters": numel,
        "padded": sum(chunk.spec.capacity_numel for chunk in engine.chunks),
        "group_numels": [chunk.spec.capacity_numel for chunk in engine.chunks],
        "recording": steps[: options.warmup],
        "steps": steps[options.warmup :],
        "losses": losses,
    }
    engine.detach()
    return case


def read(engine, watch):
    """The counters so far."""
    stats = engine.stats()
    inside = watch.seconds + stats["waiting_seconds"]  # for gathers that were started ahead
    counters = {key: stats[key] for key in COUNTED}
    return counters | {"message_nbytes": watch.message_nbytes, "collective_seconds": inside}


def measure(options, rank, world_size, numel):
    """Times gathers and reductions of one group, each beside a plain one; returns when this rank began and ended."""
    collectives = Collectives.connect(None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    source = torch.rand(numel, generator=generator).to(DTYPE)
    buffer = torch.empty(numel, dtype=DTYPE)
    own = buffer.view(world_size, -1)[rank]
    narrow, wide = collectives.staging_numel(numel // world_size, DTYPE)
    staging = torch.empty(narrow, dtype=DTYPE), torch.empty(wide)
    ways = {
        "all_gather": lambda: collectives.all_gather(buffer, "all_gather").wait(),
        "plain all_gather": lambda: dist.all_gather_into_tensor(buffer, own),
        "reduce_scatter": lambda: collectives.reduce_scatter(buffer, staging, "reduce_scatter").wait(),
        "plain reduce_scatter": lambda: dist.reduce_scatter_tensor(own, buffer),
    }
    found = {}
    for name, way in ways.items():
        buffer.copy_(source)
        way()
        found[name] = (buffer if "all_gather" in name else own).float()
    average = found["plain reduce_scatter"] / world_size
    if not torch.equal(found["all_gather"], found["plain all_gather"]):
        raise RuntimeError("all_gather differs from the plain one")
    if not torch.allclose(found["reduce_scatter"], average, rtol=2**-6):
        raise RuntimeError("reduce_scatter differs from the plain one")
    spans = {name: [] for name in ways}
    for repeat in range(options.warmup + options.repeats):
        # Each goes first half of the time.
        for name in list(ways) if repeat % 2 else reversed(ways):
            buffer.copy_(source)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(options.in_a_row):
                ways[name]()
            spans[name].append((begin, time.perf_counter()))
    collectives.close()
    return {"numel": numel, "spans": {name: list_[options.warmup :] for name, list_ in spans.items()}}


# In the process that starts them


def launch(world_size, options):
    """Runs the processes; returns what each of them saw, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world_size, options, folder), nprocs=world_size)
        return json.loads((pathlib.Path(folder) / f"{world_size}.json").read_text())


def summarize(cases, problems):
    """One row about a case that all ranks have seen, which has to be the same for all of them, in all steps."""
    first = cases[0]
    p, padded = first["processes"], first["padded"]
    where = f"p = {p}, reshard_after_forward={first['reshard_after_forward']}, checkpointing={first['checkpointing']}"
    steps = [step for case in cases for step in case["steps"]]
    counts = {key: sorted({step[key] for step in steps}) for key in (*COUNTED, "message_nbytes")}
    row = {key: first[key] for key in ("processes", "reshard_after_forward", "checkpointing", "parameters", "padded")}
    for key, values in counts.items():
        row[key] = values[0]
        if len(values) > 1:
            problems.append(f"{where}: {key} differs between ranks or steps: {values}")
    if row["recorded_steps"] or row["diverged_steps"]:
        problems.append(f"{where}: steps were recorded or lost while they were measured")
    if any(value != value for case in cases for value in case["losses"]):
        problems.append(f"{where}: a loss is not a number")
    unit = (p - 1) * padded // p
    row |= {"expected_nbytes": 6 * unit, "broadcast_nbytes": 10 * unit}
    row["factor"] = row["sent_nbytes"] / unit if unit else None
    row["factor_unpadded"] = row["sent_nbytes"] / ((p - 1) * first["parameters"] / p) if unit else None
    row["recording_nbytes"] = [step["sent_nbytes"] for step in first["recording"]]
    if first["reshard_after_forward"] and row["sent_nbytes"] != row["expected_nbytes"]:
        problems.append(f"{where}: {row['sent_nbytes']} bytes were sent, not 6 (p-1)/p M = {row['expected_nbytes']}")
    if row["sent_nbytes"] > row["expected_nbytes"]:
        problems.append(f"{where}: {row['sent_nbytes']} bytes are more than 6 (p-1)/p M = {row['expected_nbytes']}")
    numels = first["group_numels"]
    row |= {"groups": len(numels), "group_numels": sorted(set(numels)), "utilisation": first["parameters"] / padded}
    row["seconds"] = statistics.median(step["seconds"] for step in steps)
    row["collective_share"] = statistics.median(step["collective_seconds"] / step["seconds"] for step in steps)
    return row


def compare(seen, world_size, in_a_row):
    """Bandwidth of one group size, as all ranks have seen it."""
    nbytes = seen[0]["numel"] * DTYPE.itemsize
    seconds = {}
    for name in seen[0]["spans"]:
        repeats = zip(*(rank["spans"][name] for rank in seen), strict=True)
        # The clocks of all processes of one machine agree.
        whole = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in repeats]
        seconds[name] = [span / in_a_row for span in whole]
    rows = []
    for name in ("all_gather", "reduce_scatter"):
        pairs = zip(seconds[name], seconds[f"plain {name}"], strict=True)
        ratios = sorted(plain / ours for ours, plain in pairs)
        rows.append({"processes": world_size, "collective": name, "nbytes": nbytes, "seconds": {}})
        for kind, key in (("ours", name), ("plain", f"plain {name}")):
            rows[-1]["seconds"][kind] = statistics.median(seconds[key])
        rows[-1] |= {"ratio": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)[::2]}
    return rows


def print_bytes(rows):
    """The table of what was sent."""
    first = rows[0]
    print(
        f"{first['parameters'] / 1e6:.1f} M parameters, bf16, A = 1; bytes, collectives and messages per rank and step"
    )
    print("M has the padding of groups, N has not; f is (p-1)/p")
    widths = (3, 9, 15, 8, 11, 8, 13, 6, 8, 13, 9, 9, 10, 11, 8, 16)
    head = ("p", "reshard", "checkpointing", "groups", "M", "used", "sent", "/ f M", "/ f N", "10 f M")
    head += ("gathers", "reduces", "messages", "of", "s/step", "in collectives")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    for row in rows:
        cells = [row["processes"], str(row["reshard_after_forward"]).lower(), "yes" if row["checkpointing"] else "no"]
        cells += [row["groups"], f"{row['padded'] / 1e6:.2f} M", f"{row['utilisation']:.1%}"]
        cells += [format_nbytes(row["sent_nbytes"]), "-", "-", format_nbytes(row["broadcast_nbytes"])]
        if row["factor"] is not None:
            cells[-3:-1] = f"{row['factor']:g}", f"{row['factor_unpadded']:.3f}"
        cells += [row["all_gathers"], row["reduce_scatters"], row["messages"], format_nbytes(row["message_nbytes"])]
        cells += [f"{row['seconds']:.3f}", f"{row['collective_share']:.0%}"]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def print_bandwidth(rows, options):
    """The table of how fast."""
    per_collective = f"{options.in_a_row} in a row, {options.repeats} repeats"
    print(f"GiB/s of the whole buffer, {per_collective}; the ratio with its quartiles")
    widths = (3, 16, 12, 9, 9, 9, 18)
    head = ("p", "", "buffer", "ours", "plain", "ratio", "quartiles")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    for row in rows:
        speeds = [row["nbytes"] / row["seconds"][kind] / 1024 / MIB for kind in ("ours", "plain")]
        cells = [row["processes"], row["collective"], format_nbytes(row["nbytes"])]
        cells += [f"{speed:.2f}" for speed in speeds]
        cells += [f"{row['ratio']:.2f}", " - ".join(f"{quartile:.2f}" for quartile in row["quartiles"])]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def main():
    """Measures and prints; fails if a promise did not hold."""
    parser = common.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=448)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--chunk_numel", default="auto")
    parser.add_argument("--warmup", type=int, default=3, help="steps and repeats before those that are measured")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=31, help="of each collective, for the bandwidth")
    parser.add_argument("--in_a_row", type=int, default=4, help="collectives of a repeat")
    parser.add_argument("--no_bandwidth", action="store_true", help="bytes and counts only")
    parser.add_argument("--quick", action="store_true", help="a tiny model: bandwidth is shown and asks for nothing")
    options = parser.parse_args()
    if options.device != "cpu":
        raise SystemExit(f"bench_communication: --device is {options.device}; processes talk over gloo, leave it out")
    if options.warmup < 2 or options.steps < 1 or options.repeats < 2:
        raise SystemExit("bench_communication: --warmup and --repeats have to be at least 2, --steps 1")
    if options.quick:
        options.layers, options.hidden, options.vocabulary, options.length = 2, 64, 128, 32
        options.warmup, options.steps, options.repeats, options.chunk_numel = 2, 2, 5, 2**14
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    torch.set_num_threads(1)  # as they have it, for the record
    rows, speeds, problems = [], [], []
    for world_size in options.processes:
        seen = launch(world_size, options)
        rows += [summarize(cases, problems) for cases in zip(*(rank["cases"] for rank in seen), strict=True)]
        for sizes in zip(*(rank["bandwidth"] for rank in seen), strict=True):
            speeds += compare(sizes, world_size, options.in_a_row)
        if any(case["losses"] != rank["cases"][0]["losses"] for rank in seen for case in rank["cases"]):
            problems.append(f"p = {world_size}: losses differ between ways to train")
    print_bytes(rows)
    if speeds:
        print_bandwidth(speeds, options)
    for row in speeds:
        if row["ratio"] < LIMIT and not options.quick:
            problems.append(
                f"p = {row['processes']}: {row['collective']} of {format_nbytes(row['nbytes'])} reaches "
                f"{row['ratio']:.2f} of the plain one"
            )
    keys = ("warmup", "steps", "repeats", "in_a_row")
    result = {key: getattr(options, key) for key in keys} | {"rows": rows, "bandwidth": speeds, "problems": problems}
    common.finish("bench_communication", options, result)
    if problems:
        raise SystemExit("bench_communication: " + "; ".join(problems))
    print("reshard_after_forward=true sends 6 (p-1)/p M bytes, exactly, on every rank; the same losses either way: yes")


if __name__ == "__main__":
    main()
