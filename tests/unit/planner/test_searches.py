"""Searches: the answer fits, the next larger one does not, and few plans were made."""

import dataclasses
import json

import pytest
from support.pages import PageReader, check_alone

from hf_patrickstar.cli.main import main
from hf_patrickstar.machine import BY_PRICE, MACHINES
from hf_patrickstar.planner import search as searching
from hf_patrickstar.planner.planning import arrange, plan_if_fits
from hf_patrickstar.planner.screen import describe_found
from hf_patrickstar.planner.search import Found, Goal, answered, search, search_below
from hf_patrickstar.units import MIB

MODEL = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=512,n_positions=1024"
GIVEN = {"batch_size": 2, "length": 64, "device_memory": 8 * MIB, "host_memory": 64 * MIB}


def small(**changes):
    return arrange(MODEL, "rtx4090", **{**GIVEN, **changes})


def fits(subject, given):
    """Whether there is a plan."""
    return plan_if_fits(subject, given) is not None


def fit_up_to(limit, size_of, plan, monkeypatch):
    """Lets whatever is searched through fit up to a limit, with the same plan; returns the sizes that are tried."""
    tried = []

    def fake(subject, given):
        tried.append(size_of(subject))
        return plan if tried[-1] <= limit else None

    monkeypatch.setattr(searching, "plan_if_fits", fake)
    return tried


def test_the_largest_batch_fits_and_one_more_does_not():
    subject, given = small()
    found = search("max-batch", subject, given)
    assert found.answer > 2
    assert found.refused == found.answer + 1
    assert found.plan.fits
    assert found.plan.batch_size == found.answer
    assert plan_if_fits(dataclasses.replace(subject, batch_size=found.answer, length=64), given) == found.plan
    assert not fits(dataclasses.replace(subject, batch_size=found.refused, length=64), given)
    assert found.num_plans <= 8


def test_the_longest_sequence_is_searched_in_steps_of_64():
    subject, given = small(batch_size=1, device_memory=4 * MIB)
    found = search(Goal.MAX_LENGTH, subject, given)
    assert found.answer % 64 == 0
    assert found.refused == found.answer + 64
    assert found.plan.length == found.answer
    assert not fits(dataclasses.replace(subject, batch_size=1, length=found.refused), given)
    again, same = answered(found, subject, given)
    assert (again.length, again.batch_size, same) == (found.answer, 1, given)


@pytest.mark.parametrize(("limit", "length"), [(1, 8), (63, 60), (63, 64), (0, 8)])
def test_shorter_sequences_are_tried_where_64_tokens_do_not_fit(limit, length, monkeypatch):
    subject, given = small(length=length, batch_size=1)
    plan = plan_if_fits(dataclasses.replace(subject, batch_size=1, length=8), given)
    tried = fit_up_to(limit, lambda subject: subject.length, plan, monkeypatch)
    found = search(Goal.MAX_LENGTH, subject, given)
    assert (found.answer, found.refused) == (limit or None, limit + 1)
    assert len(tried) == len(set(tried)) == found.num_plans
    below = search_below(Goal.MAX_LENGTH, dataclasses.replace(subject, batch_size=1, length=50), given)
    assert below.answer == (min(limit, 49) or None)
    assert max(tried[found.num_plans :]) < 50
    if not limit:
        assert describe_found(found).startswith("max-seq-len: nothing fits, not even 1 token (")


def test_the_largest_model_has_more_layers_and_the_same_heads():
    subject, given = small(host_memory=4 * MIB, device_memory=4 * MIB, batch_size=1)
    found = search(Goal.MAX_MODEL, subject, given)
    assert found.answer > 2
    assert found.refused == found.answer + 1
    per_layer = 12 * 64 * 64 + 13 * 64
    assert found.plan.num_parameters == (512 + 1024 + 2) * 64 + found.answer * per_layer
    assert answered(found, subject, given)[0].num_layers == found.answer
    assert not fits(subject.with_layers(found.refused), given)
    assert found.num_plans <= 10


