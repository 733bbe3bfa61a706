"""Progress of making an engine, reading and saving: after two seconds, and only where transformers shows its own."""

import functools
import sys

import pytest
import torch
from transformers.utils import logging

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.checkpoint import progress


@pytest.fixture
def at_once(monkeypatch):
    """Bars are shown at once, and each time that something is done."""
    monkeypatch.setattr(progress, "PROGRESS_AFTER_S", 0)
    monkeypatch.setattr(progress, "tqdm", functools.partial(progress.tqdm, mininterval=0, miniters=1))


def work(tmp_path):
    """Makes an engine, saves it and reads it again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    engine = PatrickStarEngine(model, {"chunk_numel": 2**13}, torch.optim.AdamW(model.parameters()), device="cpu")
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    engine.detach()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_is_shown_on_a_terminal(is_terminal, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    work(tmp_path)
    text = capsys.readouterr().err
    for what in ("Moving weights into chunks", "Writing", "Reading weights"):
        assert (what in text) == is_terminal, what
    assert ("Moving weights into chunks: 100%" in text) == is_terminal


@pytest.mark.usefixtures("at_once")
def test_nothing_is_shown_where_transformers_shows_nothing_or_by_another_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logging.disable_progress_bar()
    try:
        work(tmp_path)
    finally:
        logging.enable_progress_bar()
    assert list(progress.shown([1, 2], "Reading", "files", is_first=False)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_what_is_done_in_two_seconds_is_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work(tmp_path)
    assert capsys.readouterr().err == ""
