"""Checkpoints against torch.save and safetensors: save and load time, and the memory that they take, per process.

A GPT-2 is trained for two steps, so that every page of every list has been touched, and then, in processes of their
own that take turns, the same weights and optimizer states are saved and loaded by

    plain         one file written and read in order, of the same number of bytes: what the disk can do
    torch         torch.save, and torch.load with load_state_dict
    safetensors   save_file, and load_file with a copy to where the values belong
    patrickstar   engine.save_checkpoint and engine.load_checkpoint
    pieces        the same with optimizer_format="sharded", which several processes have anyway
    background    the same with background_save

Every way ends with all bytes on the disk (fsync). Each is measured next to a plain one, which goes first half of the
time; ratios are medians of those of neighbours. Page caches cannot be dropped without root: before anything is read,
the system is told that the pages of its files are not needed (posix_fadvise), which it follows for pages on the disk.
What was loaded is compared: the two steps after a save, repeated after loading, must have the same losses to the bit.

Extra memory is the peak during an operation less what was there before, as the kernel counts resident pages (VmHWM,
reset before) and as a thread samples private ones (RssAnon, every few ms, in rounds whose times are not used); the
larger of the two, of all rounds but the first, is reported and checked. A chunk is here ``chunk_numel`` elements of the
narrowest list: 4 bytes each in fp32, 2 in bf16.

Limits: saving reaches 80 % of the plain speed (of one process; that of several, whose messages and copies share the
cores with the plain one's copy to the page cache, is reported), and takes 2 chunks; loading takes 1 chunk and the
largest tensor, and so does making an engine from deferred weights, over the memory that the engine has in the end.
4 MiB are allowed on top for what the allocator, Python and the sampling thread do meanwhile.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import pathlib
import shutil
import statistics
import tempfile
import threading
import time
import traceback

import common
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers

import hf_patrickstar
from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.units import MIB, format_nbytes

SPEED_LIMIT = 0.8
SLACK = 4 * MIB
SLICE = 64 * MIB
SAMPLE_S = 0.003
BATCH_SIZE, LENGTH = 1, 32
ALONE = ("torch", "safetensors", "pieces", "patrickstar", "background")
TOGETHER = ("patrickstar", "background")  # several processes have pieces anyway
MAKING = ("pretrained", "deferred")


# In the processes that save and load


class Watch:
    """Seconds and extra memory of what is done inside.

    Args:
        is_sampled: Also sample private memory.
    """

    def __init__(self, is_sampled):
        self._is_sampled = is_sampled
        self._stop = threading.Event()
        self._peak = 0

    def __enter__(self):
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would hide what is taken now
        self._sampler = threading.Thread(target=self._sample)
        if self._is_sampled:
            self._sampler.start()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        if dist.is_initialized():
            dist.barrier()
        self._before = memory()
        self.begin = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.end = time.perf_counter()
        after = memory()
        if self._is_sampled:
            self._stop.set()
            self._sampler.join()
        self.found = {
            "span": (self.begin, self.end),
            "resident": after["VmHWM"] - self._before["VmRSS"],
            "private": max(self._peak - self._before["RssAnon"], 0) if self._is_sampled else None,
            "over_final": max(after["VmHWM"] - after["VmRSS"], self._peak - after["RssAnon"]),
            "grown": after["RssAnon"] - self._before["RssAnon"],
        }

    def _sample(self):
        while not self._stop.wait(SAMPLE_S):
            self._peak = max(self._peak, memory()["RssAnon"])


def memory():
    """What the kernel says about this process, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


