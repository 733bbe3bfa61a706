"""The same fine-tuning by this package and its peers, in one process or two: step time, memory, losses.

A GPT-2 on bytes of text is trained by the Trainer with the same seed, the same batches and fused AdamW under

    ddp          plain DistributedDataParallel: every process has all model data; with one process, plain training
    fsdp2        FSDP2 with CPU offload
    zero3        DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the CPU, by its own CPU Adam
    patrickstar  this package

Each engine and repeat is one launch of torchrun with two processes of one thread that talk over gloo, or with one of
two threads; the engines take turns.
A step lasts from the end of one optimizer step to the end of the next, so it includes data, logging and the waiting
for the other process. A peer that cannot run is listed with its error.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import common
import torch
from peers import zero3_config
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.units import format_nbytes

THREADS = 2  # of all processes together
GLOBAL_BATCH = 4
ENGINES = ("ddp", "fsdp2", "zero3", "patrickstar")
TIMEOUT = 900  # seconds of one launch; the first one of DeepSpeed may have to compile its Adam


class Clock(TrainerCallback):
    """Notes when optimizer steps end."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the Trainer."""
        self.ends.append(time.perf_counter())


# In the processes that train


def work(options):
    """Trains under one engine and returns what this process saw; every process takes part."""
    imported = rss("VmRSS")
    prepare = {"fsdp2": force_fsdp_on_cpu, "zero3": make_deepspeed_state}.get(options.worker)
    if prepare is not None:
        prepare()
    with tempfile.TemporaryDirectory() as folder:
        args = make_arguments(options, folder)
        if args.world_size != options.processes:
            raise RuntimeError(f"{options.processes} processes were started, the Trainer sees {args.world_size}")
        clock = Clock()
        trainer = (PatrickStarTrainer if options.worker == "patrickstar" else Trainer)(
            model=common.make_gpt2(options.layers, options.hidden, positions=options.length),
            args=args,
            train_dataset=make_blocks(options),
            callbacks=[clock],
        )
        trainer.train()
    engine = describe_engine(options.worker, trainer)
    here = {"imported": imported, "peak": rss("VmHWM")}
    peaks = [here]
    if torch.distributed.is_initialized():
        if torch.distributed.get_world_size() != options.processes:
            raise RuntimeError(f"the group has {torch.distributed.get_world_size()} members, not {options.processes}")
        peaks = [None] * options.processes
        torch.distributed.all_gather_object(peaks, here)
    return {
        "engine": engine,
        "seconds": [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)][options.warmup - 1 :],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rss_peak": [peak["peak"] for peak in peaks],
        "rss_imported": [peak["imported"] for peak in peaks],
    }


