"""``hf-patrickstar report``: a page of a run, from what it has recorded."""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from hf_patrickstar.cli.files import trace_beside, write_html
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.run_page import run_page
from hf_patrickstar.report.run_record import read_run, record_folder

HELP = "make a page of a run. It shows what a run with --patrickstar has recorded."

_NAME = "_patrickstar_report.html"  # the Trainer does not upload names that begin with an underscore
_OF_PLAN = {"tiers", "speed", "chunks", "machine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the output_dir of a run with --patrickstar")
    text = f"write the page there (default: RUN_DIR/{_NAME}); an older file is replaced"
    parser.add_argument("--html", metavar="FILE", help=text)
    parser.add_argument("--plan", metavar="FILE", help="compare the run with this file of 'plan --json'")


def run(options: argparse.Namespace) -> None:
    """Writes the page, and beside it the timeline as ``NAME.trace.json`` if a step was measured.

    Raises:
        ConfigError: If there is no record of a run, the plan is none, or a file cannot be written.
    """
    found, plan = read_run(options.directory), None if options.plan is None else _read_plan(options.plan)
    path = pathlib.Path(options.directory, _NAME) if options.html is None else pathlib.Path(options.html)
    try:
        page = run_page(found, plan, None if found.timeline is None else trace_beside(path).name)
    except (KeyError, TypeError) as error:
        plan_too = "" if plan is None else f", or the plan '{options.plan}',"
        raise ConfigError(
            f"the record of the run in '{record_folder(options.directory)}'{plan_too} lacks a figure that the page "
            f"shows ({error}): was it changed by hand? Name other files"
        ) from error
    write_html(page, found.timeline, path, f"measured on {found.about['device']}")
    print(f"{path}: {len(found.steps)} logs of the training loss")


def _read_plan(path: str) -> Mapping[str, Any]:
    try:
        plan = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--plan: '{path}' cannot be read: {error.strerror}; name a file of 'plan --json'") from error
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or not plan.keys() >= _OF_PLAN:
        raise ConfigError(f"--plan: '{path}' is not a plan; name a file that 'hf-patrickstar plan --json' has written")
    return plan
