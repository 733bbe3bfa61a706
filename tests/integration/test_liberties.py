"""Liberties that users take with models and loops: each works as in torch, or is refused with a sentence."""

import concurrent.futures
import copy

import pytest
import torch
from models import make_batch, make_model, make_rows
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainers import LossRecorder, arguments, assert_same_weights, smallest_budget
from transformers import Trainer, TrainingArguments

from hf_patrickstar import (
    BudgetError,
    ConfigError,
    EngineError,
    PatrickStarAccelerator,
    PatrickStarEngine,
    PatrickStarTrainer,
    PatrickStarTrainingArguments,
)

MOVING = {"chunk_budget": 4096, "chunk_numel": 320}
WIDTH = 16


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def adamw(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True, **kwargs)


def twins(make=make_layers, config=MOVING, make_optimizer=adamw):
    plain, managed = make(), make()
    engine = PatrickStarEngine(managed, config, make_optimizer(managed))
    return [(plain, make_optimizer(plain)), (managed, engine.optimizer)]


def batch():
    return torch.randn(4, WIDTH)


def assert_equal(pair):
    (plain, _), (managed, _) = pair
    state_dict = managed.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state_dict[key]), key


def step_all(pair, x, loss=lambda model, x: model(x).square().sum()):
    for model, optimizer in pair:
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_full_parameters_nest_and_are_what_is_saved():
    pair = twins()
    model = pair[1][0]
    engine = model.patrickstar_engine
    before = model.state_dict()
    with engine.full_parameters():
        with engine.full_parameters():
            pass
        assert torch.equal(model[0].weight, before["0.weight"])
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        assert all((value == 7).all() for value in model.state_dict().values())
        model.load_state_dict(before)
        assert torch.equal(model[0].weight, before["0.weight"])
        with pytest.raises(EngineError, match=r"open in full_parameters"):
            model(batch())
        with pytest.raises(EngineError, match=r"open in full_parameters"):
            engine.detach()
    step_all(pair, batch())
    assert_equal(pair)
    with pytest.raises(EngineError, match=r"'0\.weight' was given another shape"), engine.full_parameters():  # noqa: PT012
        model[0].weight.data = torch.zeros(3)
        model[2].bias.data = model[2].bias.data.double() + 1
    pair[0][0][2].bias.data += 1
    assert_equal(pair)


def test_gradients_in_full_parameters():
    pair = twins()
    x = batch()
    for model, _ in pair:
        model(x).square().sum().backward()
    plain, managed = pair[0][0], pair[1][0]
    with managed.patrickstar_engine.full_parameters(with_grads=True):
        for model in (plain, managed):
            model[0].weight.grad = None
            model[0].bias.grad = torch.ones(WIDTH)
            model[2].weight.grad.mul_(2)
    for _, optimizer in pair:
        optimizer.step()
    assert_equal(pair)
    with managed.patrickstar_engine.full_parameters(with_grads=True):
        assert managed[0].bias.grad is not None
    plain.zero_grad()
    managed.zero_grad()
    managed[2].weight.grad = torch.ones(WIDTH, WIDTH)
    plain[2].weight.grad = torch.ones(WIDTH, WIDTH)
    for _, optimizer in pair:
        optimizer.step()
    assert_equal(pair)


def test_gradients_that_users_assign():
    pair = twins()
    x = batch()
    for model, optimizer in pair:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).square().sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(pair)


def test_inference_mode_before_training():
    pair = twins()
    for _ in range(2):
        x = batch()
        with torch.inference_mode():
            assert torch.equal(*(model(x) for model, _ in pair))
        step_all(pair, x)
    assert_equal(pair)


def fused_loss(model, inputs):
    hidden = model.transformer(input_ids=inputs["input_ids"]).last_hidden_state
    logits = nn.functional.linear(hidden[:, :-1], model.lm_head.weight)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())


