"""A question that was asked before is answered without a new plan."""

import dataclasses

import pytest

from hf_patrickstar.cli.main import main
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.planner.subject import Subject
from hf_patrickstar.tracing import kept_traces as plan_cache

MODEL = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=200"
SMALL = {"length": 32, "device_memory": "2MiB", "host_memory": "64MiB"}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, "directory", lambda kind: tmp_path)
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """Each run of a model."""
    made = []
    original = Subject.compute_loss

    def compute_loss(self, *args):
        made.append(args)
        return original(self, *args)

    monkeypatch.setattr(Subject, "compute_loss", compute_loss)
    return made


OTHER_PLANS = {
    "setting": {"settings": {"eviction": "lru", "chunk_numel": 9000}},
    "processes": {"world_size": 2, "machine": "8xh100"},
}


@pytest.mark.parametrize("change", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_a_plan_for_another_budget_runs_no_model(change, runs):
    asked = {"machine": "rtx4090", **SMALL}
    subject, given = arrange(MODEL, **asked)
    plan_and_simulate(subject, given)
    assert len(runs) == 2, "recorded, and once more to compare"
    fresh, other = arrange(MODEL, **{**asked, **change})
    found = plan_and_simulate(subject, other)[0]
    assert len(runs) == 2
    assert plan_and_simulate(fresh, other)[0] == found, "what is kept is what is recorded"
    assert len(runs) == 4


@pytest.mark.parametrize("change", [{"settings": {"dtype": "fp32"}}, {"num_micro_batches": 2}])
def test_a_plan_of_another_training_runs_it(change, runs):
    subject, given = arrange(MODEL, "rtx4090", **SMALL)
    plan_and_simulate(subject, given)
    plan_and_simulate(subject, dataclasses.replace(given, **change))
    plan_and_simulate(dataclasses.replace(subject, batch_size=2), given)
    assert len(runs) == 6


def test_an_answer_is_kept_by_what_it_depends_on(tmp_path, monkeypatch, capsys):
    asked = []

    def run_plan(options, tell):
        asked.append(options.verbose)
        tell("an answer")
        return 1, "{}", "key"

    def ask(*words):
        assert main(["plan", str(config), *words]) == 1
        assert capsys.readouterr().out == "an answer\n"
        return len(asked)

    monkeypatch.setattr("hf_patrickstar.cli.plan_run.run_plan", run_plan)
    plan_cache.write("traces", "key", b"traces")
    config, data = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text("{}")
    assert [ask(), ask(), ask("--json", str(data)), ask("--verbose")] == [1, 1, 1, 2]
    assert data.read_text() == "{}"
    config.write_text("{ }")
    assert [ask(), ask()] == [3, 3]
    assert [ask("--machine", "this"), ask("--machine", "this")] == [4, 5], "which is measured"
    (tmp_path / "key").unlink()
    assert ask() == 6, "runs need the traces"


def test_a_model_that_asks_for_values_has_no_plan(monkeypatch):
    def compute_loss(self, model, inputs):
        return model(**inputs).logits[inputs["input_ids"].nonzero()[:, 0]].sum()

    monkeypatch.setattr(Subject, "compute_loss", compute_loss)
    message = r"its code fails on tensors without values \(TraceError: the model calls operator 'aten.nonzero.default'"
    with pytest.raises(ConfigError, match=message):
        plan_and_simulate(*arrange(MODEL, "rtx4090", **SMALL))
