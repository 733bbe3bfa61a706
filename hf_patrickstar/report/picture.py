"""A step as one picture: the tide above, the lanes below."""

import os
import textwrap

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.survey import NON_MODEL, Survey
from hf_patrickstar.report.timeline import draw_lanes, new_figure
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.units import MIB

_DPI = 120
_WIDTH = 130
"""Letters of a line of the title."""
_LOOKS = (
    ("at home on the device", {"facecolor": "#9ecae1", "hatch": "//"}),
    ("copies of chunks", {"facecolor": "#08306b"}),
    ("gradients on their way", {"facecolor": "#f0e442", "hatch": ".."}),
    (NON_MODEL, {"facecolor": "#e69f00", "hatch": "--"}),
)


def write_step_picture(path: str | os.PathLike[str], title: str, survey: Survey, timeline: Timeline) -> None:
    """Writes the last micro-batch's tide and the lanes of the step as a PNG of 1440 by 1080 pixels.

    Patterns tell kinds apart, so the picture needs no colours.

    Args:
        path: The file; an older one is replaced.
        title: What the step is.
        survey: What is on the device at each moment.
        timeline: The lanes.

    Raises:
        ConfigError: If matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(9)
    top, bottom = figure.subplots(2)
    tide = survey.tides[-1]
    places = [tide.stride * row for row in range(len(tide.totals) + 1)]
    below = [0.0] * len(tide.totals)
    columns = ([tide.fixed_nbytes] * len(below), tide.copies, tide.gradients, tide.others)
    for (label, look), column in zip(_LOOKS, columns, strict=True):
        above = [low + nbytes / MIB for low, nbytes in zip(below, column, strict=True)]
        if any(column):
            edges = [[values[0], *values] for values in (below, above)]
            top.fill_between(places, *edges, step="pre", label=label, linewidth=0, **look)
        below = above
    if tide.limit_nbytes / MIB <= 3 * max(below):
        top.axhline(tide.limit_nbytes / MIB, color="black", linestyle="-.", label="limit of the budget")
    for end in tide.forward_ends:
        top.axvline(end, color="black", linestyle=":", label="a forward ends" if end == tide.forward_ends[0] else None)
    top.set(xlabel="moment of the step", ylabel="MiB on the device", xlim=(0, places[-1]), ylim=(0, None))
    top.set_title("bytes on the device")
    figure.suptitle("\n".join(textwrap.wrap(_plain(title), _WIDTH)), fontsize="medium")
    top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    legend = draw_lanes(bottom, timeline, "the step, simulated")
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    try:
        figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}; name another file") from error


def _plain(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")