def test_nothing_fits_where_one_sequence_is_too_much():
    subject, given = small(device_memory=MIB // 2)
    found = search(Goal.MAX_BATCH, subject, given)
    assert (found.answer, found.plan, found.refused) == (None, None, 1)


@pytest.mark.parametrize("limit", [1, 7, 1000, 70_000])
@pytest.mark.parametrize("first", [1, 4096])
def test_any_limit_is_found_whatever_plans_say(limit, first, monkeypatch):
    """Bytes that do not tell where the limit is cost plans, not the answer."""
    subject, given = small(batch_size=first)
    plan = plan_if_fits(dataclasses.replace(subject, batch_size=1, length=64), given)
    tried = fit_up_to(limit, lambda subject: subject.batch_size, plan, monkeypatch)
    found = search(Goal.MAX_BATCH, subject, given)
    assert found.answer == min(limit, 2**16)
    assert found.refused == (limit + 1 if limit < 2**16 else None)
    assert len(tried) == len(set(tried)) == found.num_plans < 40


def test_below_what_was_asked_for():
    subject, given = small(batch_size=4096)
    found = search_below(Goal.MAX_BATCH, subject, given)
    assert found.answer == search(Goal.MAX_BATCH, dataclasses.replace(subject, batch_size=2, length=64), given).answer
    one, given = small(batch_size=1, device_memory=MIB // 2)
    assert search_below(Goal.MAX_BATCH, one, given) == Found(Goal.MAX_BATCH, None, None, None, 0)


def test_machines_are_tried_from_the_cheapest(monkeypatch):
    assert (*MACHINES, "8xh100") == BY_PRICE
    tried, planned = [], []
    plan = plan_if_fits(*small())

    def fake(subject, given):
        tried.append((given.machine.name, given.world_size))
        planned.append(given)
        return plan if given.machine.name == "rtx4090" else None

    monkeypatch.setattr(searching, "plan_if_fits", fake)
    subject, given = small()
    found = search("cheapest-machine", subject, given)
    assert (found.answer, found.refused, found.num_plans) == ("rtx4090", "rtx3090", 3)
    assert tried == [("v100", 1), ("rtx3090", 1), ("rtx4090", 1)]
    assert [given.settings["dtype"] for given in planned] == ["fp16", "bf16", "bf16"], "a V100 computes no bfloat16"
    assert answered(found, subject, given)[1] == planned[-1]
    tried.clear()
    monkeypatch.setattr(
        searching, "plan_if_fits", lambda *given: tried.append((given[1].machine.name, given[1].world_size))
    )
    subject, given = small(dtype="fp16")
    assert search("cheapest-machine", subject, given).answer is None
    assert tried[0] == ("v100", 1)
    assert tried[-1] == ("8xh100", 8)


def test_a_search_for_a_machine_says_that_it_computes_in_fp16(monkeypatch):
    subject, given = small()
    plan = plan_if_fits(subject, given)
    tried = []

    def fake(subject, given):
        tried.append((given.machine.name, given.world_size))
        return dataclasses.replace(plan, settings=given.settings)

    monkeypatch.setattr(searching, "plan_if_fits", fake)
    four = dataclasses.replace(given, world_size=4)
    found = search("cheapest-machine", subject, four)
    assert tried == [("4xv100", 4)], "as many devices as processes were asked for"
    found_again = answered(found, subject, four)[1]
    assert (found_again.world_size, found_again.settings["dtype"]) == (4, "fp16")
    assert describe_found(found) == "cheapest-machine: 4xv100 (--dtype fp16); no cheaper one is known (1 plans)"


COMMAND = ["plan", MODEL, "--seq-len", "64", "--device-memory", "8MiB", "--host-memory", "64MiB"]


def test_the_command_says_that_nothing_fits(tmp_path, capsys):
    words = ["plan", MODEL, "--seq-len", "64", "--device-memory", "512KiB", "--host-memory", "64MiB"]
    assert main([*words, "--search", "max-batch", "--html", str(tmp_path / "page.html")]) == 1
    out = capsys.readouterr().out
    assert "max-batch: nothing fits" in out
    assert "Nothing is written for --html" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search", "cheapest-machine"], "--device-memory: a search for the cheapest machine takes what each has"),
        (["--search", "max", "--html", "page.html"], "search 'max' is not known"),
    ],
)
def test_what_a_search_cannot_do_gets_a_sentence(words, message, capsys):
    assert main([*COMMAND, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_page_of_a_search_is_that_of_the_plan_that_it_found(tmp_path, capsys):
    page, path = tmp_path / "page.html", tmp_path / "found.json"
    assert main([*COMMAND, "--search", "max-batch", "--html", str(page), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    html = page.read_text(encoding="utf-8")
    assert "What was found" in html
    assert capsys.readouterr().out.splitlines()[0] in html
    reader = PageReader(html)
    check_alone(reader, allowed=("page.trace.json",))
    assert f"{found['answer']} x 64 tokens" in html
    assert (tmp_path / "page.trace.json").exists()
