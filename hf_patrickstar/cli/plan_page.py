"""What ``hf-patrickstar plan`` writes beside its text: a page, a picture, a trace for Perfetto."""

import argparse
import json
from collections.abc import Sequence

from hf_patrickstar.cli.files import trace_beside, write_html
from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.screen import headline
from hf_patrickstar.planner.simulation import Simulation
from hf_patrickstar.report.picture import write_step_picture
from hf_patrickstar.report.plan_page import plan_page
from hf_patrickstar.report.timeline import VIRTUAL


def show_plan(
    options: argparse.Namespace,
    plan: Plan,
    simulation: Simulation | None,
    *,
    changes: Sequence[str] = (),
    largest: Sequence[str] = (),
    found: str | None = None,
) -> None:
    """Writes the page of a plan and the picture of its step, as far as they were asked for.

    Beside the page the timeline is written as ``NAME.trace.json`` if the plan fits. Where there is no step to draw, a
    line on the console says so.

    Args:
        options: ``html`` and ``png`` name the files; older ones are replaced.
        plan: The plan.
        simulation: The step that it was made from; ``None`` if it does not fit.
        changes: What to change, in words.
        largest: The largest batch and the longest sequence that fit, in sentences.
        found: What the search has found that the plan comes from, in a sentence.

    Raises:
        ConfigError: If matplotlib is not installed, or a file cannot be written.
    """
    title = headline(plan).splitlines()[0]
    survey, timeline = (None, None) if simulation is None else (simulation.survey, simulation.timeline)
    if options.html is not None:
        page = plan_page(
            json.loads(plan.to_json()),
            title,
            survey,
            timeline,
            changes=changes,
            largest=largest,
            trace_name=None if timeline is None else trace_beside(options.html).name,
            found=found,
        )
        write_html(page, timeline, options.html, VIRTUAL)
    if options.png is not None and survey is not None and timeline is not None:
        write_step_picture(options.png, title, survey, timeline)
    elif options.png is not None:
        print("Nothing is written for --png: there is no step to draw, because the plan does not fit.")
