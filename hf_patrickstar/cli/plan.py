"""``hf-patrickstar plan``: whether a model fits, and how fast it trains, before it does."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hf_patrickstar.cli.files import check_files, trace_beside, write_text
from hf_patrickstar.cli.plan_script import arrange_from, in_words_of_the_script
from hf_patrickstar.cli.plan_search import run_search, showing
from hf_patrickstar.cli.settings import settings_of
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.report.timeline import check_plots
from hf_patrickstar.tracing.garbage import no_collections, objects_set_aside

if TYPE_CHECKING:
    from hf_patrickstar.planner.plan import Plan
    from hf_patrickstar.planner.planning import Circumstances
    from hf_patrickstar.planner.simulation import Simulation
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
    parser.add_argument(
        "--lora",
        metavar="SETTINGS",
        help="train adapters over a frozen model: r=16,alpha=32,targets=q_proj+v_proj, each optional (needs PEFT)",
    )
    parser.add_argument("--peft", metavar="PATH", help="the same by an adapter_config.json, or a directory with one")
    parser.add_argument(
        "--search",
        metavar="GOAL",
        help="what to look for: max-batch, max-seq-len, max-model (more layers), or cheapest-machine (of those known)",
    )
    parser.add_argument(
        "--no-advice", action="store_true", help="do not try what could be changed: several times as quick"
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
    given = {f"--{option}": getattr(options, option) for option in ("json", "html", "png")}
    if options.html:
        given["the timeline of --html"] = str(trace_beside(options.html))
    check_files({option: name for option, name in given.items() if name is not None})
    if options.png is not None:
        check_plots()
    with no_collections():  # transformers takes seconds to import, and other commands do without
        from hf_patrickstar.planner.planning import plan_for_runs
    with objects_set_aside():
        subject, circumstances = arrange_from(options) if options.script else _arrange(options)
        if options.search is not None:
            return run_search(options, subject, circumstances)
        plan, simulation = plan_for_runs(subject, circumstances)
        return _tell(options, subject, circumstances, plan, simulation)


def _tell(
    options: argparse.Namespace,
    subject: "Subject",
    circumstances: "Circumstances",
    plan: "Plan",
    simulation: "Simulation | None",
) -> int:
    """Prints a plan and what was tried beside it, and writes the files that were asked for."""
    from hf_patrickstar.cli.plan_page import show_plan
    from hf_patrickstar.planner.screen import changes_of, describe, describe_changes, largest_of

    words = in_words_of_the_script if options.script else str
    print(describe(plan), flush=True)  # the changes take several times as long
    if not options.no_advice:
        plan = _with_tried(plan, subject, circumstances, words)
        print(f"\n{words(describe_changes(plan))}")
    if options.json is not None:
        write_text(options.json, plan.to_json(), "--json")
    largest = [words(text) for text in largest_of(plan)]
    show_plan(options, plan, simulation, changes=changes_of(plan), largest=largest)
    return 0 if plan.fits else 1


def _with_tried(
    plan: "Plan", subject: "Subject", circumstances: "Circumstances", words: Callable[[str], str]
) -> "Plan":
    """The plan with what was tried beside it, in the words of who asked."""
    from hf_patrickstar.planner.advice import advise, largest_that_fit

    tried = advise(
        subject,
        circumstances,
        plan,
        lambda changes: tqdm(changes, desc="trying changes", unit="plan", leave=False, delay=2),
    )
    with showing("searching what fits") as progress:
        largest = largest_that_fit(plan, subject, circumstances, progress)
    changes = tuple(dataclasses.replace(change, text=words(change.text)) for change in tried)
    return dataclasses.replace(plan, changes=changes, largest=largest)


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
        adapters=_adapters(options),
    )


def _adapters(options: argparse.Namespace) -> dict[str, Any] | None:
    from hf_patrickstar.planner.adapters import parse_lora, read_peft

    if options.lora is not None and options.peft is not None:
        raise ConfigError("--lora and --peft are both given; keep one of them")
    if options.lora is not None:
        if not options.lora.strip():
            raise ConfigError("--lora: there are no settings of adapters; write at least one, such as r=16")
        return parse_lora(options.lora)
    return None if options.peft is None else read_peft(options.peft)