def test_a_loss_outside_the_model_that_reads_a_weight(tmp_path):
    """The parts of a model called one by one, and a parameter used outside of every forward."""

    def own(base):
        class Own(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return fused_loss(model, inputs)

        return Own

    runs = []
    data = make_rows("gpt2", 32)
    budget = {"chunk_budget": 2 * smallest_budget(make_model("gpt2"))}
    for base, args_class, extra in (
        (Trainer, TrainingArguments, {}),
        (PatrickStarTrainer, PatrickStarTrainingArguments, {"patrickstar": True, "patrickstar_config": budget}),
    ):
        recorder = LossRecorder()
        args = arguments(args_class, tmp_path, remove_unused_columns=False, **extra)
        trainer = own(base)(model=make_model("gpt2"), args=args, train_dataset=data, callbacks=[recorder])
        trainer.train()
        runs.append((trainer, recorder))
    assert runs[0][1].losses == runs[1][1].losses
    assert runs[0][1].losses[0] > 1
    assert_same_weights(runs[0][0].model, runs[1][0].model)


class Queries(nn.Module):
    """Modules that return parameters."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Parameter(torch.ones(WIDTH))

        def forward(self):
            return self.q

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.holder = self.Holder()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.holder(), self.temperature


def test_modules_that_return_parameters():
    pair = twins(Queries)
    for _ in range(3):
        step_all(pair, batch(), lambda model, x: (lambda out: (out[0].square() / out[1]).sum())(model(x)))
        assert_equal(pair)


def test_reading_an_attribute_between_steps():
    pair = twins()
    managed = pair[1][0]
    step_all(pair, batch())
    assert torch.equal(managed[0].weight, pair[0][0][0].weight)
    assert torch.equal(managed[2].bias, pair[0][0][2].bias)
    step_all(pair, batch())
    assert managed[0].weight is dict(managed.named_parameters())["0.weight"]
    assert_equal(pair)


def test_assigned_data_and_writes_inside_a_forward_are_kept():
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.no_grad():
                self.layer.weight.div_(1.5)
            return self.layer(self.embedding(x.abs().long() % WIDTH))

    for config in (MOVING, {}):
        pair = twins(Renormed, config)
        for _ in range(3):
            x = 5 * batch()
            step_all(pair, x)
            for model, _ in pair:
                model.layer.bias.data = torch.full((WIDTH,), 0.5)
            assert_equal(pair)
            step_all(pair, x)
            assert_equal(pair)
    managed = pair[1][0]
    managed.layer.bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size"), torch.no_grad():
        managed(batch())  # torch's own complaint
    managed.layer.bias.data = torch.zeros(WIDTH)
    with torch.no_grad():
        managed(batch())


def test_clipping_a_part_of_the_parameters():
    for config in (MOVING, {"dtype": "fp32"}):
        pair = twins(config=config)
        for _ in range(2):
            x = 10 * batch()
            norms = []
            for model, optimizer in pair:
                model(x).square().sum().backward()
                part = list(model[0].parameters())
                clip = optimizer.clip_grad_norm_ if model is pair[1][0] else torch.nn.utils.clip_grad_norm_
                norms.append(clip(part, 0.1))
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*norms)
            assert_equal(pair)


def test_two_models_on_one_accelerator():
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=MOVING)
    pairs = [twins() for _ in range(2)]
    prepared = []
    for _ in range(2):
        model = make_layers()
        prepared.append(accelerator.prepare(model, adamw(model)))
    teacher = make_layers().requires_grad_(False)
    student = make_layers()
    prepared_student, prepared_teacher, _ = accelerator.prepare(student, teacher, adamw(student))
    assert prepared_teacher is teacher
    assert not teacher[0].weight.isnan().any()
    assert hasattr(prepared_student, "patrickstar_engine")
    x = 10 * batch()
    for (model, optimizer), pair in zip(prepared, pairs, strict=True):
        plain, plain_optimizer = pair[0]
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step()
        plain_optimizer.step()
        assert_equal([(plain, None), (model, None)])
    assert accelerator.clip_grad_norm_(teacher.parameters(), 1.0) == 0.0
    norms = []
    for models in ([model for model, _ in prepared], [pair[0][0] for pair in pairs]):
        for model in models:
            model(x).square().sum().backward()
        parameters = [parameter for model in models for parameter in model.parameters()]
        clip = torch.nn.utils.clip_grad_norm_ if norms else accelerator.clip_grad_norm_
        norms.append(clip(parameters, 0.1))
    assert torch.equal(*norms)


def test_unfreezing_gives_a_parameter_masters_and_states():
    def make():
        model = make_layers()
        model[0].requires_grad_(False)
        return model

    pair = twins(make)
    for _ in range(2):
        step_all(pair, batch())
    for model, _ in pair:
        model[0].requires_grad_(True)
    for _ in range(2):
        step_all(pair, batch())
        assert_equal(pair)


def test_a_consumed_gradient_is_missed_and_not_taken_for_none():
    model = make_layers()
    optimizer = PatrickStarEngine(model, MOVING, adamw(model)).optimizer
    for _ in range(2):
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch()).sum().backward()
    optimizer.step()
    for use in (optimizer.step, optimizer.grad_norm):
        with pytest.raises(EngineError, match=r"consumed by optimizer\.step.*torch would still have it"):
            use()
    optimizer.zero_grad()
    optimizer.step()
    model(batch()).sum().backward()
    optimizer.step()


def test_an_interrupted_forward_leaves_nothing_behind():
    class Interrupt(nn.Module):
        armed = False

        def forward(self, x):
            if self.armed:
                raise KeyboardInterrupt
            return x

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Interrupt()))

    pair = twins(make)
    managed = pair[1][0]
    managed[1][1].armed = True
    with pytest.raises(KeyboardInterrupt):
        managed(batch())
    managed[1][1].armed = False
    step_all(pair, batch())
    assert_equal(pair)
    assert all(not tensor.users for tensor in managed.patrickstar_engine.manager.tensors)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_checkpointing_the_whole_model_recomputes_it():
    pair = twins()
    counts = {}
    for model, _ in pair:
        # A pre-hook: the recomputation stops as soon as it has what it needs, before a forward hook would be called.
        model.register_forward_pre_hook(lambda m, *_: counts.update({id(m): counts.get(id(m), 0) + 1}))
    step_all(pair, batch(), lambda model, x: checkpoint(model, x, use_reentrant=False).square().sum())
    assert list(counts.values()) == [2, 2]
    assert_equal(pair)


def test_saved_tensors_hooks_of_the_user():
    pair = twins()
    packed = []

    def loss(model, x):
        packed.append(0)

        def pack(tensor):
            packed[-1] += 1
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(x).square().sum()

    step_all(pair, batch(), loss)
    assert packed[0] == packed[1] > 0
    assert_equal(pair)


def test_function_transforms():
    pair = twins()
    x = batch()
    jacobians = [torch.func.jacrev(lambda x, model=model: model(x).sum(0))(x) for model, _ in pair]
    assert torch.equal(*jacobians)


def test_decoupled_weight_decay_of_adam():
    def make_optimizer(model):
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.5, decoupled_weight_decay=True, fused=True)

    pair = twins(make_optimizer=make_optimizer)
    for _ in range(3):
        step_all(pair, batch())
    assert_equal(pair)


def test_budget_errors_lose_no_gradient():
    """The accumulation list does not fit: the gradient is still there, and what was computed can be used."""
    model = make_layers()
    plain = make_layers()
    optimizer = adamw(plain)
    config = {**MOVING, "host_budget": 16 * 640 + 64}
    engine = PatrickStarEngine(model, config, adamw(model))
    x = batch()
    model(x).square().sum().backward()
    with pytest.raises(BudgetError, match="'grad'"):
        model(x)
    plain(x).square().sum().backward()
    optimizer.step()
    engine.optimizer.step()
    assert_equal([(plain, None), (model, None)])


def test_state_of_another_optimizer_over_the_budget_is_told_after_a_whole_step():
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain, model = make_layers(), make_layers()
    optimizer = sgd(plain)
    engine = PatrickStarEngine(model, {**MOVING, "host_budget": 8 * 640 + 64}, sgd(model))
    x = batch()
    for network, step in ((plain, optimizer), (model, engine.optimizer)):
        network(x).square().sum().backward()
        if network is model:
            with pytest.raises(BudgetError, match="optimizer_state"):
                step.step()
        else:
            step.step()
    assert_equal([(plain, None), (model, None)])


def test_working_sets_of_modules_that_call_others():
    """What construction accepts, training can do: a module that holds its own parameters while it calls others."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.table = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x):
            x = x @ self.scale @ self.table[0] @ self.table[1]
            return self.attention(x[None], x[None], x[None])[0]

    budget = smallest_budget(Nested())
    pair = twins(Nested, {"chunk_budget": budget})
    for _ in range(2):
        step_all(pair, batch())
    assert_equal(pair)
    with pytest.raises(BudgetError, match="too small for module"):
        twins(Nested, {"chunk_budget": budget - 1})


def test_sixteen_bit_inputs_and_batch_norm():
    model = make_layers()
    PatrickStarEngine(model, {**MOVING, "dtype": "bf16", "autocast": False}, adamw(model))
    assert model(batch()).dtype is torch.bfloat16
    normed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with pytest.raises(ConfigError, match=r"module '1' \(BatchNorm1d\).*fp32"):
        PatrickStarEngine(normed, {"dtype": "bf16", "autocast": False}, adamw(normed))
    pair = twins(lambda: copy.deepcopy(normed))
    step_all(pair, batch())
    assert_equal(pair)


def test_parameters_over_the_same_memory_are_refused():
    model = make_layers()
    model[2].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ConfigError, match=r"'0\.weight' and '2\.weight' are two parameters over the same memory"):
        PatrickStarEngine(model, MOVING, adamw(model))


