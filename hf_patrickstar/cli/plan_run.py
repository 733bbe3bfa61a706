"""What ``hf-patrickstar plan`` does once its arguments are read; it imports transformers, which takes seconds."""

import argparse
import contextlib
import dataclasses
import gc
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from hf_patrickstar.checkpoint.progress import PROGRESS_AFTER_S
from hf_patrickstar.cli.files import trace_beside, write_html
from hf_patrickstar.cli.patching import Defaults, install
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner import advice, screen
from hf_patrickstar.planner.adapters import parse_lora, read_peft
from hf_patrickstar.planner.planning import TrainingSetup, arrange, model_data_nbytes, plan_and_simulate, plan_for_runs
from hf_patrickstar.planner.search import Goal, answered, search
from hf_patrickstar.planner.simulation import Simulation
from hf_patrickstar.planner.subject import Subject
from hf_patrickstar.planner.training_plan import Plan
from hf_patrickstar.report.plan_page import plan_page
from hf_patrickstar.report.timeline import VIRTUAL
from hf_patrickstar.tracing.garbage_collection import garbage_collection_off

Say = Callable[[str], None]
Result = tuple[int, str, str | None]

_ITS_OWN = {
    "--gradient-checkpointing": "--gradient_checkpointing",
    "--batch-size": "--per_device_train_batch_size",
    "--accumulation": "--gradient_accumulation_steps",
    "--max-grad-norm": "--max_grad_norm",
    "--optimizer": "--optim",
    "--dtype": "--bf16 or --fp16",
    "--seq-len": "the one that cuts its sequences",
    "--task": "a script that trains for it",
    **dict.fromkeys(("--lora", "--peft"), "a script that adds adapters"),
    **dict.fromkeys(("--load-in-4bit", "--load-in-8bit"), "a script that loads a quantized model"),
}
"""Options of the command that a script's own arguments take the place of."""


def run_plan(options: argparse.Namespace, tell: Say) -> Result:
    """Says the plan, or what a search has found.

    Args:
        options: What is asked.
        tell: Prints a text at once.

    Returns:
        The exit status: 0 if it fits and 1 if it does not; what ``--json`` writes; and the key of the traces that runs
        follow, or ``None``.

    Raises:
        ConfigError: If an argument makes no sense, or a file cannot be written.
    """

    def say(text: str) -> None:
        tell(screen.wrapped(text))

    subject, given = _arrange_script(options) if options.script else _arrange(options)
    if options.search is not None:
        return _search(options, say, subject, given)
    words = in_words_of_the_script if options.script else str
    length = subject.length if options.seq_len is None and subject.unit == "tokens" and not options.script else None
    # First, since all else is slower.
    say(screen.describe_memory(*model_data_nbytes(subject, given), given.machine, length))
    plan, simulation = plan_for_runs(subject, given)
    say(screen.describe(plan, is_verbose=options.verbose))
    if not options.no_advice:
        with _showing("trying changes") as progress:
            tried = advice.advise(subject, given, plan, progress)
            fitting = advice.largest_that_fit(plan, subject, given, progress)
        changes = tuple(dataclasses.replace(change, text=words(change.text)) for change in tried.changes or ())
        plan = dataclasses.replace(tried, changes=changes, largest=fitting)
        say(words(screen.describe_changes(plan)))
    say(screen.caveat(is_verbose=options.verbose))
    largest = [words(text) for text in screen.largest_of(plan)]
    _show(options, plan, simulation, changes=screen.changes_of(plan), largest=largest)
    return int(not plan.fits), plan.to_json(), None if simulation is None else simulation.known.key


def _search(options: argparse.Namespace, say: Say, subject: Subject, given: TrainingSetup) -> Result:
    for option, given_there in (("device", options.device_memory), ("host", options.host_memory)):
        if options.search == Goal.CHEAPEST and given_there is not None:
            raise ConfigError(f"--{option}-memory: a search for the cheapest machine takes what each has; leave it out")
    with _showing("searching") as progress:
        found = search(options.search, subject, given, progress)
    say(screen.describe_found(found))
    if found.plan is not None:
        say(f"\n{screen.describe(found.plan, is_verbose=options.verbose)}")
        say(screen.caveat(is_verbose=options.verbose))
    if options.html is not None and found.plan is None:
        say("Nothing is written for --html; a plan without --search says what is missing.")
    elif options.html is not None:  # the step is simulated once more, to be recorded
        _show(options, *plan_and_simulate(*answered(found, subject, given)), found=screen.describe_found(found))
    return int(found.plan is None), found.to_json(), None


