"""``hf-patrickstar plan``: whether a model fits, and how fast it trains, before it does."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hf_patrickstar.cli.files import check_file
from hf_patrickstar.cli.plan_script import arrange_from, in_words_of_the_script
from hf_patrickstar.cli.settings import settings_of
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import MACHINES

if TYPE_CHECKING:
    from hf_patrickstar.planner.advice import Advice
    from hf_patrickstar.planner.plan import Plan
    from hf_patrickstar.planner.planning import Circumstances
    from hf_patrickstar.planner.search import Found
    from hf_patrickstar.planner.subject import Subject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model id, a directory, a config.json, or TYPE:KEY=VALUE,... as in gpt2:n_layer=48,n_embd=1600; or, "
        "after --, a training script and its own arguments, which then say what is trained and how",
    )
    parser.add_argument(
        "--machine", default="rtx4090", help=f"{', '.join(MACHINES)}, this, or a file of 'env --measure --json'"
    )
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="what training may take; by default 95 %% of the device"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="for each process; by default 90 %% of the host's share")
    parser.add_argument("--task", help="causal-lm, masked-lm, ...; by default what the model was saved for")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of a micro-batch on each process")
    parser.add_argument(
        "--seq-len", type=int, help="tokens of a sequence; by default the model's positions, at most 512"
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--processes", type=int, default=1, help="processes, each on a device of the machine")
    parser.add_argument("--dtype", default="bf16", help="dtype of the settings: bf16, fp16, fp32 or auto")
    parser.add_argument("--optimizer", default="adamw", help="a class of torch.optim")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm; 0 does not")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of patrickstar_config; may be repeated",
    )
    adapter = parser.add_mutually_exclusive_group()
    adapter.add_argument(
        "--lora",
        nargs="?",
        const="",
        metavar="r=16,targets=q_proj+v_proj",
        help="train adapters of LoRA over the frozen model; by default of all linear layers",
    )
    adapter.add_argument("--peft", metavar="FILE", help="train the adapter of an adapter_config.json, or its directory")
    parser.add_argument(
        "--search",
        metavar="GOAL",
        help="max-batch, max-seq-len, max-model (more layers) or cheapest-machine: the largest that fits, and its plan",
    )
    parser.add_argument(
        "--no-advice", action="store_true", help="do not try what could be changed: four times as quick"
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan there too; an older file is replaced")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page of the plan there, and the timeline for Perfetto beside it; older files are replaced",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the tide and the lanes of a step there")


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns 0 if it fits and 1 if it does not.

    Raises:
        ConfigError: If an argument makes no sense, or the file cannot be written.
    """
    for option in ("json", "html", "png"):
        if (name := getattr(options, option)) is not None:
            check_file(name, f"--{option}")
    # transformers takes seconds to import, and other commands do without.
    from hf_patrickstar.cli.plan_page import write_plan_page, write_plan_picture
    from hf_patrickstar.planner.planning import plan_and_record
    from hf_patrickstar.planner.screen import describe, found_in_words

    subject, circumstances = arrange_from(options) if options.script else _arrange(options)
    text, found = "", None
    if options.search is not None:
        found = _search(options, subject, circumstances)
        text = f"{found_in_words(found)}\n\n"
        if found.plan is None or found.subject is None or found.circumstances is None:
            print(text.strip())
            _write(options.json, found.to_json())
            return 1
        subject, circumstances = found.subject, found.circumstances
    plan, recording = plan_and_record(subject, circumstances)
    advice, smaller = ([], []) if options.no_advice or found else _advise(options, subject, circumstances, plan)
    print(f"{text}{describe(plan, advice, smaller)}")
    _write(options.json, plan.to_json() if found is None else found.to_json())
    if options.html is not None:
        write_plan_page(plan, recording, advice, options.html)
    if options.png is not None:
        write_plan_picture(plan, recording, options.png)
    return 0 if plan.fits else 1


def _search(options: argparse.Namespace, subject: "Subject", circumstances: "Circumstances") -> "Found":
    from hf_patrickstar.planner.search import Goal, search

    if options.script and options.search == Goal.MAX_MODEL:
        raise ConfigError("--search max-model: the script says which model it trains; give MODEL in its place")
    with tqdm(desc="searching", unit="plan", leave=False, delay=2) as bar:

        def tell(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        return search(options.search, subject, circumstances, tell)


def _advise(
    options: argparse.Namespace, subject: "Subject", circumstances: "Circumstances", plan: "Plan"
) -> "tuple[list[Advice], list[Found]]":
    """What to change, and if the plan does not fit, the largest that do."""
    from hf_patrickstar.planner.advice import advise
    from hf_patrickstar.planner.search import what_fits

    advice = advise(
        subject,
        circumstances,
        plan,
        lambda changes: tqdm(changes, desc="trying changes", unit="plan", leave=False, delay=2),
    )
    smaller = [] if plan.fits else list(what_fits(subject, circumstances))
    if options.script:
        advice = [dataclasses.replace(item, text=in_words_of_the_script(item.text)) for item in advice]
    return advice, smaller


def _write(name: str | None, text: str) -> None:
    if name is None:
        return
    try:
        pathlib.Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: '{name}' cannot be written: {error.strerror}") from error


def _arrange(options: argparse.Namespace) -> "tuple[Subject, Circumstances]":
    from hf_patrickstar.planner.planning import arrange

    if options.model is None:
        raise ConfigError("what should be planned? Give MODEL, or -- SCRIPT ARGS...")
    return arrange(
        options.model,
        options.machine,
        task=options.task,
        batch_size=options.batch_size,
        length=options.seq_len,
        num_micro_batches=options.accumulation,
        world_size=options.processes,
        checkpointing=options.gradient_checkpointing,
        dtype=options.dtype,
        optimizer=options.optimizer,
        max_norm=options.max_grad_norm or None,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        settings=settings_of(options.set),
        adapter=_adapter(options),
    )


def _adapter(options: argparse.Namespace) -> Any:
    from hf_patrickstar.planner.adapters import parse_lora, read_adapter

    if options.peft is not None:
        return read_adapter(options.peft)
    return None if options.lora is None else parse_lora(options.lora)