def test_mixed_types_follow_the_majority():
    model = make_layers()
    model[0].to(torch.bfloat16).requires_grad_(False)
    model[0].weight.data = torch.randn(WIDTH * 4, WIDTH).to(torch.bfloat16)
    engine = PatrickStarEngine(model, MOVING, adamw(model))
    assert engine.dtype is torch.bfloat16


def test_load_state_dict_with_assign_makes_new_parameters():
    pair = twins()
    for model, optimizer in pair:
        before = list(model.parameters())
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
        assert all(old is not new for old, new in zip(before, model.parameters(), strict=True))
        optimizer.param_groups[0]["params"] = list(model.parameters())
    step_all(pair, batch())
    assert_equal(pair)


def test_editing_param_groups():
    pair = twins()
    for model, optimizer in pair:
        optimizer.param_groups[0]["params"] = list(model[0].parameters())
        optimizer.param_groups[0]["lr"] = 0.5
    step_all(pair, batch())
    assert_equal(pair)


def test_batches_of_a_real_model_after_all_that():
    model = make_model("bert")
    engine = PatrickStarEngine(model, {"chunk_budget": smallest_budget(make_model("bert"))}, adamw(model))
    loss = model(**make_batch("bert")).loss
    engine.backward(loss)
    engine.optimizer.step()
    assert engine.stats()["steps"] == 1