@contextlib.contextmanager
def _showing(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on stderr, if that is a terminal, which plan is being made, once all of them have taken two seconds.

    Args:
        what: What the plans are for.
    """
    with tqdm(desc=what, unit="plan", leave=False, delay=PROGRESS_AFTER_S, disable=None) as bar:

        def progress(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield progress


def _show(options: argparse.Namespace, plan: Plan, simulation: Simulation | None, **more: Any) -> None:
    """Writes the page of a plan, if it was asked for, and its timeline as ``NAME.trace.json`` if it fits.

    Args:
        options: ``html`` names the file; older ones are replaced.
        plan: The plan.
        simulation: The step that it was made from; ``None`` if it does not fit.
        **more: As for ``plan_page``.

    Raises:
        ConfigError: If a file cannot be written.
    """
    if options.html is None:
        return
    title, verdict = screen.headline(plan).split("\n", 1)
    survey, timeline = (None, None) if simulation is None else (simulation.survey, simulation.timeline)
    trace_name = None if timeline is None else trace_beside(options.html).name
    page = plan_page(json.loads(plan.to_json()), title, verdict, survey, timeline, trace_name=trace_name, **more)
    write_html(page, timeline, options.html, VIRTUAL)


def _arrange(options: argparse.Namespace) -> tuple[Subject, TrainingSetup]:
    if options.model is None:
        raise ConfigError("what should be planned? Give MODEL, or -- SCRIPT ARGS...")
    given = {name: getattr(options, name) for name in ("task", "batch_size", "dtype", "optimizer")}
    given |= {"length": options.seq_len, "num_micro_batches": options.accumulation}
    given |= {"checkpointing": options.gradient_checkpointing, "max_norm": options.max_grad_norm or None}
    given |= {"adapters": _adapters(options), "bits": _bits(options), **_machine_of(options)}
    with garbage_collection_off():  # the code of the model is loaded
        found = arrange(options.model, options.machine, **given)
    gc.freeze()  # that code, too, until the command has ended
    return found


def _machine_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a model and a script are planned with alike."""
    given = {name: getattr(options, name) for name in ("device_memory", "host_memory", "host_cores", "disk_memory")}
    return given | {"world_size": options.processes, "settings": settings_of(options.set)}


def _adapters(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.lora is not None and options.peft is not None:
        raise ConfigError("--lora and --peft are both given; keep one of them")
    if options.lora is not None:
        if not options.lora.strip():
            raise ConfigError("--lora: there are no settings of adapters; write at least one, such as r=16")
        return parse_lora(options.lora)
    return None if options.peft is None else read_peft(options.peft)


def _bits(options: argparse.Namespace) -> int | None:
    if options.load_in_4bit and options.load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit are both given; keep one of them")
    return 4 if options.load_in_4bit else 8 if options.load_in_8bit else None


def _arrange_script(options: argparse.Namespace) -> tuple[Subject, TrainingSetup]:
    """Runs the script up to its training; see ``arrange_script``.

    Raises:
        ConfigError: If an argument makes no sense, or the script never trains.
    """
    with contextlib.suppress(ConfigError):  # where transformers is imported already, scripts say what they use
        install(Defaults())
    # This imports the Trainer.
    from hf_patrickstar.planner.script_subject import arrange_script

    if options.model is not None:
        raise ConfigError(f"'{options.model}' and a script after -- are both given; keep one of them")
    for name, instead in _ITS_OWN.items():
        key = name.removeprefix("--").replace("-", "_")
        if getattr(options, key) != options.defaults[key]:
            raise ConfigError(f"{name}: the script says this by its own arguments; give {instead} after SCRIPT")
    path, *arguments = options.script
    return arrange_script(path, arguments, options.machine, **_machine_of(options))


def in_words_of_the_script(text: str) -> str:
    """A plan's text with the names that a Trainer's arguments have in place of the command's.

    Args:
        text: The text.
    """
    text = re.sub(r"--seq-len \d+", "by the script's own option that cuts sequences", text)
    for name, instead in _ITS_OWN.items():
        if instead.startswith("--"):
            text = re.sub(rf"{name}\b", instead, text)
    return text


def settings_of(texts: list[str]) -> dict[str, Any]:
    """Reads what ``--set`` was given.

    Raises:
        ConfigError: If one is no setting.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: '{text}' is no setting; write KEY=VALUE")
        settings[key] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A value as in JSON, with any case of true, false and null; everything else is text."""
    with contextlib.suppress(ValueError):
        return json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
    return text
