"""Training of models that are too large for the device: tokens per second and peaks, beside other ways to train them.

A Llama with random weights in bf16 under autocast, with fp32 masters, AdamW, gradient checkpointing and clipping to a
norm of 1.0. ``--kind plain`` has fp32 weights and states on the device, as the stock Trainer with ``--bf16`` does,
``--kind fsdp2`` is FSDP2 with CPU offload, and ``--kind zero3`` DeepSpeed ZeRO-3 with parameters and optimizer on the
CPU, if DeepSpeed is installed; both compute in bf16 without autocast, in one process. Where one of these does not fit,
the result says so, and that is no failure. Under this package and DeepSpeed the largest model is loaded in bf16, since
its fp32 values beside its chunks would be more than most hosts have.

``--record FILE`` trains nothing: it simulates the same training under this package, on any machine, and
writes it to a file. A run with ``--plan FILE`` reads it, and puts its time at the rates of ``--rates``, and the planned
peak of the device, beside what was measured.

``--shares`` measures the CPU tier instead: step time against plain torch where copies of chunks may be some shares of
the parameters' bytes, with ``overlap_optimizer`` and without. A GPT-2 trains on the same batches under all of them in
turns, and losses must be equal bit for bit. (On the CPU tier the cores that update are those that compute, so an update
is done when the step returns, with either setting.)
"""

import contextlib
import itertools
import json
import pathlib
import pickle
import resource
import statistics
import time
import traceback

import bench_overhead
import common
import peers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.cores import own_cores
from hf_patrickstar.integrations.trainer_report import LaneWatch
from hf_patrickstar.machine import find_machine, machine_of
from hf_patrickstar.memory.accelerator import device_name, memory_info
from hf_patrickstar.memory.tiers import DEVICE_SHARE, available_host_nbytes
from hf_patrickstar.planner.planning import make_adamw
from hf_patrickstar.planner.simulation import Trained
from hf_patrickstar.planner.simulation import simulate as simulate_step
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting

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


KINDS = ("patrickstar", "plain", "fsdp2", "zero3")
FROM_BF16 = ("patrickstar", "zero3")
"""Kinds that make fp32 masters themselves, so that a model may be loaded in bf16."""
SETTINGS = '{"dtype": "bf16"}'


def config_of(size, length):
    """The configuration of a Llama."""
    return LlamaConfig(**SIZES[size], **MORE[size], max_position_embeddings=length, loss_type="ForCausalLM")


def dtype_of(options):
    """The type in which the model is loaded."""
    return torch.bfloat16 if options.size == "8b" and options.kind in FROM_BF16 else torch.float32


def make_llama(size, length, dtype):
    """A Llama on the host with cheap random weights: drawing billions of numbers would take minutes."""
    config = config_of(size, length)
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


def make_our_step(model, device, settings):
    """The step of the engine, and a function that gives its figures after one more step."""
    engine = PatrickStarEngine(
        model, settings, torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW), device=device
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

    def figures(one_more_step):
        stats = {key: value for key, value in engine.stats().items() if isinstance(value, (int, float, str))}
        watch = LaneWatch(engine)
        watch.begin_step()
        one_more_step()
        return {"stats": stats, "busy_shares": busy_shares(watch.begin_step()), "reasons": engine.reasons}

    return step, figures


def busy_shares(timeline):
    """Which part of a step each lane worked; ``None`` if the step was recorded, or had too much in it."""
    if timeline is None:
        return None
    return {str(lane): busy / timeline.duration_ns for lane, busy in timeline.busy_ns().items() if busy}