@pytest.mark.parametrize("stage", ["allocate", "hooks", "first", "middle", "state"])
def test_a_construction_that_fails_anywhere_leaves_everything_as_it_was(stage, monkeypatch):
    from hf_patrickstar.memory.pool import PayloadPool
    from hf_patrickstar.optim.optimizer import ChunkedOptimizer
    from hf_patrickstar.runtime.chunk import ManagedParameter

    model = make_model("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    optimizer = adamw(model)
    model(**make_batch("gpt2")).loss.backward()
    optimizer.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    target, name, after = {
        "allocate": (PayloadPool, "allocate", 5),
        "hooks": (torch.nn.Module, "register_forward_pre_hook", 4),
        "first": (ManagedParameter, "move_in", 0),
        "middle": (ManagedParameter, "move_in", 10),
        "state": (ChunkedOptimizer, "take_inner_state", 0),
    }[stage]
    original, calls = getattr(target, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, failing)
    with pytest.raises(KeyboardInterrupt):
        PatrickStarEngine(model, {"chunk_budget": 40000}, optimizer)
    monkeypatch.undo()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (gradients[key] is None), key
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[key]), key
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(optimizer.state) == sum(p.requires_grad for p in model.parameters())
    model(**make_batch("gpt2")).loss.backward()
    optimizer.step()


