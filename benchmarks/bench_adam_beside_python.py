"""How much slower Python becomes while workers update chunks on the host: whether they hold the interpreter's lock.

A thread calls an operator on eight elements again and again, as one that launches the kernels of a forward does. Beside
it workers do nothing; or add to a buffer, each share with one operator and for as long as an update takes, with hardly
any Python; or update chunks as ``optimizer.step()`` has them updated. The three take turns, so that what other programs
do meets all of them. ``slower`` is how much longer a call takes beside updates than beside additions, and so leaves out
that cores are shared; the median of all rounds. With more workers than cores it tells of the lock alone. ``waiting`` is
the part of the time of an update, from the first share to the last, in which workers have no share.

Updates run in one call for each share of a chunk, and for comparison as torch's Adam called from Python, tile by tile.

    python benchmarks/bench_adam_beside_python.py [--numel 67108864] [--workers 1 4 16] [--rounds 15]
"""

import contextlib
import statistics
import threading
import time
from unittest import mock

import common
import torch
from bench_adam import NBYTES, TENSOR_NUMEL, Weights

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.optim.elementwise import SHARE_NUMEL, ElementwiseKernel
from hf_patrickstar.optim.workers import HostWorkers

WINDOW_S = 0.4
WAYS = {"one call": None, "from Python": lambda: None}


class Updates:
    """The updates of an engine's chunks.

    Args:
        gradients: The gradient of each parameter.
        workers: How many threads compute them.
        script: What stands in for ``adam_script``; ``None`` for that itself.
    """

    def __init__(self, gradients, workers, script):
        model = Weights(gradients)
        config = {"dtype": "bf16", "autocast": False, "host_threads": workers}
        self.engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), fused=True), device="cpu")
        model().backward()
        optimizer, chunks = self.engine.optimizer, self.engine.chunks
        place = "hf_patrickstar.optim.adam_kernel.adam_script"
        with mock.patch(place, script) if script else contextlib.nullcontext():
            self._updates = optimizer.kernel.prepare(chunks, optimizer.group_numbers, {})
        self._workers = workers

    def __call__(self):
        """Updates all chunks once."""
        for ticket in [update.run() for update in self._updates]:
            if ticket is not None:
                ticket.wait()

    def waiting(self):
        """The part of the time of an update in which workers have no share, while Python does nothing else."""
        spans, update_share = [], ElementwiseKernel._update_share

        def timed(*args):
            begin = time.perf_counter()
            update_share(*args)
            spans.append((begin, time.perf_counter()))

        with mock.patch.object(ElementwiseKernel, "_update_share", timed):
            self()
        begins, ends = zip(*spans, strict=True)
        busy = sum(ends) - sum(begins)
        return 1 - busy / (self._workers * (max(ends) - min(begins)))


class Additions:
    """In-place additions that keep the workers as busy as an update does, with hardly any Python.

    Args:
        numel: How many parameters the updates have.
        workers: How many threads compute them.
    """

    def __init__(self, numel, workers):
        self._parts = list(torch.zeros(numel * NBYTES // 8).chunk(max(workers, numel // SHARE_NUMEL)))
        self._workers = HostWorkers(workers)

    def __call__(self):
        """Adds to every part, as often as ``last_as_long_as`` has found."""
        self._workers.submit(lambda part: part.add_(1), self._parts).wait()

    def last_as_long_as(self, update):
        """Repeats parts until all take as long as an update: workers that end sooner would leave cores to Python."""
        seconds = {work: min(seconds_of(work) for _ in range(3)) for work in (self, update)}
        self._parts *= max(round(seconds[update] / seconds[self]), 1)


def seconds_of(work):
    """The seconds that a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def calls_per_second(work, stands):
    """How often a second a tiny operator is called while another thread repeats some work; and how often that is done.

    Args:
        work: What the other thread does, if anything.
        stands: The numbers that the operator changes.
    """
    ends, num_works = threading.Event(), 0

    def repeat():
        nonlocal num_works
        while not ends.is_set():
            work()
            num_works += 1

    thread = threading.Thread(target=repeat)
    if work is not None:
        work()
        thread.start()
    num, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < WINDOW_S:
        for _ in range(100):
            stands.add_(1)
        num += 100
    seconds = time.perf_counter() - begin
    ends.set()
    if work is not None:
        thread.join()
    return num / seconds, num_works / seconds


def measure(gradients, workers, rounds):
    """The rows of a number of workers."""
    numel, stands = sum(gradient.numel() for gradient in gradients), torch.zeros(8)
    additions = Additions(numel, workers)
    updates = {way: Updates(gradients, workers, script) for way, script in WAYS.items()}
    additions.last_as_long_as(updates["one call"])
    samples, waits = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for number in range(rounds + 1):
        alone, _ = calls_per_second(None, stands)
        for way, update in updates.items():
            waits[way].append(update.waiting())
            order = [additions, update] if number % 2 else [update, additions]
            found = {work: calls_per_second(work, stands) for work in order}
            if number:
                samples[way].append((alone, found[additions][0], *found[update]))
    rows = []
    for way, found in samples.items():
        alone, beside_additions, beside_updates, _ = (statistics.median(column) for column in zip(*found, strict=True))
        row = {"way": way, "workers": workers, "alone_us": 1e6 / alone, "beside_additions_us": 1e6 / beside_additions}
        row |= {
            "beside_updates_us": 1e6 / beside_updates,
            "slower": statistics.median(additions / updates for _, additions, updates, _ in found) - 1,
            "waiting": statistics.median(waits[way][1:]),
            "spread": [min(a / u for _, a, u, _ in found) - 1, max(a / u for _, a, u, _ in found) - 1],
        }
        rows.append(row)
    for update in updates.values():
        update.engine.detach()
    return rows


def main():
    """Prints a row for each way and number of workers."""
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**26)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, help="fail if Python is slower by more than this beside one call")
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_num_threads(1)
    num = -(-options.numel // TENSOR_NUMEL)
    gradients = [torch.full((TENSOR_NUMEL,), 0.01, dtype=torch.bfloat16) for _ in range(num)]
    print(
        f"{'updates':14s}{'workers':>8s}{'alone':>10s}{'additions':>11s}{'updates':>10s}{'waiting':>9s}{'slower':>9s}"
        "  of all rounds"
    )
    rows = []
    for workers in options.workers:
        for row in measure(gradients, workers, options.rounds):
            rows.append(row)
            least, most = row["spread"]
            times = f"{row['alone_us']:8.2f}us{row['beside_additions_us']:9.2f}us{row['beside_updates_us']:8.2f}us"
            parts = f"{row['waiting']:9.1%}{row['slower']:9.1%}"
            print(f"{row['way']:14s}{workers:8d}{times}{parts}  {least:.1%} to {most:.1%}", flush=True)
    result = {"parameters": num * TENSOR_NUMEL, "rounds": options.rounds, "rows": rows}
    common.finish("bench_adam_beside_python", options, result)
    worst = max(row["slower"] for row in rows if row["way"] == "one call")
    if options.limit is not None and worst > options.limit:
        raise SystemExit(f"bench_adam_beside_python: {worst:.1%} is above the limit of {options.limit:.1%}")


if __name__ == "__main__":
    main()