def make_arguments(options, folder):
    """The arguments of the Trainer; what is not about the engine is the same for all."""
    shared = {
        "output_dir": folder,
        "per_device_train_batch_size": GLOBAL_BATCH // options.processes,
        "max_steps": options.warmup + options.steps,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "bf16": options.bf16,
        "ddp_find_unused_parameters": False,
        "seed": 7,
        "use_cpu": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if options.worker == "fsdp2":
        offload = {"version": 2, "cpu_offload": True, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
        return TrainingArguments(**shared, fsdp=True, fsdp_config=offload)
    if options.worker == "zero3":
        adamw = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        # With use_cpu Accelerate ignores DeepSpeed.
        state = {"use_cpu": False, "accelerator_config": {"use_configured_state": True}}
        return TrainingArguments(**shared | state, deepspeed=zero3_config(options.bf16, "auto", "auto", adamw))
    if options.worker == "patrickstar":
        return PatrickStarTrainingArguments(**shared, patrickstar=True, patrickstar_config=options.patrickstar_config)
    return TrainingArguments(**shared)


def force_fsdp_on_cpu():
    """Makes Accelerate shard on CPUs: it takes FSDP's settings there and trains with DDP, without a word."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            if fsdp_plugin.cpu_offload:
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # nothing to pin it for
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = with_fsdp


def make_deepspeed_state():
    """Starts gloo as Accelerate does on CPUs and declares it DeepSpeed's: without ``use_cpu`` it finds no backend."""
    import deepspeed  # noqa: F401  # if it is missing, this says so and Accelerate does not
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import training_args

    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
    # Without use_cpu, --bf16 is taken to be a wish for a GPU; CPUs have it too.
    training_args.is_torch_bf16_gpu_available = lambda: True


def describe_engine(name, trainer):
    """What trained, in words; an error if it was not what was asked for."""
    wrapped = trainer.model_wrapped
    words = type(wrapped).__name__
    if name == "ddp":
        is_alone = trainer.args.world_size == 1  # then DDP is plain training
        right = is_alone or isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    elif name == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

        offload = trainer.accelerator.state.fsdp_plugin.cpu_offload
        right = isinstance(wrapped, FSDPModule) and isinstance(offload, CPUOffloadPolicy)
        if right:
            whole = sum(parameter.numel() for parameter in wrapped.parameters())
            here = sum(parameter.to_local().numel() for parameter in wrapped.parameters())
            right = here < 0.6 * whole or trainer.args.world_size == 1
            words = f"{words}, {here} of {whole} parameters here"
    elif name == "zero3":
        right = wrapped.zero_optimization_stage() == 3 and wrapped.zero_offload_optimizer() is not None
        words = f"{words}, {type(wrapped.basic_optimizer).__name__}"
    else:
        right = trainer.patrickstar_engine is not None
        words = type(trainer.patrickstar_engine).__name__
    if not right:
        raise RuntimeError(f"{name} was asked for and {words} trained")
    return words


def make_blocks(options):
    """Blocks of bytes, from a module of the standard library; as many as the run takes."""
    text = torch.frombuffer(bytearray(pathlib.Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    count = min(len(text) // options.length, GLOBAL_BATCH * (options.warmup + options.steps))
    blocks = text[: count * options.length].view(count, options.length)
    return [{"input_ids": block, "labels": block} for block in blocks]


def rss(name):
    """Resident bytes of this process; ``VmHWM`` is the most so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status does not tell {name}")


def run_worker(options):
    """Leaves the result, or this process's error, in a file: of all that torchrun prints, the error is not the end."""
    target = pathlib.Path(options.result)
    try:
        result = work(options)
    except BaseException as error:
        lines = " ".join(str(error).split())
        target.with_suffix(f".error{os.environ['RANK']}").write_text(f"{type(error).__name__}: {lines}")
        raise
    if os.environ["RANK"] == "0":
        target.write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # The end of the interpreter is left out: now and then it aborts while threads of gloo are still there.
    os._exit(0)


# In the process that compares


def launch(name, options, target):
    """Trains under one engine in processes of its own.

    Returns:
        What rank 0 wrote, or ``{"error": ...}``.
    """
    words = ("--layers", options.layers, "--hidden", options.hidden, "--length", options.length)
    words += ("--warmup", options.warmup, "--steps", options.steps, "--worker", name, "--result", target)
    words += ("--bf16",) * options.bf16 + ("--processes", options.processes)
    if options.patrickstar_config is not None:
        words += ("--patrickstar_config", options.patrickstar_config)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(options.processes),
    ]
    # The peers are compared on the CPU, also where there is a device.
    threads = str(THREADS // options.processes)
    env = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"TOKENIZERS_PARALLELISM": "false"} | ({"DS_ACCELERATOR": "cpu"} if name == "zero3" else {})
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, __file__, *map(str, words)], stdout=log, stderr=log, env=env)
        try:
            code = f"exit status {process.wait(TIMEOUT)}"
        except subprocess.TimeoutExpired:
            code = f"no end after {TIMEOUT} s"
        finally:
            if process.poll() is None:
                process.terminate()  # not killed: torchrun ends its processes then, which are in sessions of their own
                process.wait()
        if process.returncode == 0 and target.exists():
            return json.loads(target.read_text())
        errors = sorted(target.parent.glob(f"{target.stem}.error*"))
        if errors:
            return {"error": errors[0].read_text()}
        log.seek(0)
        # torchrun's own report comes after what the processes printed, and does not say why they ended.
        printed = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, log))
    last = next((line.strip() for line in reversed(printed) if line.strip()), "nothing was printed")
    return {"error": f"{code}; {last}"}