def make_plain_step(model, device):
    """The step of plain torch, with everything on the device."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW)

    def step(batch):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda one_more_step: {}


def make_batch(number, options, device):
    """The micro-batch of a step."""
    return common.make_batch(number, options.batch_size, options.length, MORE[options.size]["vocab_size"], device)


def measure(step, device, options):
    """Seconds and losses of steps; those of the warm-up, in which the engine records, are not timed."""
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        batch = make_batch(number, options, device)
        if number == options.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        common.synchronize(device)
        begin = time.perf_counter()
        loss = step(batch)
        common.synchronize(device)
        taken = time.perf_counter() - begin
        if number >= options.warmup:
            seconds.append(taken)
        losses.append(loss.item())
        # At once: there may be no time for the rest.
        print(f"step {number}: {taken:.4f} s, loss {losses[-1]:.4f}", flush=True)
    return seconds, losses


def train(options, device):
    """What the training of one kind comes to; its model is gone when this returns."""
    dtype = dtype_of(options)
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(options.size, options.length))
    result = {
        "parameters": model.num_parameters(),
        "max_norm": MAX_NORM,
        "loaded_in": str(dtype).removeprefix("torch."),
    }
    result |= {"batch_size": options.batch_size, "length": options.length, "fits": True}
    why = peers.shortage_of_host(options.kind, result["parameters"], available_host_nbytes())
    if why:
        return {**result, "fits": False, "why": why}
    model = make_llama(options.size, options.length, dtype)
    make = {
        "patrickstar": lambda model, device: make_our_step(model, device, options.settings),
        "plain": make_plain_step,
        "fsdp2": lambda model, device: peers.make_fsdp2_step(model, device, MAX_NORM),
        "zero3": lambda model, device: peers.make_zero3_step(model, device, MAX_NORM, options.batch_size),
    }[options.kind]
    try:
        step, figures = make(model, device)
        seconds, losses = measure(step, device, options)
    except RuntimeError as error:
        if options.kind == "patrickstar" or not is_shortage(error):
            raise
        return {**result, "fits": False, "why": str(error).splitlines()[0]}
    peaks = {}
    if device.type == "cuda":  # before one more step, whose lanes are measured
        peaks["device_peak_nbytes"] = torch.cuda.max_memory_allocated(device)
        peaks["device_reserved_peak_nbytes"] = torch.cuda.max_memory_reserved(device)
        peaks["page_locked_by_torch_peak_nbytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    # ru_maxrss is in KiB on Linux.
    result |= {
        "seconds_per_step": seconds,
        "tokens_per_second": options.batch_size * options.length / statistics.median(seconds),
        "losses": losses,
        "host_peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **peaks,
    }

    def one_more_step():
        return step(make_batch(0, options, device))

    result |= found_or_error("figures", lambda: figures(one_more_step))
    if options.profile:
        result |= found_or_error("profile", lambda: profile(one_more_step, device, options.profile))
    return result


def profile(one_more_step, device, path):
    """Writes what host threads and the device did in one more step, for ``chrome://tracing`` or Perfetto."""
    with torch.profiler.profile() as profiler:
        one_more_step()
        common.synchronize(device)
    profiler.export_chrome_trace(path)
    return {"profile": pathlib.Path(path).name}


def found_or_error(what, find):
    """What a function has found, or its error: nothing that comes after it may cost what was measured before."""
    try:
        return find()
    except Exception as error:
        traceback.print_exc()
        return {f"{what}_error": f"{type(error).__name__}: {error}"}