class Plain:
    """One file, written and read in order, from and to memory as large as it is."""

    def __init__(self, options, rank):
        nbytes = options.nbytes
        self._buffer = memoryview(torch.randint(0, 2**62, (nbytes // 8 + 1,)).numpy()).cast("B")[:nbytes]

    def save(self, path):
        """Writes it, to the disk."""
        with open(path, "wb", buffering=0) as file:
            self._move(file.write)
            os.fsync(file.fileno())

    def load(self, path):
        """Reads it."""
        with open(path, "rb", buffering=0) as file:
            self._move(file.readinto)

    def _move(self, function):
        place = 0
        while place < len(self._buffer):
            place += function(self._buffer[place : place + SLICE])

    def step(self, number):
        """Nothing is trained."""


class Torch:
    """torch.save of what a loop of plain torch has; in 16-bit it has fp32 masters."""

    def __init__(self, options, rank):
        self._options = options
        self.model = make_model(options)
        self._parameters = list(self.model.parameters())
        self.masters = self._parameters
        if options.dtype != "fp32":
            self.masters = [parameter.detach().float().requires_grad_() for parameter in self._parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)

    def step(self, number):
        """One step; returns its loss."""
        loss = self.model(**make_batch(self._options, number, 0)).loss
        loss.backward()
        if self.masters is not self._parameters:
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self.masters)
        return loss.item()

    def save(self, path):
        """Writes it, to the disk."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.masters is not self._parameters:
            state["masters"] = self.masters
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path):
        """Reads it and takes it over."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for master, saved in zip(self.masters, state.get("masters", ()), strict="masters" in state):
                master.copy_(saved)


class Safetensors(Torch):
    """The same tensors with the library safetensors."""

    def _tensors(self):
        tensors = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for number, master in enumerate(self.masters):
            tensors |= {f"{key}/{number}": value for key, value in self.optimizer.state[master].items()}
            if self.masters is not self._parameters:
                tensors[f"master/{number}"] = master.detach()
        return tensors

    def save(self, path):
        """Writes it, to the disk."""
        safetensors.torch.save_file(self._tensors(), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def load(self, path):
        """Reads it and copies it to where it belongs."""
        found = safetensors.torch.load_file(path)
        for name, tensor in self._tensors().items():
            tensor.copy_(found[name])


class PatrickStar:
    """This package."""

    in_background = False
    form = "auto"

    def __init__(self, options, rank):
        self._options, self._rank = options, rank
        self.model = make_model(options)
        self.engine = make_engine(self.model, options, background_save=self.in_background, optimizer_format=self.form)

    def step(self, number):
        """One step; returns its loss."""
        loss = self.model(**make_batch(self._options, number, self._rank)).loss
        loss.backward()
        self.engine.optimizer.step()
        self.model.zero_grad()
        return loss.item()

    def save(self, path):
        """Writes it, to the disk; in the background, begins to."""
        self.engine.save_checkpoint(path)

    def load(self, path):
        """Reads it and takes it over."""
        self.engine.load_checkpoint(path)

    def wait(self):
        """Waits until it is on the disk."""
        self.engine.checkpoints.wait()


class Pieces(PatrickStar):
    """This package, with states in pieces."""

    form = "sharded"


class Background(PatrickStar):
    """This package, which goes on to train."""

    in_background = True


WAYS = {
    "plain": Plain,
    "torch": Torch,
    "safetensors": Safetensors,
    "patrickstar": PatrickStar,
    "pieces": Pieces,
    "background": Background,
}


class Worker:
    """What a process does when it is told to."""

    def __init__(self, way, options, rank):
        self._options, self._rank = options, rank
        self._is_background = way == "background"
        self._way = WAYS[way](options, rank) if way in WAYS else None
        self._steps = itertools.count()
        if self._way is not None:
            self._train(2)

    def _train(self, num):
        return [self._way.step(next(self._steps)) for _ in range(num)]

    def save(self, path, is_sampled):
        """Saves, and trains two steps from there."""
        with Watch(is_sampled) as watch:
            self._way.save(path)
            if self._is_background:
                held = time.perf_counter() - watch.begin
                first = time.perf_counter()
                losses = self._train(1)
                next_step = time.perf_counter() - first
                self._way.wait()
        found = watch.found
        if self._is_background:
            found |= {"held": held, "next_step": next_step, "losses": losses + self._train(1)}
        else:
            found["losses"] = self._train(2)
        return found

    def load(self, path, is_sampled):
        """Loads, and trains the same two steps again."""
        with Watch(is_sampled) as watch:
            self._way.load(path)
        self._steps = itertools.count(next(self._steps) - 2)
        return watch.found | {"losses": self._train(2)}

    def step(self):
        """Times an ordinary step, whose like the one after a save is."""
        begin = time.perf_counter()
        self._train(1)
        return time.perf_counter() - begin

    def quiet_step(self, is_sampled):
        """Measures the memory of an ordinary step, which the one inside of a save in the background is compared to."""
        with Watch(is_sampled) as watch:
            self._train(1)
        return watch.found

    def make(self, is_deferred, tiny, folder):
        """Makes an engine from a saved model; a tiny one before, so that everything is imported."""
        load = transformers.GPT2LMHeadModel.from_pretrained
        for path in (tiny, folder):
            engine = None
            with Watch(True) as watch:
                with hf_patrickstar.deferred_weights(enabled=is_deferred):
                    model = load(path, dtype=common.DTYPES[self._options.dtype]).train()
                engine = make_engine(model, self._options)
        batch = make_batch(self._options, 0, 0)
        return watch.found | {"losses": [engine.model(**batch).loss.item()]}


def make_model(options):
    """The model, in the type that it is saved in."""
    model = common.make_gpt2(options.layers, options.hidden, options.vocabulary, LENGTH)
    return model.to(common.DTYPES[options.dtype])


def make_batch(options, number, rank):
    """The same for the same step, another one on each rank."""
    return common.make_batch(number * 97 + rank, BATCH_SIZE, LENGTH, options.vocabulary, torch.device("cpu"))


def make_engine(model, options, **settings):
    """An engine with the chunks that memory is counted in."""
    config = {"dtype": options.dtype, "chunk_numel": options.chunk_numel, **settings}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return PatrickStarEngine(model, config, optimizer, device="cpu")


def serve(rank, world_size, way, options, folder, connection):
    """Does what comes over the connection until it ends."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    worker = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            worker = Worker(*args, rank) if name == "begin" else worker
            answer = None if name == "begin" else getattr(worker, name)(*args)
            connection.send((answer, None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
    os._exit(0)  # not over the goodbyes of a group whose members leave in any order


# In the process that starts them


class Team:
    """Processes that save and load in one way, together.

    Args:
        way: Which.
        world_size: How many.
        options: Those of the command line.
    """

    def __init__(self, way, world_size, options):
        # All are forked from one process that has imported what takes long.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.gpt2.modeling_gpt2", "hf_patrickstar"])
        self._folder = tempfile.TemporaryDirectory()
        self._connections, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, way, options, self._folder.name, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.call("begin", way, options)

    def call(self, name, *args):
        """Has all of them do something; returns what each says, by rank."""
        for connection in self._connections:
            connection.send((name, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                answer, error = connection.recv()
            except EOFError:
                answer, error = None, "it died"
            if error is not None:
                self.close()
                raise SystemExit(f"bench_checkpoint: {name} failed on rank {rank}: {error}")
            answers.append(answer)
        return answers

    def close(self):
        """Ends them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


def seconds_of(answers):
    """From when the first process began to when the last one ended; the clocks of one machine agree."""
    return max(answer["span"][1] for answer in answers) - min(answer["span"][0] for answer in answers)


def forget_pages(path):
    """Asks the system to forget what it has in memory of a file, or of all in a directory."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def size_of(path):
    """Bytes of a file, or of all in a directory."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def remove(path):
    """Deletes a file or a directory, and waits until the disk knows; os.sync would wait for everybody's files."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(world_size, options, folder):
    """Runs all ways in turns; returns what was seen, by way and operation, round by round."""
    ways = ALONE if world_size == 1 else TOGETHER
    plain = Team("plain", 1, options)
    teams = {way: Team(way, world_size, options) for way in ways}
    seen = {way: {"save": [], "load": [], "step": []} for way in ways}
    for number in range(1 + options.repeats + options.memory_repeats):
        kind = "first" if not number else ("timed" if number <= options.repeats else "sampled")
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            path, beside = folder / way, folder / "plain"
            losses = []
            if way == "background":
                steps = [teams[way].call("step") for _ in range(2)]
                quiet = teams[way].call("quiet_step", kind == "sampled")
                seen[way]["step"].append({"kind": kind, "seconds": max(steps[-1]), "ranks": quiet})
            for operation in ("save", "load"):
                pair = [(teams[way], path, way), (plain, beside, "plain")]
                row = {"kind": kind}
                for team, place, name in pair if number % 2 else reversed(pair):
                    if operation == "save":
                        remove(place)
                    else:
                        forget_pages(place)
                    answers = team.call(operation, place, kind == "sampled")
                    row[name] = {"seconds": seconds_of(answers), "nbytes": size_of(place), "ranks": answers}
                seen[way][operation].append(row)
                losses.append([answer["losses"] for answer in row[way]["ranks"]])
            if losses[0] != losses[1]:
                raise SystemExit(f"bench_checkpoint: {way} loaded other values than it saved: {losses}")
            remove(path)
            remove(beside)
    for team in (plain, *teams.values()):
        team.close()
    return seen


def measure_making(world_size, options, folder):
    """Makes engines from saved models, each in processes of its own; returns what was seen, by way."""
    seen = {way: [] for way in MAKING}
    for number in range(options.repeats):
        for way in MAKING if number % 2 else MAKING[::-1]:
            forget_pages(folder / "whole")
            team = Team(way, world_size, options)
            answers = team.call("make", way == "deferred", folder / "tiny", folder / "whole")
            team.close()
            seen[way].append({"seconds": seconds_of(answers), "ranks": answers})
    losses = {repr([answer["losses"] for answer in row["ranks"]]) for rows in seen.values() for row in rows}
    if len(losses) > 1:
        raise SystemExit(f"bench_checkpoint: deferred weights are others: {losses}")
    return seen


def median_of(values):
    """The median and the quartiles."""
    values = list(values)
    return {"median": statistics.median(values), "quartiles": statistics.quantiles(values, n=4)[::2]}


def extra(rows, way, key):
    """The most extra memory of every rank, all rounds but the first."""
    ranks = zip(*(row[way]["ranks"] for row in rows if row["kind"] != "first"), strict=True)
    return [max(answer[key] for answer in rank if answer[key] is not None) for rank in ranks]


def summarize(seen, world_size):
    """Rows of the table: per way and operation medians, ratios to plain ones, memory per rank."""
    rows = []
    for operation in ("save", "load"):
        for way, found in seen.items():
            timed = [row for row in found[operation] if row["kind"] == "timed"]
            speeds = [(row[way]["nbytes"] / row[way]["seconds"], row["plain"]) for row in timed]
            row = {"processes": world_size, "operation": operation, "way": way, "nbytes": timed[0][way]["nbytes"]}
            row["seconds"] = median_of(row[way]["seconds"] for row in timed)
            row["plain_seconds"] = median_of(row["plain"]["seconds"] for row in timed)
            row["ratio"] = median_of(speed * plain["seconds"] / plain["nbytes"] for speed, plain in speeds)
            for key in ("resident", "private"):
                row[key] = extra(found[operation], way, key)
            row["extra"] = [max(pair) for pair in zip(row["resident"], row["private"], strict=True)]
            if way == "background" and operation == "save":
                # The step that is inside takes its own memory, before or after the peak of the writer.
                steps = [[max(rank["resident"], rank["private"] or 0) for rank in r["ranks"]] for r in found["step"]]
                row["step_extra"] = [max(rank) for rank in zip(*steps, strict=True)]
                for key in ("held", "next_step"):
                    row[key] = median_of(max(rank[key] for rank in r[way]["ranks"]) for r in timed)
                row["ordinary_step"] = median_of(r["seconds"] for r in found["step"] if r["kind"] == "timed")
            rows.append(row)
    return rows


def summarize_making(seen, world_size):
    """Rows of the second table."""
    rows = []
    for way, found in seen.items():
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(found, seen[MAKING[0]], strict=True)]
        rows.append({"processes": world_size, "way": way, "seconds": median_of(row["seconds"] for row in found)})
        rows[-1]["ratio"] = median_of(ratios)
        for key in ("over_final", "grown"):
            ranks = zip(*(row["ranks"] for row in found), strict=True)
            rows[-1][key] = [max(answer[key] for answer in rank) for rank in ranks]
    return rows


def check(rows, making, options):
    """What is over a limit."""
    chunk, largest = options.chunk_nbytes, options.largest_nbytes
    limits = {"save": 2 * chunk + SLACK, "load": chunk + largest + SLACK}
    problems = []
    for row in rows:
        where = f"p = {row['processes']}: {row['way']}, {row['operation']}"
        if row["way"] in ("patrickstar", "pieces", "background"):
            allowed = limits[row["operation"]] + max(row.get("step_extra", [0]))
            if max(row["extra"]) > allowed:
                problems.append(f"{where} takes {format_nbytes(max(row['extra']))}, not {format_nbytes(allowed)}")
        ratio = row["ratio"]["median"]
        is_checked = row["way"] == "patrickstar" and row["operation"] == "save" and row["processes"] == 1
        if is_checked and ratio < SPEED_LIMIT:
            problems.append(f"{where} reaches {ratio:.2f} of the speed of a plain write")
    for row in making:
        if row["way"] == "deferred" and max(row["over_final"]) > limits["load"]:
            over, allowed = format_nbytes(max(row["over_final"])), format_nbytes(limits["load"])
            problems.append(f"p = {row['processes']}: deferred weights take {over} over what remains, not {allowed}")
    return problems


def print_rows(rows, options):
    """The table of saving and loading."""
    widths = (3, 7, 13, 11, 9, 9, 8, 16, 24, 12)
    head = ("p", "", "", "bytes", "seconds", "plain", "speed", "quartiles", "extra memory by rank", "in chunks")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    for row in rows:
        cells = [row["processes"], row["operation"], row["way"], format_nbytes(row["nbytes"])]
        cells += [f"{row[key]['median']:.3f}" for key in ("seconds", "plain_seconds")]
        cells += [f"{row['ratio']['median']:.2f}", " - ".join(f"{q:.2f}" for q in row["ratio"]["quartiles"])]
        cells += [", ".join(map(format_nbytes, row["extra"]))]
        cells += [f"{max(row['extra']) / options.chunk_nbytes:.2f}"]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)
    for row in rows:
        if "held" in row:
            print(
                f"p = {row['processes']}, in the background: training is held up for {row['held']['median']:.3f} s; "
                f"the next step takes {row['next_step']['median']:.3f} s, others {row['ordinary_step']['median']:.3f} "
                f"s and {', '.join(map(format_nbytes, row['step_extra']))}, which is in the memory above"
            )


def print_making(rows):
    """The table of engines made from saved models."""
    widths = (3, 13, 9, 9, 24, 24)
    head = ("p", "weights", "seconds", "ratio", "peak over final", "final")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    for row in rows:
        cells = [row["processes"], row["way"], f"{row['seconds']['median']:.3f}", f"{row['ratio']['median']:.2f}"]
        cells += [", ".join(map(format_nbytes, row[key])) for key in ("over_final", "grown")]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def describe(options, folder):
    """Sizes that everything else is compared with; also saves what engines are made from."""
    model = make_model(options)
    model.save_pretrained(folder / "whole")
    common.make_gpt2(1, 64, 64, LENGTH).save_pretrained(folder / "tiny")
    itemsize = common.DTYPES[options.dtype].itemsize
    options.parameters = model.num_parameters()
    options.nbytes = options.parameters * (itemsize + (8 if options.dtype == "fp32" else 12))
    options.chunk_nbytes = options.chunk_numel * itemsize
    options.largest_nbytes = max(parameter.numel() for parameter in model.parameters()) * itemsize
    mounts = [line.split()[1:3] for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.is_relative_to(mount[0])]
    return max(inside, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def main():
    """Measures and prints; fails if a limit does not hold."""
    parser = common.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--chunk_numel", type=int, default=2**21)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of which times are used")
    parser.add_argument("--memory_repeats", type=int, default=2, help="rounds in which private memory is sampled")
    parser.add_argument("--folder", help="a directory on the disk to measure; by default the system's for such things")
    options = parser.parse_args()
    if options.device != "cpu":
        raise SystemExit(f"bench_checkpoint: --device is {options.device}; it measures the disk and host memory")
    if options.repeats < 2 or options.memory_repeats < 1:
        raise SystemExit("bench_checkpoint: --repeats has to be at least 2, --memory_repeats 1")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    torch.set_num_threads(1)  # as they have it, for the record
    rows, making = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name).resolve()
        filesystem = describe(options, folder)
        if filesystem in ("tmpfs", "ramfs"):
            raise SystemExit(f"bench_checkpoint: {folder} is in memory; give a --folder on a disk")
        print(
            f"{options.parameters / 1e6:.1f} M parameters, {options.dtype}, {filesystem}; a chunk is "
            f"{format_nbytes(options.chunk_nbytes)}, the largest tensor {format_nbytes(options.largest_nbytes)}"
        )
        for world_size in options.processes:
            found = summarize(measure(world_size, options, folder), world_size)
            print_rows(found, options)
            rows += found
            made = summarize_making(measure_making(world_size, options, folder), world_size)
            print_making(made)
            making += made
    problems = check(rows, making, options)
    keys = ("dtype", "parameters", "chunk_numel", "chunk_nbytes", "largest_nbytes", "repeats", "memory_repeats")
    result = {key: getattr(options, key) for key in keys} | {"filesystem": filesystem, "slack_nbytes": SLACK}
    common.finish(
        f"bench_checkpoint_{options.dtype}",
        options,
        result | {"rows": rows, "making": making, "problems": problems},
    )
    if problems:
        raise SystemExit("bench_checkpoint: " + "; ".join(problems))
    print("saving at 80 % of a plain write and in 2 chunks, loading in a chunk and a tensor, the same values: yes")


if __name__ == "__main__":
    main()
