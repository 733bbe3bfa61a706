"""Seconds from a checkpoint on the disk to the end of the first step: loading, the engine, forward, backward, update.

A Llama-like model with random 16-bit weights is written to safetensors files once. Every measurement is a process of
its own, and they take turns: each way of loading (``deferred_weights``, or weights in memory first) with each number of
threads, of torch and of the engine's workers alike. ``--before DIR`` measures another checkout of this project, too.

The yardstick is what no engine can do without, done with numpy in as many threads: every byte of the files is read once
(2 per parameter), and every byte of model data is written once to fresh memory (14 per parameter: value, master and two
states). Printed are medians and the median ratio of the engine's construction to the yardstick of its own round. The
files are in the page cache. ``first_step_s`` is from the engine to the end of the first step; with ``--device_budget``
chunks move home in it (``moves``). Before the clock starts each process touches as much memory as it will need and
gives it back, since a virtual machine gets memory from its host when it is touched for the first time. Chunks must have
the same bits in all processes after the step; ``peak`` is the most memory of a process over its yardstick's 14 bytes
per parameter.

The last line is simulated: the same for a model that does not fit this machine, as ``hf-patrickstar plan`` says it.

    python benchmarks/bench_construction.py [--threads 1 2] [--rounds 5] [--before DIR] [--simulate 8b]
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import common
import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WAYS = ("deferred", "memory")
VOCABULARY, TOKENS = 32_000, 16
READ_NBYTES, WRITTEN_NBYTES, TOUCHED_NBYTES = 2, 14, 18
"""Per parameter: the files, the chunks, and all that a process takes until the first step has ended."""
PIECE_NBYTES = 2**22


def make_config(num_layers):
    """A Llama-like model: 51.4 M parameters in a layer, and 131 M in embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        max_position_embeddings=512,
        use_cache=False,
    )


