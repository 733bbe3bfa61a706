"""Scripts are run as Python runs them, up to the call of ``train``."""

import os
import sys
import types

import pytest
from transformers import Trainer, TrainingArguments

from hf_patrickstar.integrations.training_args import PatrickStarArgumentsMixin
from hf_patrickstar.integrations.training_script import ScriptError, StopScript, plan_command, run_script

TRAINING = """
import torch
from transformers import Trainer, TrainingArguments

args = TrainingArguments(output_dir="out", use_cpu=True, max_steps=7)
trainer = Trainer(model=torch.nn.Linear(2, 2), args=args)
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def stop(trainer, train):
    raise StopScript(trainer)


def test_it_runs_as_python_runs_it(write, tmp_path):
    """The name, the arguments, modules beside it; and everything is as before afterwards."""
    (tmp_path / "beside_the_script.py").write_text("VALUE = 3", encoding="utf-8")
    path = write(
        "import sys\nfrom beside_the_script import VALUE\n"
        f"assert __name__ == '__main__' and VALUE == 3 and sys.argv == [__file__, '--a', 'b']\n{TRAINING}"
        "trainer.train()\n"
    )
    before = sys.argv, list(sys.path), Trainer.train, Trainer.__init__, TrainingArguments.__post_init__
    mixin = PatrickStarArgumentsMixin.__post_init__
    trainer = run_script(path, ["--a", "b"], stop)
    assert trainer.args.max_steps == 7
    assert before == (sys.argv, sys.path, Trainer.train, Trainer.__init__, TrainingArguments.__post_init__)
    assert PatrickStarArgumentsMixin.__post_init__ is mixin


def test_arguments_are_shown_once_before_they_check_themselves(write):
    seen = []

    def change(arguments):
        seen.append(arguments)
        arguments.patrickstar, arguments.patrickstar_config = True, {"device_budget": "1GiB"}

    text = TRAINING.replace("Trainer", "PatrickStarTrainer").replace("TrainingArg", "PatrickStarTrainingArg")
    text = text.replace("from transformers", "from hf_patrickstar")
    trainer = run_script(write(text + "trainer.train()"), [], stop, change)
    assert seen == [trainer.args]
    assert trainer.args.patrickstar_config["device_budget"] == 2**30, "the arguments have checked what was changed"


def test_a_handler_of_errors_does_not_see_the_end_and_finally_does(write, tmp_path):
    path = write(
        f"{TRAINING}\ntry:\n    trainer.train()\nexcept Exception:\n    raise SystemExit(7)\n"
        f"finally:\n    open({str(tmp_path / 'closed')!r}, 'w').close()\n"
    )
    assert isinstance(run_script(path, [], stop), Trainer)
    assert (tmp_path / "closed").exists()


def test_the_script_goes_on_and_train_has_its_arguments_or_other_ones(write, monkeypatch):
    calls = []
    monkeypatch.setattr(Trainer, "train", lambda self, *args, **kwargs: calls.append((args, kwargs)))
    path = write(f"{TRAINING}\nassert trainer.train('here') == 'trained'\n")
    found = run_script(path, [], lambda trainer, train: (train(), train(resume_from_checkpoint=False), "trained")[-1])
    assert found is None
    assert calls == [(("here",), {}), ((), {"resume_from_checkpoint": False})]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "ended without building a Trainer"),
        ("raise SystemExit(0)", "ended without building a Trainer"),
        (TRAINING, r"built a Trainer and ended without calling train\(\)"),
    ],
)
def test_a_script_that_does_not_train_gets_a_sentence(text, problem, write):
    with pytest.raises(ScriptError, match=problem):
        run_script(write(text), [], stop)


def test_what_is_not_there_is_said_and_errors_of_the_script_are_its_own(write, tmp_path):
    with pytest.raises(ScriptError, match="there is no script"):
        run_script(os.fspath(tmp_path / "none.py"), [], stop)
    for text, error in (("raise SystemExit(3)", SystemExit), ("1 / 0", ZeroDivisionError)):
        with pytest.raises(error):
            run_script(write(text), [], stop)


PLAN = "hf-patrickstar plan --machine this -- train.py"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train.py", "--tokenizer_name", "a b", "--bf16"], f"{PLAN} --tokenizer_name 'a b' --bf16"),
        (
            ["train.py", "--hub_token", "hf_1", "--api-key=2", "--max_steps", "3"],
            f"{PLAN} --hub_token=... --api-key=... --max_steps 3",
        ),
        (["/x/ipykernel_launcher.py", "-f", "kernel.json"], ""),
        (["-c"], ""),
        ([], ""),
    ],
)
def test_a_plan_of_the_script_that_runs_can_be_pasted_and_has_no_secrets(argv, told, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", argv)
    assert plan_command(1) == told
    assert plan_command(2) == told.replace("this", "this --processes 2")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", object())  # python -m MODULE
    assert plan_command(1) == ""
