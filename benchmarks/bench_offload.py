"""Training of models that are too large for the device: seconds per step, memory, and where the seconds went.

A Llama with random weights in bf16 under autocast, with fp32 masters, AdamW, gradient checkpointing and clipping to a
norm of 1.0. ``--kind trainer`` is the same by the Trainer with ``patrickstar=True``. ``--kind plain`` has fp32 weights
and states on the device, as the stock Trainer with ``--bf16`` does, ``--kind fsdp2`` is FSDP2 with CPU offload, and
``--kind zero3`` DeepSpeed ZeRO-3 with parameters and optimizer on the CPU, if DeepSpeed is installed; both compute in
bf16 without autocast, in one process. Where one of these does not fit, the result says so, and that is no failure.
Under this package and DeepSpeed the largest model is loaded in bf16, since its fp32 values beside its chunks would be
more than most hosts have.

A step is timed from an idle device to an idle device. The host may update chunks until later, beside the next step:
``seconds_after_steps`` says for how long after the last one. One more step is traced, and its trace is summarized
(``trace_summary.py``).

``--replay RECORD`` trains nothing: for each row of a record of ``scripts/gpu_check.py`` it simulates the step with the
homes, lookups and activations that ran, at the rates in the record, so that what differs is the model of time. It needs
no device.

``--shares`` measures the CPU tier instead: step time against plain torch where some shares of the model data may live
on the device, and where all chunks are at home on the host, and copies of these shares of them may stay there. A GPT-2
trains on the same batches under all of them in turns, and losses must be equal bit for bit.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import pathlib
import resource
import statistics
import tempfile
import time
import traceback

import bench_overhead
import common
import peers
import torch
from trace_summary import STEP, summarize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_patrickstar import PatrickStarEngine, PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.common.cores import usable_cores
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import Machine, machine_of
from hf_patrickstar.memory.compute_device import memory_info
from hf_patrickstar.memory.tiers import Tier, available_host_nbytes
from hf_patrickstar.planner.planning import make_adamw
from hf_patrickstar.planner.simulation import Ran, Trained, simulate
from hf_patrickstar.schedule.clock import Lane
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


OURS = ("patrickstar", "trainer")
KINDS = (*OURS, "plain", "fsdp2", "zero3")
FROM_BF16 = (*OURS, "zero3")
"""Kinds that make fp32 masters themselves, so that a model may be loaded in bf16."""
SETTINGS = '{"dtype": "bf16"}'
COUNTED = ("chunk_loads", "host_to_device_nbytes", "device_to_host_nbytes")
"""Figures of the engine that a replay is compared with."""
MORE_BUDGET = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5)
"""A replay has so many times the device's budget, the first with which the homes that ran have room."""
phase = torch.profiler.record_function


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
    """The step of the engine, and its engine."""
    engine = PatrickStarEngine(
        model, settings, torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW), device=device
    )

    def step(batch):
        def micro_batch():
            with phase("forward"):
                loss = model(**batch).loss
            with phase("backward"):
                loss.backward()
            return loss.detach()

        loss = engine.attempt(micro_batch)
        with phase("clip"):
            engine.optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        with phase("update"):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return loss

    return step, engine