def write_model(folder, num_layers):
    """Writes the model in bf16, and returns how many parameters it has."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(make_config(num_layers))
        model.save_pretrained(folder, max_shard_size="1GB")
        return model.num_parameters()
    finally:
        torch.set_default_dtype(before)


def touch_memory(nbytes, threads):
    """Writes to as much fresh memory, a part in each thread, and gives it back."""
    num_parts = -(-nbytes // (16 * PIECE_NBYTES))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        parts = [numpy.empty(nbytes // num_parts, dtype=numpy.uint8) for _ in range(num_parts)]
        list(pool.map(lambda part: part.fill(0), parts))


def yardstick(folder, num_parameters, threads):
    """Seconds to read the files once and to write the model data once."""

    def read(item):
        path, begin = item
        buffer = bytearray(PIECE_NBYTES)
        descriptor = os.open(path, os.O_RDONLY)
        os.preadv(descriptor, [buffer], begin)
        os.close(descriptor)

    pieces = [
        (path, begin)
        for path in sorted(folder.glob("*.safetensors"))
        for begin in range(0, path.stat().st_size, PIECE_NBYTES)
    ]
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, pieces))
    touch_memory(num_parameters * WRITTEN_NBYTES, threads)
    return time.perf_counter() - begin


def peak_nbytes(*, reset=False):
    """The most memory that this process has had; 0 where the system does not say it."""
    try:
        if reset:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def measure_here(folder, way, threads, num_parameters, budget):
    """Loads the model, makes the engine and takes a step in this process."""
    from hf_patrickstar import PatrickStarEngine, deferred_weights

    touch_memory(num_parameters * TOUCHED_NBYTES, threads)
    bound = yardstick(folder, num_parameters, threads)
    resting = peak_nbytes(reset=True)
    clocks = [time.perf_counter()]
    with deferred_weights(enabled=way == "deferred"):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    clocks.append(time.perf_counter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = {"dtype": "bf16", "host_threads": threads, "device_budget": budget}
    engine = PatrickStarEngine(model, config, optimizer, device="cpu")
    clocks.append(time.perf_counter())
    engine.optimizer.zero_grad()  # as the Trainer does: gradients need not stay after the step
    model(**common.make_batch(0, 1, TOKENS, VOCABULARY, torch.device("cpu"))).loss.backward()
    engine.optimizer.step()
    clocks.append(time.perf_counter())
    load, construction, step = (end - begin for begin, end in itertools.pairwise(clocks))
    peak, moves = peak_nbytes() - resting, engine.stats()["chunk_moves"]
    states = engine.optimizer.state_dict()["state"].values()
    values = [*model.state_dict().values(), *(value for state in states for value in state.values() if value.dim())]
    bits = [int(value.view(torch.int16).sum(dtype=torch.int64)) for value in values]
    times = {"load": load, "engine": construction, "step": step, "bound": bound}
    return {**times, "peak": peak, "moves": moves, "bits": bits}


def measure(options, folder, version, way, threads, num_parameters):
    """The same in a process of its own, with a checkout of the package."""
    paths = [str(version), str(common.ROOT / "benchmarks")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    asked = json.dumps([str(folder), way, threads, num_parameters, options.device_budget])
    done = subprocess.run(
        [sys.executable, __file__, "--child", asked], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"bench_construction: a process failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_row(key, samples, num_parameters):
    """Medians of one way of loading."""
    version, way, threads = key
    row = {"version": version, "weights": way, "threads": threads}
    for name in ("load", "engine", "step", "bound"):
        row[f"{name}_s"] = statistics.median(sample[name] for sample in samples)
    row["total_s"] = statistics.median(sample["load"] + sample["engine"] + sample["step"] for sample in samples)
    row["first_step_s"] = statistics.median(sample["engine"] + sample["step"] for sample in samples)
    row["moves"] = statistics.median(sample["moves"] for sample in samples)
    row["to_bound"] = statistics.median(sample["engine"] / sample["bound"] for sample in samples)
    row["peak"] = statistics.median(sample["peak"] for sample in samples) / (num_parameters * WRITTEN_NBYTES)
    return row


def simulate(options):
    """Seconds until the first step has ended on a machine that is not here."""
    from bench_timeline import simulation_of

    from hf_patrickstar.machine import find_machine
    from hf_patrickstar.schedule.pace import describe_start

    machine = find_machine(options.machine)
    simulated = simulation_of(options.simulate, 4096, 1, 1, machine, placement="host")
    print(f"simulated: {options.simulate}, {describe_start(simulated.start, machine.name)}")
    parameters = simulated.num_parameters
    return {"model": options.simulate, "parameters": parameters, "machine": machine.name, "phases_s": simulated.start}


def make_parser():
    """The options."""
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="12 make 748 M parameters, which need 11 GB")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device_budget", default="auto", help="a part of the memory, to which chunks move home")
    parser.add_argument("--weights", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", metavar="DIR", help="another checkout, measured in turns with this one")
    parser.add_argument("--folder", help="where the model is written; by default a folder that is removed afterwards")
    parser.add_argument("--simulate", metavar="MODEL", help="a model of bench_timeline.py")
    parser.add_argument("--machine", default="h100", help="the machine of the simulation")
    parser.add_argument("--child", help="what one process measures")
    return parser


def main():
    """Prints a row for each way of loading, version and number of threads."""
    options = make_parser().parse_args()
    if options.child is not None:
        folder, *asked = json.loads(options.child)
        print(json.dumps(measure_here(pathlib.Path(folder), *asked)))
        return
    options.device = "cpu"
    folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="bench_construction_"))
    versions = {"after": common.ROOT, **({"before": pathlib.Path(options.before)} if options.before else {})}
    keys = [(version, way, threads) for version in versions for way in options.weights for threads in options.threads]
    samples = {key: [] for key in keys}
    try:
        num_parameters = write_model(folder, options.layers)
        for number in range(options.rounds):
            for key in sorted(keys, reverse=bool(number % 2)):
                version, way, threads = key
                samples[key].append(measure(options, folder, versions[version], way, threads, num_parameters))
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    for way in options.weights:  # layouts may differ with the memory that is free
        bits = [sample["bits"] for key in keys if key[1] == way for sample in samples[key]]
        if len({sum(values) for values in bits}) > 1:
            raise SystemExit(f"bench_construction: chunks differ between processes ({way})")
    rows = [make_row(key, samples[key], num_parameters) for key in keys]
    print(f"{num_parameters / 1e6:.0f} M parameters, bf16; medians of {options.rounds} rounds; the same bits in all")
    names = ("load_s", "engine_s", "step_s", "first_step_s", "total_s", "bound_s")
    heads = "".join(f"{name:>13s}" for name in names)
    print(f"{'':8s}{'weights':>10s}{'threads':>8s}{heads}{'to bound':>10s}{'peak':>7s}")
    for row in rows:
        figures = "".join(f"{row[name]:13.2f}" for name in names)
        head = f"{row['version']:8s}{row['weights']:>10s}{row['threads']:8d}"
        print(f"{head}{figures}{row['to_bound']:10.2f}{row['peak']:7.2f}")
    result = {"parameters": num_parameters, "rounds": options.rounds, "same_bits": True, "rows": rows}
    if options.before:
        command = ["git", "describe", "--always", "--dirty"]
        said = subprocess.run(command, cwd=options.before, capture_output=True, text=True, check=False)
        result["commit_before"] = said.stdout.strip()
    if options.simulate:
        result["simulated"] = simulate(options)
    common.finish("bench_construction", options, result)


if __name__ == "__main__":
    main()