def compare(runs):
    """Figures of every peer that ran, from all its repeats; times and losses relative to DDP's too."""
    rows = {}
    for name, repeats in runs.items():
        medians = [statistics.median(run["seconds"]) for run in repeats]
        rows[name] = {
            "engine": repeats[0]["engine"],
            "seconds": statistics.median(medians),
            "seconds_of_repeats": medians,
            "rss_peak": [max(peaks) for peaks in zip(*(run["rss_peak"] for run in repeats), strict=True)],
            "rss_imported": [max(sizes) for sizes in zip(*(run["rss_imported"] for run in repeats), strict=True)],
            "losses": repeats[0]["losses"],
            "losses_repeat": all(run["losses"] == repeats[0]["losses"] for run in repeats),
        }
        if "ddp" in runs:
            reference = runs["ddp"]
            ratios = [ours / statistics.median(run["seconds"]) for ours, run in zip(medians, reference, strict=False)]
            pairs = zip(rows[name]["losses"], reference[0]["losses"], strict=True)
            rows[name] |= {
                "ratio_to_ddp": statistics.median(ratios),
                "ratios_of_repeats": ratios,
                "loss_difference": max(abs(ours - theirs) for ours, theirs in pairs),
            }
    return rows


def print_table(rows, errors):
    """The table, and below it who could not run."""
    widths = (13, 10, 9, 18, 19, 12, 12, 12)
    head = ("", "s/step", "to DDP", "repeats", "RSS per process", "first loss", "last loss", "off by")
    print("".join(f"{cell:>{width}}" for cell, width in zip(head, widths, strict=True)))
    for name, row in rows.items():
        low, high = min(row["seconds_of_repeats"]), max(row["seconds_of_repeats"])
        difference = row.get("loss_difference")
        cells = [name, f"{row['seconds']:.3f}", f"{row['ratio_to_ddp']:.2f}" if "ratio_to_ddp" in row else "-"]
        cells += [f"{low:.3f} - {high:.3f}", format_nbytes(max(row["rss_peak"]))]
        cells += [f"{row['losses'][0]:.6f}", f"{row['losses'][-1]:.6f}"]
        cells += ["-" if difference is None else "nothing" if difference == 0 else f"{difference:.1e}"]
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    for name, row in rows.items():
        if not row["losses_repeat"]:
            print(f"{name}: losses differ from repeat to repeat")
    for name, error in errors.items():
        print(f"{name} did not run: {error}")


def main():
    """Compares the engines; fails if not even one ran."""
    parser = common.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--bf16", action="store_true", help="16-bit in each engine's own way; without it fp32")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--processes", type=int, choices=[1, 2], default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a repeat, left out of the times")
    parser.add_argument("--steps", type=int, default=8, help="steps of a repeat that are timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patrickstar_config", help="settings of patrickstar, JSON text; none by default")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, one repeat: does it run?")
    parser.add_argument("--worker", choices=ENGINES, help="internal: train under this engine in this process")
    parser.add_argument("--result", help="internal: where rank 0 writes what it measured")
    options = parser.parse_args()
    if options.device != "cpu":
        raise SystemExit(f"bench_peers: --device is {options.device}; the peers are compared on the CPU, leave it out")
    if options.warmup < 1 or options.steps < 1:
        raise SystemExit("bench_peers: --warmup and --steps have to be at least 1")
    if options.worker:
        run_worker(options)
        return
    if options.quick:
        options.layers, options.hidden, options.length = 2, 64, 64
        options.warmup, options.steps, options.repeats = 1, 2, 1
    runs = {name: [] for name in options.engines}
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name in options.engines:
                if name in errors:
                    continue
                result = launch(name, options, pathlib.Path(folder) / f"{name}_{repeat}.json")
                if "error" in result:
                    errors[name] = result["error"]
                    continue
                runs[name].append(result)
                print(f"repeat {repeat + 1}: {name} {statistics.median(result['seconds']):.4f} s", flush=True)
    rows = compare({name: repeats for name, repeats in runs.items() if repeats and name not in errors})
    numel = common.make_gpt2(options.layers, options.hidden, positions=options.length).num_parameters()
    dtype = "bf16" if options.bf16 else "fp32"
    print(
        f"{numel / 1e6:.1f} M parameters, {dtype}, global batch {GLOBAL_BATCH} x {options.length}, processes: "
        f"{options.processes}, threads of each: {THREADS // options.processes}"
    )
    print_table(rows, errors)
    torch.set_num_threads(THREADS // options.processes)  # as the workers have it, for the record
    result = {
        "packages": {name: common.package_version(name) for name in ("accelerate", "deepspeed")},
        "parameters": numel,
        "processes": options.processes,
        "warmup": options.warmup,
        "steps": options.steps,
        "repeats": options.repeats,
        "peers": rows,
        "errors": errors,
    }
    alone = "_alone" * (options.processes == 1)
    common.finish(f"bench_peers{alone}_{dtype}", options, result)
    if not rows:
        raise SystemExit("bench_peers: nothing ran")


if __name__ == "__main__":
    main()