def test_copies_are_possible_again_after_detach():
    import pickle

    from hf_patrickstar import initialize_engine

    model, optimizer = initialize_engine(make_layers, MOVING)
    model.backward(model(batch()).sum())
    optimizer.step()
    model.patrickstar_engine.detach()
    assert "backward" not in vars(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied[0].weight, model[0].weight)


def test_compilers_of_accelerate_are_refused():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(ConfigError, match="remove the dynamo backend"):
            PatrickStarAccelerator(cpu=True, dynamo_backend="eager")
    finally:
        AcceleratorState._reset_state(True)


def test_reading_one_parameter_at_a_time_costs_one_parameter():
    model = make_layers()
    engine = PatrickStarEngine(model, MOVING, adamw(model))
    model(batch()).sum().backward()
    manager, most = engine.manager, 0

    def nbytes():
        return manager.mirrors.nbytes + manager.gradient_mirrors.nbytes

    for parameter in model.parameters():
        parameter.data.norm()
        parameter.grad.norm()
        parameter.detach().numpy().sum()
        most = max(most, nbytes())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert 0 < most <= 2 * 4 * largest  # a value and a gradient
    kept = [parameter.data for parameter in model.parameters()]
    assert nbytes() >= sum(value.nbytes for value in kept)
    del kept
    model(batch())
    assert nbytes() == 0


def test_clipping_between_micro_batches_clips_what_is_there():
    for config in (MOVING, {}):
        pair = twins(config=config)
        for _ in range(2):
            x = [batch() for _ in range(3)]
            norms = []
            for model, optimizer in pair:
                clip = getattr(optimizer, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
                for part in x:
                    model(part).pow(2).sum().backward()
                    norms.append(clip(model.parameters(), 0.1))
                norms.append(clip(model.parameters(), 0.05))
                optimizer.step()
                optimizer.zero_grad()
            assert norms[:4] == norms[4:]
            assert_equal(pair)


def test_a_graph_that_outlives_steps_of_another_optimizer():
    def train(model, optimizers):
        slow, fast = optimizers
        x = batch()
        for _ in range(2):
            made = model[0](x)
            for _ in range(5):
                fast.zero_grad()
                model[2](made.detach()).sum().backward()
                fast.step()
            slow.zero_grad()
            model[2](made).sum().backward()
            slow.step()

    def optimizers_of(model):
        return [torch.optim.SGD(model[place].parameters(), lr=0.01) for place in (0, 2)]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    ours = copy.deepcopy(plain)
    engine = PatrickStarEngine(ours, MOVING, optimizers_of(ours))
    torch.manual_seed(1)
    train(plain, optimizers_of(plain))
    torch.manual_seed(1)
    train(ours, engine.optimizers)
    assert_equal([(plain, None), (ours, None)])


def test_a_thread_that_computes_with_parameters_while_another_trains():
    import threading

    pair = twins()
    (plain, plain_optimizer), (ours, optimizer) = pair
    has_ended, errors = threading.Event(), []

    def read():
        try:
            while not has_ended.is_set():
                assert not any(parameter.norm().isnan() for parameter in ours.parameters())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        for _ in range(6):
            x = batch()
            for model, step in ((plain, plain_optimizer), (ours, optimizer)):
                model(x).pow(2).sum().backward()
                step.step()
                step.zero_grad()
    finally:
        has_ended.set()
        thread.join(60)
    assert not errors, errors
    assert_equal(pair)


def test_two_threads_train_in_turns():
    """Each has a backward of its own; one that waits inside of its backward does not hold the other up."""
    models, x = (make_layers(), make_layers()), batch()
    engine = PatrickStarEngine(models[1], MOVING, adamw(models[1]))
    for _ in range(6):
        models[0](x).sum().backward()

    def work():
        for _ in range(3):
            models[1](x).sum().backward()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result(60)
    for plain, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain.grad, ours.grad)
    engine.detach()


def test_a_lazy_module_in_the_trainer_gets_a_sentence(tmp_path):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.lazy = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(2)

    args = arguments(PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(ConfigError, match=r"parameter 'lazy.weight' is lazy and has no shape yet; run one forward"):
        PatrickStarTrainer(model=Lazy(), args=args, train_dataset=make_rows("gpt2", 8))
