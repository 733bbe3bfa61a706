"""The main job, end to end, with nothing downloaded: see docs/quickstart.md. Run by scripts/quickstart.sh.

Builds a corpus from the standard library's own sources, trains a tokenizer, makes a small "pretrained" GPT-2
checkpoint, fine-tunes it with recipes/finetune_clm.py, plain and with --patrickstar, and compares; a few more steps
without the plan show what the plan saves. Everything runs on the CPU, where runs can be compared bit for bit; the
device is a budgeted part of its memory. ``--short`` takes a smaller model and fewer steps, and leaves out
those without the plan.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time

from rich.console import Console
from rich.table import Table

from hf_patrickstar.units import format_nbytes

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK_SIZE = 128
BATCH_SIZE = 8
CORPUS_NBYTES = 1_500_000
BUDGET_SHARE = 0.5
FP16_NBYTES, FP32_NBYTES = 2, 4
NUM_STEPS_WITHOUT_PLAN = 6
NO_PLAN = {"eviction": "list_order", "prefetch_depth": 0, "placement": "host"}


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the model is, and how long it is trained."""

    vocab_size: int = 4096
    n_embd: int = 256
    n_layer: int = 8
    num_steps: int = 30
    corpus_nbytes: int = CORPUS_NBYTES


FULL = Size()
SHORT = Size(vocab_size=1024, n_embd=96, n_layer=4, num_steps=6, corpus_nbytes=300_000)


def build_corpus(folder: pathlib.Path, nbytes: int | None = None) -> pathlib.Path:
    """Concatenates modules of the standard library, in order of their names, into one text file."""
    nbytes = CORPUS_NBYTES if nbytes is None else nbytes
    target = folder / "corpus.txt"
    sources = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = 0
    with target.open("w", encoding="utf-8") as file:
        for source in sources:
            text = source.read_text(encoding="utf-8", errors="ignore")
            file.write(text + "\n")
            size += len(text)
            if size > nbytes:
                break
    return target


