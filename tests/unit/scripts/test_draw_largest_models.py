"""The picture of README.md shows the figures of the committed result."""

import importlib.util
import pathlib
import xml.etree.ElementTree

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent.parent
SCRIPT = ROOT / "scripts" / "draw_largest_models.py"


def test_the_picture_has_the_figures_of_the_result_and_says_that_none_was_measured():
    spec = importlib.util.spec_from_file_location("draw_largest_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PICTURE.read_text()
    assert text == module.draw(), f"run: python {SCRIPT}"
    said = " ".join(xml.etree.ElementTree.fromstring(text).itertext())
    assert "not measured" in said
    for _, sizes in module.rows():
        assert all(f"{size[:-1]} B" in said for size in sizes)
    assert "docs/largest_models.svg" in (ROOT / "README.md").read_text()
