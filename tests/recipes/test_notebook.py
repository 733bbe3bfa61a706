"""The notebook runs from its first cell to its last, in one process as in Jupyter."""

import ast
import json

import torch
from matplotlib.figure import Figure
from support.running import ROOT


def run_cells(path, names):
    """Runs every cell of code; returns what the last expression of each is."""
    shown = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        assert not cell.get("outputs"), f"cell {number} has outputs; clear them before committing"
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), names))
    return shown


def test_the_notebook_fine_tunes_draws_and_loads(recipe, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names = {"__name__": "__main__"}
    shown = run_cells(ROOT / "recipes" / "finetune_and_look.ipynb", names)
    losses = [loss for _, loss in names["losses"]]
    assert losses[-1] < losses[0]
    assert any(isinstance(found, Figure) for found in shown)
    assert shown[-2][1] == "the same weights"
    assert shown[-2][0].startswith("two plus three is")
    assert shown[-1]["steps"] == 40
    tide = names["tide"]
    assert max(tide.totals) <= tide.limit_nbytes
    assert max(tide.others) > min(tide.others)
    assert shown[-1]["chunk_loads"] > 40
    names["figure"].savefig(tmp_path / "figure.png")
