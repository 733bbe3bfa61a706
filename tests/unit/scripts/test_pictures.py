"""The pictures of the documentation are drawn from what the pages say."""

import pathlib
import re
import sys
import xml.etree.ElementTree

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent

pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'hf_patrickstar[docs]')")


@pytest.fixture(scope="module")
def pictures():
    sys.path.insert(0, str(ROOT / "scripts" / "site"))
    try:
        import pictures
    finally:
        sys.path.remove(str(ROOT / "scripts" / "site"))
    return pictures


def test_every_picture_is_committed_and_on_a_page(pictures):
    text = (ROOT / "docs" / "concepts.md").read_text()
    for name, draw in pictures.PICTURES.items():
        assert f"({name})" in text
        drawn, committed = draw(), (ROOT / "docs" / name).read_text()
        assert xml.etree.ElementTree.fromstring(drawn).tag == xml.etree.ElementTree.fromstring(committed).tag
        assert drawn == draw(), "the same picture is the same text"


def test_the_flow_chart_of_the_architecture_is_read_whole(pictures):
    *_, chart = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    flow = pictures.read_flow(chart)
    assert len(flow.edges) == chart.count("-->")
    assert {name for start, end, _ in flow.edges for name in (start, end)} == set(flow.labels)
    assert flow.labels["hooks"] == "hooks.py, autograd.py\ntorch's events"
    assert ("executor", "copies", "load, evict") in flow.edges
