"""Out of memory in a step: the micro-batch is repeated, and nothing is lost or counted twice."""

import pytest
import torch
from models import make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import LogRecorder, assert_same_run, smallest_budget, train
from transformers import TrainerCallback

from hf_patrickstar import BudgetError, DeviceMemoryError, PatrickStarEngine
from hf_patrickstar.runtime.recovery import MAX_RETRIES


class Failing(TorchDispatchMode):
    """Raises what CUDA raises, at some operators that allocate, counted from the beginning of the block."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.count = set(at), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        allocates = all(result.alias_info is None for result in func._schema.returns)
        self.count += allocates
        if allocates and self.count in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return func(*args, **(kwargs or {}))


def count_operators(name, dtype):
    model, _ = make_pair(name, dtype, 1)
    with Failing() as mode:
        model(**make_batch(name)).loss.backward()
    return mode.count


def make_pair(name, dtype, accumulation, checkpointing=False):
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    precision = {"fp32": "no", "bf16": "bf16"}[dtype]
    config = {"dtype": dtype, "chunk_budget": int(1.5 * smallest_budget(make_model(name), precision, checkpointing))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, PatrickStarEngine(model, config, optimizer, gradient_accumulation_steps=accumulation)


def run(name, dtype, accumulation, checkpointing, failures):
    """Losses and weights of three steps; ``failures`` maps (step, micro-batch) to operators that fail."""
    model, engine = make_pair(name, dtype, accumulation, checkpointing)
    torch.manual_seed(5)
    losses = []
    for step in range(3):
        for micro in range(accumulation):
            batch = make_batch(name, seed=10 * step + micro)

            def once(batch=batch):
                loss = model(**batch).loss
                loss.backward()
                return loss.item()

            with Failing(*failures.get((step, micro), ())):
                losses.append(engine.attempt(once))
            # torch 2.11 leaves those of a checkpointed block in force for as long as somebody has its error.
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        engine.optimizer.clip_grad_norm_(None, 0.5)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, model.state_dict(), engine.stats()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_failure_anywhere_changes_nothing(dtype, accumulation, checkpointing):
    """With dropout on: the repetition draws the same random numbers."""
    total = count_operators("gpt2", dtype)
    expected = run("gpt2", dtype, accumulation, checkpointing, {})
    assert expected[2]["retries"] == 0
    last = accumulation - 1
    for place in (0.02, 0.3, 0.55, 0.7, 0.9):
        operator = max(int(place * total), 1)
        failures = {(0, 0): [operator], (1, last): [operator, total + operator // 2], (2, last): [operator]}
        losses, weights, stats = run("gpt2", dtype, accumulation, checkpointing, failures)
        assert losses == expected[0]
        for key, value in expected[1].items():
            assert torch.equal(value, weights[key]), (place, key)
        assert stats["retries"] >= 3
        assert stats["steps"] == 3


def gradients(engine):
    """Copies of all gradients, ``None`` where there is none."""
    found = [engine.manager.gradients.of(tensor) for tensor in engine.manager.tensors]
    return [None if gradient is None else gradient.clone() for gradient in found]


@pytest.mark.parametrize(
    ("accumulation", "fails_in", "is_dropped"),
    [
        (2, "forward", False),
        (2, "backward", True),
        (2, "after backward", True),
        (1, "after backward", False),
    ],
)
def test_it_gives_up_after_three_and_says_what_became_of_gradients(accumulation, fails_in, is_dropped):
    """What was added to gradients of earlier micro-batches cannot be taken out; what was not is dropped alone."""
    model, engine = make_pair("gpt2", "fp32", accumulation)
    batches = [make_batch("gpt2", seed=seed) for seed in range(accumulation)]
    for batch in batches[:-1]:
        model(**batch).loss.backward()
    before = gradients(engine)
    assert all((gradient is None) == (accumulation == 1) for gradient in before)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    calls = []

    def hopeless():
        calls.append(1)
        with Failing(*[5] if fails_in == "forward" else []):
            loss = model(**batches[-1]).loss
        with Failing(*[30] if fails_in == "backward" else []):
            loss.backward()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(DeviceMemoryError, match=r"out of memory\..*smaller batch(.|\n)*tier") as caught:
        engine.attempt(hopeless)
    assert len(calls) == MAX_RETRIES + 1
    assert isinstance(caught.value, BudgetError)
    assert "Parameters are as they were before it." in str(caught.value)
    assert ("all gradients of this step are dropped" in str(caught.value)) == is_dropped
    assert ("Gradients are as they were before it" in str(caught.value)) != is_dropped
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    expected = [None] * len(before) if is_dropped else before
    for tensor, ours, theirs in zip(engine.manager.tensors, gradients(engine), expected, strict=True):
        assert (ours is None) == (theirs is None), tensor.spec.name
        assert ours is None or torch.equal(ours, theirs), tensor.spec.name
    assert all(not tensor.is_saved and not tensor.users for tensor in engine.manager.tensors)


@pytest.mark.parametrize("fails", [False, True])
def test_a_repetition_adds_to_gradients_that_somebody_held_over_the_step(fails):
    """They are from before the attempt, and take the place to which the attempt adds when it begins to."""
    model, engine = make_pair("gpt2", "fp32", 1)
    plain = make_model("gpt2").train()
    steppers = (model, engine.optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))

    def once(model, seed):
        torch.manual_seed(seed)
        model(**make_batch("gpt2", seed=seed)).loss.backward()

    held = []
    for model, optimizer in steppers:
        once(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        once(model, 1)
        held.append([parameter.grad for parameter in model.parameters()])
        optimizer.step()
    failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")] if fails else []

    def attempted():
        once(steppers[0][0], 2)
        if failures:
            raise failures.pop()

    engine.attempt(attempted)
    once(plain, 2)
    assert engine.stats()["retries"] == fails
    for ours, theirs in zip(steppers[0][0].parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("where", ["before the forward", "in the forward"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_interrupt_in_a_retry_makes_nothing_later_a_repetition(accumulation, where):
    """The user stops a repetition and goes on with a plain loop: every gradient from then on counts."""
    model, engine = make_pair("gpt2", "fp32", accumulation)
    plain = make_model("gpt2").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    batches = [make_batch("gpt2", seed=seed) for seed in range(3)]
    calls = []

    def stop(*_):
        raise KeyboardInterrupt

    def once(model, batch):
        torch.manual_seed(3)
        model(**batch).loss.backward()

    def interrupted():
        calls.append(1)
        if len(calls) == 2 and where == "before the forward":
            stop()
        elif len(calls) == 2:
            handles.append(model.transformer.h[1].register_forward_pre_hook(stop))
        once(model, batches[1])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    handles = []
    if accumulation > 1:
        once(model, batches[0])
    with pytest.raises(KeyboardInterrupt):
        engine.attempt(interrupted)
    for handle in handles:
        handle.remove()
    # What a failed attempt was the first to store was undone; what it added to earlier ones' has stayed.
    for batch in batches[:2] if accumulation > 1 else ():
        once(plain, batch)
    for count in (2, 1):
        for _ in range(count):
            once(model, batches[2])
            once(plain, batches[2])
        for ours, theirs in zip(gradients(engine), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs.grad)
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_other_errors_pass_through_at_once():
    model, engine = make_pair("gpt2", "fp32", 1)
    calls = []

    def wrong():
        calls.append(1)
        model(**make_batch("gpt2"))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.attempt(wrong)
    assert len(calls) == 1
    assert engine.stats()["retries"] == 0


class FailAt(TrainerCallback):
    """Enters a failing mode for the length of one step."""

    def __init__(self, step, *at):
        self.step, self.mode = step, Failing(*at)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.mode.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step + 1:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_repeats_by_itself(tmp_path, accumulation):
    kwargs = {"gradient_accumulation_steps": accumulation}
    expected = train("gpt2", tmp_path / "plain", **kwargs)
    config = {"chunk_budget": 2 * smallest_budget(make_model("gpt2"))}
    logs = LogRecorder()
    ours = train("gpt2", tmp_path / "ours", config, callbacks=[FailAt(2, 200), logs], **kwargs)
    assert_same_run(expected, ours)
    assert ours[0].patrickstar_stats()["retries"] == 1
    assert [entry["retries"] for entry in logs.figures()] == [0, 0, 1, 1]


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))

    def forward(self, x):
        return self.layers(x).square().mean()


def compare_attempts(once, accumulation=1):
    """Runs ``once(model, attempt number, micro-batch)`` with and without a failure in each first attempt."""
    results = []
    for fails in (False, True):
        model = Normalised()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        config = {"chunk_budget": 1000, "chunk_numel": 128}
        engine = PatrickStarEngine(model, config, optimizer, gradient_accumulation_steps=accumulation)
        for step in range(2):
            for micro in range(accumulation):
                x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + micro))
                calls = []

                def run(x=x, calls=calls, model=model, engine=engine, fails=fails):
                    calls.append(1)
                    once(model, engine, x)
                    if fails and len(calls) == 1:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

                engine.attempt(run)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        results.append(model.state_dict())
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


def test_buffers_are_updated_once():
    compare_attempts(lambda model, engine, x: model(x).backward())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_backwards_in_one_attempt(accumulation):
    def twice(model, engine, x):
        model(x).backward()
        model(x * 2).backward()

    compare_attempts(twice, accumulation)


def test_an_attempt_inside_an_attempt():
    compare_attempts(lambda model, engine, x: engine.attempt(lambda: model(x).backward()), 2)
