"""``hf-patrickstar plan ... --search GOAL``."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from hf_patrickstar.cli.files import write_text
from hf_patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from hf_patrickstar.planner.planning import Circumstances
    from hf_patrickstar.planner.search import Found
    from hf_patrickstar.planner.subject import Subject


def run_search(options: argparse.Namespace, subject: "Subject", given: "Circumstances") -> int:
    """Prints what was found, and its plan; returns 0 if something fits and 1 if nothing does.

    Raises:
        ConfigError: If an option makes no sense beside a search, or a file cannot be written.
    """
    # transformers takes seconds to import, and other commands do without.
    from hf_patrickstar.planner.screen import describe, describe_found
    from hf_patrickstar.planner.search import Goal, search

    for option in ("device_memory", "host_memory"):
        if options.search == Goal.CHEAPEST and getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}: a search for the cheapest machine takes what each has; leave it out")
    with showing("searching") as progress:
        found = search(options.search, subject, given, progress)
    print(describe_found(found))
    if found.plan is not None:
        print()
        print(describe(found.plan))
    if options.json is not None:
        write_text(options.json, found.to_json(), "--json")
    if options.html is not None or options.png is not None:
        _show(options, found, subject, given)
    return 0 if found.plan is not None else 1


def _show(options: argparse.Namespace, found: "Found", subject: "Subject", given: "Circumstances") -> None:
    """Writes the page and the picture of what was found, whose step is simulated once more to be recorded."""
    from hf_patrickstar.cli.plan_page import show_plan
    from hf_patrickstar.planner.planning import plan_and_simulate
    from hf_patrickstar.planner.screen import describe_found
    from hf_patrickstar.planner.search import answered

    if found.plan is None:
        print("Nothing is written for --html or --png; a plan without --search says what is missing.")
        return
    plan, simulation = plan_and_simulate(*answered(found, subject, given))
    show_plan(options, plan, simulation, found=describe_found(found))


@contextlib.contextmanager
def showing(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on stderr which plan is being made, if it all takes longer than two seconds.

    Args:
        what: What the plans are for.
    """
    with tqdm(desc=what, unit="plan", leave=False, delay=2) as bar:

        def progress(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield progress
