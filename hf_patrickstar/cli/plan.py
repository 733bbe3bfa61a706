"""``hf-patrickstar plan``: whether a model fits, and how fast it trains, before it does."""

import argparse
import glob
import json
import os
import pathlib
from collections.abc import Sequence

from hf_patrickstar.cli.files import check_files, trace_beside, write_text
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.tracing import kept_traces
from hf_patrickstar.tracing.garbage_collection import frozen_objects, garbage_collection_off

HELP = "tell whether a model fits a machine, and how fast it trains there. It reads no weights."

_ANSWERS = "answers"
"""What was printed, so that the same question is answered without importing torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    add = parser.add_argument

    def add_number(name: str, default: int, what: str) -> None:
        add(name, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")

    text = (
        "a model id, a directory, a config.json, or TYPE:KEY=VALUE,... as in gpt2:n_layer=48,n_embd=1600; or, after "
        "--, a training script and its own arguments, which then say what is trained and how"
    )
    add("model", nargs="?", metavar="MODEL", help=text)
    text = (
        f"{', '.join(MACHINES)}; several as in 8xh100; this; or a file of 'env --measure --json' (default: %(default)s)"
    )
    add("--machine", default="rtx4090", help=text)
    add("--device-memory", metavar="SIZE", help="what training may take (default: 95%% of the device's memory)")
    add("--host-memory", metavar="SIZE", help="for each process (default: 90%% of its share of the host)")
    add("--disk-memory", metavar="SIZE", help="for optimizer states of each process, on NVMe (default: none)")
    add("--host-cores", type=int, metavar="N", help="cores of the host for each process (default: its share of all)")
    add("--task", help="causal-lm, masked-lm, ... (default: what the model was saved for)")
    add_number("--batch-size", 1, "sequences of a micro-batch on each process")
    add("--seq-len", type=int, help="tokens of a sequence (default: the model's positions, at most 4096)")
    add_number("--accumulation", 1, "micro-batches of an optimizer step")
    add_number("--processes", 1, "processes, each on a device of the machine")
    add("--dtype", default="bf16", help="bf16, fp16, fp32 or auto (default: %(default)s)")
    text = "a class of torch.optim, or of bitsandbytes as --optim has it: adamw_8bit (default: %(default)s)"
    add("--optimizer", "--optim", default="adamw", help=text)
    add("--gradient-checkpointing", action="store_true", help="recompute activations in backward")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm, or 0 (default: %(default)s)")
    text = "a setting of patrickstar_config; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "train adapters over a frozen model: r=16,alpha=32,targets=q_proj+v_proj, each optional (needs PEFT)"
    add("--lora", metavar="SETTINGS", help=text)
    add("--peft", metavar="PATH", help="the same by an adapter_config.json, or a directory with one")
    for bits in (4, 8):
        text = f"the frozen model is packed into {bits} bits (needs bitsandbytes, and --lora or --peft)"
        add(f"--load-in-{bits}bit", action="store_true", help=text)
    text = "what to look for: max-batch, max-seq-len, max-model (more layers), or cheapest-machine (of those known)"
    add("--search", metavar="GOAL", help=text)
    add("--no-advice", action="store_true", help="do not plan changes, which takes longest")
    add("--verbose", action="store_true", help="print every kind of memory, and what was decided and why")
    add("--json", metavar="FILE", help="write the plan there too; an older file is replaced")
    text = "write a page of the plan there, and the timeline for Perfetto beside it; older files are replaced"
    add("--html", metavar="FILE", help=text)
    parser.set_defaults(defaults={action.dest: action.default for action in parser._actions})


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns 0 if it fits and 1 if it does not.

    Raises:
        ConfigError: If an argument makes no sense, or the file cannot be written.
    """
    given = {f"--{option}": getattr(options, option) for option in ("json", "html")}
    if options.html:
        given["the timeline of --html"] = str(trace_beside(options.html))
    check_files({option: name for option, name in given.items() if name is not None})
    key = _key_of(options)
    found = None if key is None else kept_traces.read(_ANSWERS, key)
    texts, status, data, traces = json.loads(found or '[[], 0, "", null]')
    if found is not None and (traces is None or kept_traces.read(kept_traces.TRACES, traces) is not None):
        print("\n".join(texts))
    else:
        texts.clear()

        def say(text: str) -> None:
            print(text, flush=True)
            texts.append(text)

        with garbage_collection_off():
            from hf_patrickstar.cli.plan_run import run_plan
        with frozen_objects():
            status, data, traces = run_plan(options, say)
        if key is not None:
            kept_traces.write(_ANSWERS, key, json.dumps([texts, status, data, traces]).encode())
    if options.json is not None:
        write_text(options.json, data, "--json")
    return int(status)


def _key_of(options: argparse.Namespace) -> str | None:
    """Names a question; ``None`` if its answer depends on more than options and files, or a page is to be written."""
    if options.script or options.html or options.model is None or options.machine == "this":
        return None
    names = [options.model, options.machine, options.peft or "", *(text.partition("=")[2] for text in options.set)]
    try:
        if not os.path.exists(options.model) and ":" not in options.model:
            from huggingface_hub import hf_hub_download

            names.append(hf_hub_download(options.model, "config.json"))
        files = [file for name in names for file in (name, *sorted(glob.glob(f"{glob.escape(name)}/*.json")))]
        known = [pathlib.Path(file).read_bytes() for file in files if os.path.isfile(file)]
    except Exception:  # what the hub raises may be anything; the plan tells it in a sentence
        return None
    asked = {name: value for name, value in vars(options).items() if name not in ("run", "defaults", "json")}
    return kept_traces.digest([sorted(asked.items()), known])


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at the first ``--``.

    Args:
        words: The command line.

    Returns:
        What stands before it, and the script with its arguments.
    """
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])
