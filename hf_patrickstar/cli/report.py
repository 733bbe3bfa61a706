"""``hf-patrickstar report``: a page of a run, from what it has recorded."""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from hf_patrickstar.cli.files import trace_beside, write_html
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.run_page import SAME, run_page
from hf_patrickstar.report.run_record import read_run, record_folder

_OF_SPEED = ("seconds", "to_device_nbytes", "to_host_nbytes")
_NUMBERS = (_OF_SPEED, ("num", "num_on_device"), ("need_nbytes",), ("need_nbytes",))
"""The numbers that are shown: of the speed, of the chunks and of each tier."""
_NAME = "patrickstar_report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the output_dir of a run with --patrickstar")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help=f"where to write the page; by default RUN_DIR/_{_NAME}. An older file is replaced",
    )
    parser.add_argument("--plan", metavar="FILE", help="a plan of 'plan --json', whose figures are shown beside")


def run(options: argparse.Namespace) -> None:
    """Writes the page, and beside it the timeline as ``NAME.trace.json`` if a step was measured.

    Raises:
        ConfigError: If there is no record of a run, the plan is none, or a file cannot be written.
    """
    found = read_run(options.directory)
    plan = None if options.plan is None else _read_plan(options.plan)
    # The Trainer does not upload names that begin with an underscore.
    path = pathlib.Path(options.html) if options.html is not None else pathlib.Path(options.directory) / f"_{_NAME}"
    try:
        page = run_page(found, plan, None if found.timeline is None else trace_beside(path).name)
    except KeyError as error:
        raise ConfigError(
            f"the record of a run in '{record_folder(options.directory)}' lacks {error}, which the page shows: "
            "was it changed by hand? Name the output_dir of another run"
        ) from error
    write_html(page, found.timeline, path, f"measured on {found.about['device']}")
    print(f"{path}: {len(found.steps)} logs of a training loss")


def _read_plan(path: str) -> Mapping[str, Any]:
    try:
        plan = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--plan: '{path}' cannot be read: {error.strerror}; name a file of 'hf-patrickstar plan --json'"
        ) from error
    except ValueError:
        plan = None
    if not _is_plan(plan):
        raise ConfigError(
            f"--plan: '{path}' is not a plan that 'hf-patrickstar plan --json' has written; name such a file"
        )
    return plan


def _is_plan(values: Any) -> bool:
    """Whether it has what is shown of a plan; a search writes its plan inside of what it has found."""
    try:
        parts = [values["speed"] or {}, values["chunks"] or {}, *(values["tiers"][tier.value] for tier in Tier)]
        numbers = [values[name] for name in SAME]
        numbers += [part[name] for part, names in zip(parts, _NUMBERS, strict=True) for name in names if part]
    except (KeyError, TypeError):
        return False
    return all(isinstance(number, int | float) for number in numbers)
