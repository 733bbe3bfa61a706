"""A page as one HTML file that needs nothing else: no network, no script, no font."""

import importlib.resources

import jinja2

from hf_patrickstar.report.blocks import Page
from hf_patrickstar.report.charts import HEIGHT, WIDTH
from hf_patrickstar.version import __version__

_TEMPLATE = "page.html"


def render(page: Page) -> str:
    """The page as HTML; every text in it is escaped.

    Args:
        page: What it says.
    """
    sections = [section for section in page.sections if section.blocks]
    return _template().render(page=page, sections=sections, width=WIDTH, height=HEIGHT, version=__version__)


def _template() -> jinja2.Template:
    text = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)
