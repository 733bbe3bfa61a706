"""What ``hf-patrickstar plan`` writes beside its text: a page, a picture, a trace for Perfetto."""

import json
from collections.abc import Sequence

from hf_patrickstar.cli.files import trace_beside, write_trace_beside
from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.screen import headline
from hf_patrickstar.planner.simulation import Simulation
from hf_patrickstar.report.page import write_page
from hf_patrickstar.report.picture import write_step_picture
from hf_patrickstar.report.plan_page import plan_page


def write_plan_page(
    plan: Plan,
    simulation: Simulation | None,
    html_file: str,
    *,
    changes: Sequence[str] = (),
    largest: Sequence[str] = (),
    found: str | None = None,
) -> None:
    """Writes the page of a plan, and beside it the timeline as ``NAME.trace.json`` if the plan fits.

    Args:
        plan: The plan.
        simulation: The step that it was made from; ``None`` if it does not fit.
        html_file: The page; an older file is replaced.
        changes: What to change, in words.
        largest: The largest batch and the longest sequence that fit, in sentences.
        found: What the search has found that the plan comes from, in a sentence.

    Raises:
        ConfigError: If a file cannot be written.
    """
    page = plan_page(
        json.loads(plan.to_json()),
        headline(plan).splitlines()[0],
        None if simulation is None else simulation.survey,
        None if simulation is None else simulation.timeline,
        changes=changes,
        largest=largest,
        trace_name=None if simulation is None else trace_beside(html_file).name,
        found=found,
    )
    write_page(page, html_file, "--html")
    if simulation is not None:
        write_trace_beside(simulation.timeline, html_file)


def write_plan_picture(plan: Plan, simulation: Simulation | None, png_file: str) -> None:
    """Writes the tide and the lanes of a step as a PNG; where there is no step to draw, it says so.

    Args:
        plan: The plan.
        simulation: The step that it was made from; ``None`` if it does not fit.
        png_file: The picture; an older file is replaced.

    Raises:
        ConfigError: If matplotlib is not installed, or the file cannot be written.
    """
    if simulation is None:
        print("Nothing is written for --png: there is no step to draw, because the plan does not fit.")
        return
    write_step_picture(png_file, headline(plan).splitlines()[0], simulation.survey, simulation.timeline)