def make_plain_step(model, device):
    """The step of plain torch, with everything on the device."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW)

    def step(batch):
        with phase("forward"), torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        with phase("update"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def make_batch(number, options, device):
    """The micro-batch of a step."""
    return common.make_batch(number, options.batch_size, options.length, MORE[options.size]["vocab_size"], device)


class Steps:
    """Times the steps after the warm-up, in which the engine records; then traces two more, and summarizes the second:
    the updates of the first run on beside it, as beside every step.

    Args:
        device: The device.
        options: Those of the benchmark.
        engine: The engine, if there is one.

    Attributes:
        num: How many steps there are.
        measured: What came of the timed ones; empty until they are done.
        traced: What came of the others.
    """

    def __init__(self, device, options, engine=None):
        self.engine, self.measured, self.traced = engine, {}, {}
        self.num = options.warmup + options.steps + 2
        self._device, self._options = device, options
        self._seconds, self._losses, self._before = [], [], {}
        self._begun = self._since_ns = 0
        self._profiler, self._range = torch.profiler.profile(), contextlib.ExitStack()
        self._times = None

    def begin(self):
        """A step begins."""
        common.synchronize(self._device)
        number, is_cuda = len(self._losses), self._device.type == "cuda"
        if number == self._options.warmup:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            self._before = self._counts()
        elif number == self.num - 2:
            self.measured = self._measured()
            self._times = self.engine and self.engine.resources.streams.begin_timing()
            self._profiler.start()
        elif number == self.num - 1:
            self._before, self._since_ns = self._counts(), time.perf_counter_ns()
            self._range.enter_context(phase(STEP))
        if self._options.kind != "trainer" or not number:
            self._begun = time.perf_counter()

    def end(self, loss):
        """It has ended.

        Args:
            loss: Its loss.
        """
        common.synchronize(self._device)
        self._range.close()
        now, number = time.perf_counter(), len(self._losses)
        if self._options.warmup <= number < self.num - 2:
            self._seconds.append(now - self._begun)
        self._losses.append(loss.item())
        # At once: there may be no time for the rest.
        print(f"step {number}: {now - self._begun:.4f} s, loss {self._losses[-1]:.4f}", flush=True)
        self._begun = now  # the Trainer does more between two steps
        if number == self.num - 1:
            self.traced = {"trace": self._summary()}

    def _counts(self):
        """What is counted, of the engine and of torch's allocator."""
        counts = {name: self.engine.stats()[name] for name in COUNTED} if self.engine else {}
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            counts |= {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_sync_all_streams", "num_ooms")}
        return counts

    def _gained(self):
        return {name: count - self._before[name] for name, count in self._counts().items()}

    def _measured(self):
        begin = time.perf_counter()
        for chunk in self.engine.chunks if self.engine else ():
            chunk.wait_for_update()
        found = {
            "seconds_per_step": self._seconds,
            "seconds_after_steps": time.perf_counter() - begin,
            "tokens_per_second": self._options.batch_size * self._options.length / statistics.median(self._seconds),
            "losses": list(self._losses),
            "host_peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # of KiB, on Linux
            "in_timed_steps": self._gained(),
        }
        if self._device.type == "cuda":
            found["device_peak_nbytes"] = torch.cuda.max_memory_allocated(self._device)
            found["device_reserved_peak_nbytes"] = torch.cuda.max_memory_reserved(self._device)
            found["page_locked_by_torch_peak_nbytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
        return found

    def _summary(self):
        self._profiler.stop()
        counted = self._gained()
        with tempfile.TemporaryDirectory() as folder:
            path = self._options.profile or f"{folder}/trace.json"
            self._profiler.export_chrome_trace(path)
            events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        updates = []
        if self._times is not None:
            self.engine.resources.streams.end_timing()
            began = max(event["ts"] for event in events if event.get("name") == STEP and event.get("ph") == "X")
            of_trace = lambda ns: began + (ns - self._since_ns) / 1e3  # noqa: E731
            works = [one for one in self._times.found() if one.lane is Lane.HOST_WORK and not one.waiter]
            updates = [(of_trace(work.begin), of_trace(work.end)) for work in works]
        return {**summarize(events, updates), "counted": counted}


class Rows(torch.utils.data.IterableDataset):
    """The rows of the batches, one after the other."""

    def __init__(self, options):
        self._options = options

    def __iter__(self):
        for number in itertools.count():
            batch = make_batch(number, self._options, torch.device("cpu"))
            for row in range(self._options.batch_size):
                yield {name: values[row] for name, values in batch.items()}


class Clock(TrainerCallback):
    """Tells when steps of a Trainer begin and end."""

    def __init__(self, steps):
        self._steps = steps

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Called by the Trainer."""
        self._steps.engine = model.patrickstar_engine
        self._steps.begin()

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the Trainer."""
        self._steps.end(self.loss)


class TimedTrainer(PatrickStarTrainer):
    """Tells the loss of each step."""

    def training_step(self, *args, **kwargs):
        """See ``Trainer``."""
        self.clock.loss = super().training_step(*args, **kwargs)
        return self.clock.loss


def run_trainer(model, options, steps):
    """Trains with the Trainer, as ``--bf16 --patrickstar`` does."""
    config = {name: value for name, value in options.settings.items() if name != "dtype"}
    with tempfile.TemporaryDirectory() as folder:
        args = PatrickStarTrainingArguments(
            output_dir=folder,
            **{"patrickstar": True, "patrickstar_config": config, "patrickstar_report": False, "bf16": True},
            **{"use_cpu": options.device == "cpu", "max_steps": steps.num, "max_grad_norm": MAX_NORM},
            **{"per_device_train_batch_size": options.batch_size, "optim": "adamw_torch_fused"},
            **{"learning_rate": peers.ADAMW["lr"], "weight_decay": peers.ADAMW["weight_decay"]},
            **{"lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": []},
            disable_tqdm=True,
        )
        clock = Clock(steps)
        trainer = TimedTrainer(model=model, args=args, train_dataset=Rows(options), callbacks=[clock])
        trainer.clock = clock
        trainer.train()


def run_loop(made, device, options, steps):
    """Trains with a step."""
    for number in range(steps.num):
        batch = make_batch(number, options, device)
        steps.begin()
        steps.end(made(batch))


def train(options, device):
    """What the training of one kind comes to; its model is gone when this returns."""
    dtype = dtype_of(options)
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(options.size, options.length))
    result = {
        "parameters": model.num_parameters(),
        "max_norm": MAX_NORM,
        "loaded_in": str(dtype).removeprefix("torch."),
        **{name: getattr(options, name) for name in ("size", "kind", "settings", "batch_size", "length")},
        "fits": True,
    }
    why = peers.shortage_of_host(options.kind, result["parameters"], available_host_nbytes())
    if why:
        return {**result, "fits": False, "why": why}
    model, steps = make_llama(options.size, options.length, dtype), Steps(device, options)
    try:
        if options.kind == "trainer":
            run_trainer(model, options, steps)
        else:
            step, steps.engine, more = make_step(model, device, options)
            result |= more
            run_loop(step, device, options, steps)
    except RuntimeError as error:
        if not steps.measured and (options.kind in OURS or not is_shortage(error)):
            raise
        if not steps.measured:
            return {**result, "fits": False, "why": str(error).splitlines()[0]}
        traceback.print_exc()  # what was measured before counts
        steps.traced = {"trace_error": f"{type(error).__name__}: {error}"}
    return {**result, **steps.measured, **steps.traced, **(facts_of(steps.engine) if steps.engine else {})}


def make_step(model, device, options):
    """A step, its engine if there is one, and what else is to be said of it."""
    if options.kind == "patrickstar":
        return *make_our_step(model, device, options.settings), {}
    if options.kind == "plain":
        return make_plain_step(model, device), None, {}
    if options.kind == "fsdp2":
        step, more = peers.make_fsdp2_step(model, device, MAX_NORM)
    else:
        step, more = peers.make_zero3_step(model, device, MAX_NORM, options.batch_size)
    return step, None, more


def facts_of(engine):
    """Figures of the engine, what was decided, and what a replay has to know."""
    stats = engine.stats()
    return {
        "stats": {key: value for key, value in stats.items() if isinstance(value, (int, float, str))},
        "reasons": engine.reasons,
        "ran": {
            "homed": [chunk.spec.index for chunk in engine.chunks if chunk.home is Tier.DEVICE],
            "streamed": [chunk.spec.index for chunk in engine.chunks if chunk.is_streamed],
            "lookups": engine.manager.evictor.lookups,
            "num_offloaded": max((made.num_offloaded for made in engine.traces.values()), default=0),
            "prefetch_depth": engine.prefetch_depth,
        },
    }


def is_shortage(error):
    """Whether an error of torch says that memory is short: that of the device, or page-locked memory of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def replay_all(options):
    """Replays the rows of a record beside each other, and prints and writes what comes of it."""
    record = json.loads(pathlib.Path(options.replay).read_text())
    results = {name: part.get("result") or {} for name, part in record["parts"].items()}
    rows = {name: result for name, result in results.items() if "ran" in result}
    machine = Machine.from_dict(results["rates"]) if results.get("rates") else machine_of(record["device"])
    found, num = {}, max(min(len(rows), len(usable_cores()) // 2), 1)
    with concurrent.futures.ProcessPoolExecutor(num, multiprocessing.get_context("spawn")) as pool:
        replays = {name: pool.submit(replay_row, result, machine) for name, result in rows.items()}
        for name, replayed in replays.items():
            try:
                row = found[name] = replayed.result()
            except Exception as error:  # no row hides the others
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            print(f"{name}: {row['seconds']:.4f} s, {row['over_measured']:.3f} of what was measured", flush=True)
    common.finish(
        "bench_offload_replay", options, {"machine": machine.name, "rates": "rates" in results, "rows": found}
    )


def replay_row(result, machine):
    """The step of a row as it ran, on the clock of a machine, beside what was measured.

    Args:
        result: What was measured.
        machine: Whose rates count.
    """
    torch.set_num_threads(1)
    options, ran, stats = argparse.Namespace(**result), result["ran"], result["stats"]

    def make_model():
        config = config_of(options.size, options.length)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(options))  # fake values cannot change type
        model.gradient_checkpointing_enable()
        return model.train()

    def make_inputs():
        tokens = torch.zeros((options.batch_size, options.length), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    config = {**options.settings, "chunk_numel": stats["chunk_numel"], "prefetch_depth": ran["prefetch_depth"]}
    config |= {name: stats[f"{name}_nbytes"] for name in ("device_budget", "host_budget")}

    @functools.cache
    def ops_of(looked_up):
        micro_batch = MicroBatch(make_model, make_inputs, lambda model, inputs: model(**inputs).loss, config)
        with FakeTensors():
            return trace(micro_batch, Setting(looked_up, machine.has_accelerator))

    lookups = {int(index): place for index, place in ran["lookups"].items()}
    chosen = Ran(frozenset(ran["homed"]), lookups, ran["num_offloaded"], frozenset(ran.get("streamed", ())))
    for share in MORE_BUDGET:  # the run has measured its activations, and a trace counts them
        config["device_budget"] = int(share * stats["device_budget_nbytes"])
        try:
            told = simulate(Trained(make_model, make_adamw, config, max_norm=MAX_NORM), machine, ops_of, chosen)
            break
        except BudgetError:
            if share == MORE_BUDGET[-1]:
                raise
    seconds = told.timeline.duration_ns / 1e9
    counted = dict(zip(COUNTED[1:], told.moved_nbytes, strict=True))
    return {
        "seconds": seconds,
        "over_measured": seconds / statistics.median(result["seconds_per_step"]),
        "busy": {str(lane): busy / 1e9 for lane, busy in told.timeline.busy_ns().items() if busy},
        "counted": {COUNTED[0]: sum(plan.num_loads for plan in told.plans), **counted},
        "device_peak_nbytes": sum(told.device_owners.values()),
        "budget_share": share,
        "is_same_layout": len(told.layout.chunks) == stats["num_chunks"],
    }


def make_steps_of_shares(options):
    """A step for plain torch and one for each share and setting, by name, and the engines."""
    steps, engine, _ = bench_overhead.make_steps(torch.device("cpu"), options)
    steps["resident"] = steps.pop("patrickstar")
    engines = {"resident": engine}
    for share, kind in itertools.product(options.shares, ("at home", "copies")):
        model = common.make_gpt2(options.layers, options.hidden, positions=options.length)
        of_copies = sum(p.numel() for p in model.parameters()) * common.DTYPES[options.dtype].itemsize
        nbytes = of_copies if kind == "copies" else engine.stats()["model_data_nbytes"]
        config = {"dtype": options.dtype, "autocast": False, "cpu_embedding": False}
        config |= {"placement": "host" if kind == "copies" else "auto", "chunk_budget": f"{int(share * nbytes)}B"}
        made = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        name = f"{share:.0%} {kind}"
        engines[name] = PatrickStarEngine(model, config, made, device=torch.device("cpu"))
        engines[name].optimizer.zero_grad()  # nobody wants gradients after a step, not even after the first one
        steps[name] = bench_overhead.make_our_step(model, engines[name])
    return steps, engines


def compare_shares(options):
    """Prints ratios to plain torch; fails if losses differ."""
    seconds, loads, homes = {}, {}, {}
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
            chunks = engine.survey().chunks
            there = sum(chunk.numel for chunk in chunks if chunk.home == Tier.DEVICE.value)
            homes[name] = there / sum(chunk.numel for chunk in chunks)
            engine.detach()
    rows = {}
    for name, row in seconds.items():
        ratios = [ours / plain for ours, plain in zip(row, seconds["plain"], strict=True)]
        rows[name] = {"seconds": statistics.median(row), "ratio": statistics.median(ratios)}
        rows[name] |= {"quartiles": statistics.quantiles(ratios, n=4), "chunk_loads": loads.get(name)}
        rows[name]["at_home"] = homes.get(name)
        low, _, high = rows[name]["quartiles"]
        print(
            f"{name:>17}: {rows[name]['seconds']:.4f} s, {rows[name]['ratio']:.3f} of plain ({low:.3f} to {high:.3f}), "
            f"{loads.get(name, 0)} chunk loads, {homes.get(name, 1.0):.0%} at home on the device"
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
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, metavar="JSON", help="of the engine")
    parser.add_argument("--replay", metavar="RECORD", help="simulate the steps of a record of gpu_check.py instead")
    parser.add_argument("--cap_gib", type=float, help="let torch take no more of a CUDA device, as on a smaller one")
    parser.add_argument("--profile", metavar="FILE.json", help="keep the trace of torch's profiler there")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.shares:
        options.device = "cpu"
        compare_shares(options)
        return
    if options.replay:
        replay_all(options)
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
    common.finish(name, options, result)


if __name__ == "__main__":
    main()