def build_checkpoint(folder: pathlib.Path, corpus: pathlib.Path, size: Size = FULL) -> tuple[pathlib.Path, int]:
    """Trains a byte-level BPE tokenizer and saves it with a small GPT-2; returns the directory and its parameters."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(corpus)], vocab_size=size.vocab_size, special_tokens=["<|endoftext|>"], show_progress=False)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=BLOCK_SIZE, **special)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=BLOCK_SIZE,
        n_embd=size.n_embd,
        n_layer=size.n_layer,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    target = folder / "pretrained"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target, model.num_parameters()


def fine_tune(name: str, folder: pathlib.Path, checkpoint: pathlib.Path, corpus: pathlib.Path, *options: str) -> dict:
    """Runs the recipe in a process of its own; returns what it measured."""
    output = folder / name
    command = [
        sys.executable,
        str(ROOT / "recipes" / "finetune_clm.py"),
        *("--model_name_or_path", str(checkpoint), "--train_file", str(corpus), "--output_dir", str(output)),
        *(
            "--do_train",
            "--block_size",
            str(BLOCK_SIZE),
            "--per_device_train_batch_size",
            str(BATCH_SIZE),
        ),
        *("--learning_rate", "5e-4", "--lr_scheduler_type", "cosine", "--warmup_steps", "5", "--logging_steps", "1"),
        *("--save_strategy", "no", "--report_to", "none", "--seed", "42", "--use_cpu"),
        *options,
    ]
    log = folder / f"{name}.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.stderr.write(log.read_text())
        raise SystemExit(f"quickstart: the run '{name}' failed; its output is above and in {log}")
    state = json.loads((output / "trainer_state.json").read_text())
    stats_file = output / "patrickstar_stats.json"
    return {
        "losses": [entry["loss"] for entry in state["log_history"] if "loss" in entry],
        "seconds": 1 / json.loads((output / "train_results.json").read_text())["train_steps_per_second"],
        "rss": usage.ru_maxrss * 1024 if sys.platform != "darwin" else usage.ru_maxrss,
        "stats": json.loads(stats_file.read_text()) if stats_file.exists() else None,
        "output": output,
    }


def same_weights(left: pathlib.Path, right: pathlib.Path) -> bool:
    """Loads both results with plain ``from_pretrained`` and compares every weight, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path) for path in (left, right)]
    first, second = (model.state_dict() for model in models)
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def per_step(run: dict, key: str) -> str:
    """Bytes that a run moved in each step, on average."""
    return format_nbytes(run["stats"][key] // run["stats"]["steps"])


def loads_per_step(stats: dict) -> str:
    """Loads in each step, and how many were started before the chunk was needed."""
    return f"{stats['chunk_loads'] / stats['steps']:.1f}, {stats['prefetches'] / stats['steps']:.1f}"


def make_table(plain: dict, ours: dict, unplanned: dict | None, numel: int, budget: int) -> Table:
    """The comparison that docs/quickstart.md shows."""
    stats = ours["stats"]
    model_data = 4 * FP32_NBYTES * numel
    table = Table(title=f"GPT-2, {numel / 1e6:.1f} M parameters, fp32, {len(plain['losses'])} steps")
    table.add_column("")
    table.add_column("plain Trainer", justify="right")
    table.add_column("--patrickstar", justify="right")
    rows = [
        ("model data", format_nbytes(model_data), format_nbytes(stats["model_data_nbytes"])),
        ("16-bit parameters alone", format_nbytes(FP16_NBYTES * numel), format_nbytes(FP16_NBYTES * numel)),
        ("model data on the device: budget", "none", format_nbytes(budget)),
        ("model data on the device: peak", format_nbytes(model_data), format_nbytes(stats["device_peak_nbytes"])),
        ("model data on the host tier: peak", "0 B", format_nbytes(stats["host_peak_nbytes"])),
        ("moved host -> device per step", "0 B", per_step(ours, "host_to_device_nbytes")),
        *([("    without the plan", "0 B", per_step(unplanned, "host_to_device_nbytes"))] if unplanned else []),
        ("moved device -> host per step", "0 B", per_step(ours, "device_to_host_nbytes")),
        ("chunks loaded per step, of them ahead", "0", loads_per_step(stats)),
        ("process peak (RSS)", format_nbytes(plain["rss"]), format_nbytes(ours["rss"])),
        ("seconds per step", f"{plain['seconds']:.3f}", f"{ours['seconds']:.3f}"),
        ("first loss", f"{plain['losses'][0]:.6f}", f"{ours['losses'][0]:.6f}"),
        ("last loss", f"{plain['losses'][-1]:.6f}", f"{ours['losses'][-1]:.6f}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def make_plan(folder: pathlib.Path, checkpoint: pathlib.Path, budget: int) -> dict:
    """Plans the run that was just made, for this machine, in a process of its own; returns the plan."""
    file = folder / "plan.json"
    command = [
        *(sys.executable, "-m", "hf_patrickstar", "plan", str(checkpoint), "--machine", "this", "--dtype", "fp32"),
        *("--batch-size", str(BATCH_SIZE), "--seq-len", str(BLOCK_SIZE), "--set", f"chunk_budget={budget}B"),
        *("--optimizer", "adamw", "--no-advice", "--json", str(file), "--html", str(folder / "plan.html")),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode != 0:
        raise SystemExit(f"quickstart: the plan failed: {process.stderr}")
    return json.loads(file.read_text())


def make_plan_table(plan: dict, ours: dict) -> Table:
    """What was planned, beside what the run measured."""
    stats, speed = ours["stats"], plan["speed"]
    table = Table(title="The same, planned without weights (hf-patrickstar plan)")
    table.add_column("")
    table.add_column("planned", justify="right")
    table.add_column("measured", justify="right")
    rows = [
        (
            "model data on the host tier: peak",
            format_nbytes(plan["tiers"]["host"]["need_nbytes"]),
            format_nbytes(stats["host_peak_nbytes"]),
        ),
        (
            "moved host -> device per step",
            format_nbytes(speed["to_device_nbytes"]),
            per_step(ours, "host_to_device_nbytes"),
        ),
        (
            "moved device -> host per step",
            format_nbytes(speed["to_host_nbytes"]),
            per_step(ours, "device_to_host_nbytes"),
        ),
        ("seconds per step", f"{speed['seconds']:.3f}", f"{ours['seconds']:.3f}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    """Runs everything and says ``quickstart: ok`` only if every promise held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default=str(ROOT / "quickstart_output"), help="where everything is written")
    parser.add_argument(
        "--short", action="store_true", help="train a smaller model for fewer steps, with the plan only"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    begin = time.time()
    console, number = Console(), itertools.count(1)
    size = SHORT if arguments.short else FULL
    folder = pathlib.Path(arguments.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    console.print(
        f"{next(number)}. Building a corpus from the standard library's sources, a tokenizer and a checkpoint ..."
    )
    corpus = build_corpus(folder, size.corpus_nbytes)
    checkpoint, numel = build_checkpoint(folder, corpus, size)
    budget = int(BUDGET_SHARE * FP16_NBYTES * numel)
    console.print(f"{next(number)}. Fine-tuning it with the plain Trainer ...")
    steps = ("--max_steps", str(size.num_steps))
    plain = fine_tune("plain", folder, checkpoint, corpus, *steps)
    console.print(f"{next(number)}. Fine-tuning it with --patrickstar in a budget of {format_nbytes(budget)} ...")
    config = {"chunk_budget": f"{budget}B"}
    options = ("--patrickstar", "--patrickstar_config")
    ours = fine_tune("patrickstar", folder, checkpoint, corpus, *options, json.dumps(config), *steps)
    unplanned = None
    if not arguments.short:
        console.print(f"{next(number)}. A few steps without the plan: chunks leave in list order, none comes ahead ...")
        few = ("--max_steps", str(NUM_STEPS_WITHOUT_PLAN))
        unplanned = fine_tune("unplanned", folder, checkpoint, corpus, *options, json.dumps(config | NO_PLAN), *few)
    console.print(f"{next(number)}. Planning the same, without weights ...")
    plan = make_plan(folder, checkpoint, budget)
    console.print(f"{next(number)}. Loading the results with plain from_pretrained ...")
    peak = ours["stats"]["device_peak_nbytes"]
    promises = {
        "the losses of both runs are the same, bit for bit": plain["losses"] == ours["losses"],
        "the loss went down": plain["losses"][-1] < plain["losses"][0],
        "the saved weights are the same, bit for bit": same_weights(plain["output"], ours["output"]),
        "the budget is smaller than the 16-bit parameters": budget < FP16_NBYTES * numel,
        "the device stayed within its budget": 0 < peak <= budget,
    }
    if unplanned is not None:
        moved = [run["stats"]["host_to_device_nbytes"] / run["stats"]["steps"] for run in (ours, unplanned)]
        promises["planning reduced host-to-device traffic"] = moved[0] < moved[1]
    console.print(make_table(plain, ours, unplanned, numel, budget))
    console.print(make_plan_table(plan, ours))
    broken = [promise for promise, held in promises.items() if not held]
    for promise, held in promises.items():
        console.print(f"  [{'green' if held else 'red'}]{'yes' if held else 'NO '}[/] {promise}")
    console.print(f"The fine-tuned checkpoint is in {ours['output']} ({time.time() - begin:.0f} s).")
    console.print(f"The page of the plan is {folder / 'plan.html'}. This command makes a page of the run:")
    console.print(f"  {pathlib.Path(sys.executable).parent / 'hf-patrickstar'} report {ours['output']}", soft_wrap=True)
    if broken:
        raise SystemExit("quickstart: failed: " + "; ".join(broken))
    print("quickstart: ok")


if __name__ == "__main__":
    main()