def is_shortage(error):
    """Whether an error of torch says that memory is short: that of the device, or page-locked memory of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def record(options):
    """Simulates the training, and writes that to a file.

    The device has the bytes that ``device_budget="auto"`` takes of an empty one, unless the settings say otherwise. On
    a device with fewer bytes the plan has no time.
    """
    machine = find_machine(options.machine)

    def make_model():
        config = config_of(options.size, options.length)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(options))  # fake values cannot change type
        model.gradient_checkpointing_enable()
        return model.train()

    def make_inputs():
        tokens = torch.zeros((options.batch_size, options.length), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    config = {"device_budget": int(machine.device_nbytes * DEVICE_SHARE), **options.settings}

    def ops_of(looked_up):
        micro_batch = MicroBatch(make_model, make_inputs, lambda model, inputs: model(**inputs).loss, config)
        with FakeTensors():
            return trace(micro_batch, Setting(looked_up))

    simulated = simulate_step(Trained(make_model, make_adamw, config, max_norm=MAX_NORM), machine, ops_of)
    path = pathlib.Path(options.record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(simulated))
    print(f"{path}: {simulated.timeline.duration_ns / 1e9:.4f} s per step on {machine.name}")


def simulate(options, device, found):
    """The training that was simulated beforehand, at other rates, with the bytes of the device of the one that ran.

    Args:
        options: Those of the benchmark.
        device: Where it trained.
        found: What was measured.
    """
    told = pickle.loads(pathlib.Path(options.plan).read_bytes())
    is_measured = options.rates is not None and pathlib.Path(options.rates).exists()
    machine = find_machine(options.rates) if is_measured else machine_of(device_name(device)).with_cores(own_cores(1))
    plans = told.rules.plans(told.traces, found["stats"]["device_budget_nbytes"])
    timeline = replay(told.script, plans, told.loads, machine)
    simulated_s = timeline.duration_ns / 1e9
    return {
        "simulated_seconds_per_step": simulated_s,
        "simulated_over_measured": simulated_s / statistics.median(found["seconds_per_step"]),
        "simulated_busy_shares": busy_shares(timeline),
        "simulated_on": f"{machine.name}, {'measured' if is_measured else 'known'} rates",
        "planned_homes": told.survey.reasons[-1],
        "planned_device_peak_nbytes": told.device_nbytes,
    }


def make_steps_of_shares(options):
    """A step for plain torch and one for each share and setting, by name, and the engines."""
    steps, engine, _ = bench_overhead.make_steps(torch.device("cpu"), options)
    steps["resident"] = steps.pop("patrickstar")
    engines = {"resident": engine}
    for share, overlaps in itertools.product(options.shares, (True, False)):
        model = common.make_gpt2(options.layers, options.hidden, positions=options.length)
        nbytes = sum(p.numel() for p in model.parameters()) * common.DTYPES[options.dtype].itemsize
        config = {"dtype": options.dtype, "autocast": False, "cpu_embedding": False, "placement": "host"}
        config |= {"chunk_budget": f"{int(share * nbytes)}B", "overlap_optimizer": overlaps}
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
    parser.add_argument("--kind", choices=KINDS, default="patrickstar")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, metavar="JSON", help="for --kind patrickstar")
    parser.add_argument("--record", metavar="FILE", help="simulate instead of training, and write that to a file")
    parser.add_argument("--machine", default="h100", help="for --record: a known machine, or a JSON file of rates")
    parser.add_argument("--plan", metavar="FILE", help="for --kind patrickstar: what --record has written")
    parser.add_argument("--rates", metavar="FILE", help="for --plan: rates; without it those of the known device")
    parser.add_argument("--cap_gib", type=float, help="let torch take no more of a CUDA device, as on a smaller one")
    parser.add_argument("--profile", metavar="FILE.json.gz", help="write a trace of torch's profiler of one more step")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.shares:
        options.device = "cpu"
        compare_shares(options)
        return
    if options.record:
        record(options)
        return
    run_kind(options, torch.device(options.device))


def run_kind(options, device):
    """Trains under one kind, and prints and writes what comes of it."""
    name = f"bench_offload_{options.size}_{options.kind}"
    if options.kind == "zero3" and not peers.has_deepspeed(device):
        print(f"{name}: skipped: {peers.NO_DEEPSPEED}")
        common.finish(name, options, {"skipped": peers.NO_DEEPSPEED})
        return
    if options.cap_gib and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * 2**30 / memory_info(device)[1], device)
    group = peers.process_group(device) if options.kind in ("fsdp2", "zero3") else contextlib.nullcontext()
    with group:
        result = train(options, device)
    if not result["fits"]:
        print(f"{name}: does not fit: {result['why']}")
        common.finish(name, options, result)
        return
    losses, seconds = result["losses"], statistics.median(result["seconds_per_step"])
    print(
        f"{name}: {result['tokens_per_second']:.0f} tokens per second, {seconds:.4f} s per step, losses "
        f"{losses[0]:.4f} to {losses[-1]:.4f}"
    )
    if options.plan and options.kind == "patrickstar":
        result |= found_or_error("simulation", lambda: simulate(options, device, result))
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result.items() if key.startswith("simul")))
    common.finish(name, options, result)


if __name__ == "__main__":
    main()
