"""What scripts generate for the documentation is what is committed: the page of settings, and pictures."""

import dataclasses
import json
import pathlib
import re
import xml.etree.ElementTree

import pytest

import hf_patrickstar
from hf_patrickstar.config import PatrickStarConfig

DOCS = pathlib.Path(hf_patrickstar.__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def page(script):
    return script("site/configuration_page.py")


@pytest.fixture(scope="module")
def pictures(script):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'hf_patrickstar[docs]')")
    return script("site/pictures.py")


def test_the_picture_of_the_largest_models_has_the_figures_of_the_result_and_says_that_none_was_measured(script):
    models = script("draw_largest_models.py")
    text = models.PICTURE.read_text()
    assert text == models.draw(), "run: python scripts/draw_largest_models.py"
    said = " ".join(xml.etree.ElementTree.fromstring(text).itertext())
    assert "not measured" in said
    for _, sizes in models.rows():
        assert all(f"{size[:-1]} B" in said for size in sizes)
    assert "docs/largest_models.svg" in (DOCS.parent / "README.md").read_text()


def test_the_committed_page_is_the_generated_one(page):
    assert page.TARGET.read_text() == page.write_page(), "run python scripts/site/configuration_page.py"


def test_the_defaults_on_the_page_are_those_of_the_class(page):
    text = page.TARGET.read_text()
    defaults = dict(re.findall(r"^### (\w+)\n\n`(.*?)` \(default\)", text, re.MULTILINE))
    assert set(defaults) == {field.name for field in dataclasses.fields(PatrickStarConfig)}
    given = {key: json.loads(value) for key, value in defaults.items()}
    assert PatrickStarConfig.from_any(given) == PatrickStarConfig()


def test_every_picture_is_committed_and_on_a_page(pictures):
    text = (DOCS / "concepts.md").read_text()
    for name, draw in pictures.PICTURES.items():
        assert f"({name})" in text
        drawn, committed = draw(), (DOCS / name).read_text()
        assert xml.etree.ElementTree.fromstring(drawn).tag == xml.etree.ElementTree.fromstring(committed).tag
        assert drawn == draw(), "the same picture is the same text"
