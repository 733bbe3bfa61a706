"""Averages of the weights of a live model, made before or after it came to live in chunks."""

import collections
import contextlib
import copy
import importlib.util
import pathlib
import weakref

import pytest
import torch
from live.both import assert_same_model, copy_of, loss_of, make_adamw, make_ids, make_tower, raises_in_both, train
from torch import nn
from torch.optim import swa_utils

from hf_patrickstar import PatrickStarEngine

WHEN = pytest.mark.parametrize("when", ["before", "after"])


def stash(make_average):
    """A ``make`` for models of which something was made before the engine, and what was made by the model's id."""
    kept = {}

    def make():
        model = make_tower()
        kept[id(model)] = make_average(model)
        return model

    return make, kept


def run(both, when, make_average, pattern):
    """Runs ``pattern(model, optimizer, note, average)`` with an average made before or after the engine."""
    make, kept = stash(make_average) if when == "before" else (make_tower, None)

    def with_average(model, optimizer, note):
        return pattern(model, optimizer, note, make_average(model) if kept is None else kept[id(model)])

    return both(with_average, make=make)


def each_step(model, optimizer, update, steps=3, first=0):
    """An ordinary loop that updates an average after every step."""
    losses = []
    for step in range(first, first + steps):
        losses += train(model, optimizer, 1, first=step)
        update()
    return losses


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def evaluate(model):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, 90)
    model.train()
    return loss


def timm_module(name):
    """One file of timm: all of it would need a torchvision that fits."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed")
    path = pathlib.Path(found.submodule_search_locations[0]) / "utils" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"timm_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# torch's own


AVERAGED = {
    "equal": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "ema_loop": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "swa_foreach": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn(), "use_buffers": True},
}


@WHEN
@pytest.mark.parametrize("kind", AVERAGED)
def test_averaged_model(both, kind, when):
    def pattern(model, optimizer, note, average):
        note("losses", each_step(model, optimizer, lambda: average.update_parameters(model)))
        note("count", average.n_averaged)
        note("average", average.state_dict())
        note("evaluated", evaluate(average))
        note("evaluated model", evaluate(model))

    run(both, when, lambda model: swa_utils.AveragedModel(model, **AVERAGED[kind]), pattern)


def test_averaged_model_is_an_ordinary_model(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        average = swa_utils.AveragedModel(model)
        note("types", [type(parameter).__name__ for parameter in average.parameters()])
        note("devices", [parameter.device.type for parameter in average.parameters()])
        note("tied", average.module.head.weight is average.module.embedding.weight)
        note("attributes", sorted(key for key in vars(average.module) if not key.startswith("_")))
        own = torch.optim.SGD(average.parameters(), lr=0.1)
        note("trained", train(average, own, 2))
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_averaged_model_saved_and_loaded(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        each_step(model, optimizer, lambda: average.update_parameters(model), 2)
        state = copy.deepcopy(average.state_dict())
        again = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        again.load_state_dict(state)
        each_step(model, optimizer, lambda: again.update_parameters(model), 2, first=2)
        note("average", again.state_dict())
        model.load_state_dict(again.module.state_dict())
        note("loaded into the model", weights_of(model))

    both(pattern)


def test_stochastic_weight_averaging_with_its_scheduler(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        constant = swa_utils.SWALR(optimizer, swa_lr=5e-3, anneal_epochs=2)
        for epoch in range(5):
            note("losses", train(model, optimizer, 1, first=epoch))
            if epoch >= 2:
                average.update_parameters(model)
                constant.step()
            else:
                cosine.step()
            note("rate", optimizer.param_groups[0]["lr"])
        batches = [make_ids(step) for step in range(2)]
        swa_utils.update_bn(batches, average)
        note("average", average.state_dict())

    both(pattern)


@pytest.mark.parametrize("through", ["data", "no_grad", "data_assigned"])
def test_average_swapped_in_and_back(both, through):
    def swap(model, average):
        for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
            if through == "data":
                kept = averaged.data.clone()
                averaged.data.copy_(current.data)
                current.data.copy_(kept)
            elif through == "no_grad":
                with torch.no_grad():
                    kept = averaged.clone()
                    averaged.copy_(current)
                    current.copy_(kept)
            else:
                averaged.data, current.data = current.data, averaged.data

    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model)
        for step in range(2):
            note("losses", each_step(model, optimizer, lambda: average.update_parameters(model), 2, first=2 * step))
            swap(model, average)
            note("the average", weights_of(model))
            note("evaluated", evaluate(model))
            swap(model, average)
            note("the model", weights_of(model))

    both(pattern)


def test_average_put_into_the_model_at_the_end(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model)
        note("losses", each_step(model, optimizer, lambda: average.update_parameters(model)))
        for averaged, current in zip(average.module.parameters(), model.parameters(), strict=True):
            current.data.copy_(averaged.data)
        note("evaluated", evaluate(model))
        note("weights", weights_of(model))

    both(pattern)


def test_average_updated_by_a_hook_of_the_optimizer(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
        handle = optimizer.register_step_post_hook(lambda *args: average.update_parameters(model))
        note("losses", train(model, optimizer, 3))
        handle.remove()
        note("average", average.state_dict())

    both(pattern)


def test_average_updated_between_forward_backward_and_step(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            average.update_parameters(model)
            loss.backward()
            average.update_parameters(model)
            optimizer.step()
            average.update_parameters(model)
            note("loss", loss.detach())
            note("average", average.state_dict())

    both(pattern)


# By hand


@WHEN
def test_average_as_a_dictionary_of_clones(both, when):
    def pattern(model, optimizer, note, average):
        def update():
            for name, parameter in model.named_parameters():
                average[name].mul_(0.9).add_(parameter.data, alpha=0.1)

        note("losses", each_step(model, optimizer, update))
        note("average", average)

    run(both, when, lambda model: {name: p.data.clone() for name, p in model.named_parameters()}, pattern)


@WHEN
def test_average_as_a_list_of_tensors_with_foreach(both, when):
    def pattern(model, optimizer, note, average):
        @torch.no_grad()
        def update():
            torch._foreach_mul_(average, 0.9)
            torch._foreach_add_(average, list(model.parameters()), alpha=0.1)
            torch._foreach_lerp_(average, [parameter.data for parameter in model.parameters()], 0.05)

        note("losses", each_step(model, optimizer, update))
        note("average", average)

    run(both, when, lambda model: [parameter.detach().clone() for parameter in model.parameters()], pattern)


@WHEN
def test_average_of_the_state_dict(both, when):
    def pattern(model, optimizer, note, average):
        def update():
            for name, value in model.state_dict().items():
                if value.dtype.is_floating_point:
                    average[name] = 0.9 * average[name] + 0.1 * value.detach()
                else:
                    average[name] = value.clone()

        note("losses", each_step(model, optimizer, update))
        note("average", average)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        note("evaluated", evaluate(model))
        model.load_state_dict(kept)

    run(both, when, lambda model: {name: value.clone() for name, value in model.state_dict().items()}, pattern)


@WHEN
def test_average_as_a_copy_that_needs_no_gradient(both, when):
    def make_average(model):
        average = copy.deepcopy(model).eval()
        for parameter in average.parameters():
            parameter.requires_grad = False
        return average

    def pattern(model, optimizer, note, average):
        @torch.no_grad()
        def update():
            parameters = collections.OrderedDict(model.named_parameters())
            for name, averaged in average.named_parameters():
                averaged.mul_(0.95).add_(parameters[name].data, alpha=0.05)
            for averaged, buffer in zip(average.buffers(), model.buffers(), strict=True):
                averaged.copy_(buffer)

        note("losses", each_step(model, optimizer, update))
        note("average", average.state_dict())
        note("still trainable", [parameter.requires_grad for parameter in model.parameters()])
        note("evaluated", loss_of(average, 90))

    run(both, when, make_average, pattern)


class Shadow:
    """The class that many scripts have: values are put into the model, and taken back, by assigning ``data``."""

    def __init__(self, model, decay=0.9):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.shadow[name] = parameter.data.clone()

    def update(self):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                assert name in self.shadow
                self.shadow[name] = ((1.0 - self.decay) * parameter.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.backup[name] = parameter.data
                parameter.data = self.shadow[name]

    def restore(self):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.data = self.backup[name]
        self.backup = {}


@WHEN
def test_average_applied_for_evaluation_by_assigning_data(both, when):
    def pattern(model, optimizer, note, average):
        for round_ in range(2):
            note("losses", each_step(model, optimizer, average.update, 2, first=2 * round_))
            average.apply_shadow()
            note("applied", weights_of(model))
            note("evaluated", evaluate(model))
            average.restore()
            note("restored", weights_of(model))
        note("average", average.shadow)

    run(both, when, Shadow, pattern)


class Weak:
    """Keeps weak references to the parameters, as torch_ema does."""

    def __init__(self, parameters, decay=0.9):
        parameters = list(parameters)
        self.decay = decay
        self.count = 0
        self.shadow = [parameter.clone().detach() for parameter in parameters if parameter.requires_grad]
        self.collected = None
        self._references = [weakref.ref(parameter) for parameter in parameters]

    def _parameters(self):
        parameters = [reference() for reference in self._references]
        assert all(parameter is not None for parameter in parameters)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def update(self):
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        with torch.no_grad():
            for shadow, parameter in zip(self.shadow, self._parameters(), strict=True):
                difference = shadow - parameter
                difference.mul_(1.0 - decay)
                shadow.sub_(difference)

    @contextlib.contextmanager
    def average_parameters(self):
        collected = [parameter.clone() for parameter in self._parameters()]
        for shadow, parameter in zip(self.shadow, self._parameters(), strict=True):
            parameter.data.copy_(shadow.data)
        try:
            yield
        finally:
            for kept, parameter in zip(collected, self._parameters(), strict=True):
                parameter.data.copy_(kept.data)


@WHEN
def test_average_with_weak_references_to_the_parameters(both, when):
    def pattern(model, optimizer, note, average):
        note("losses", each_step(model, optimizer, average.update))
        with average.average_parameters():
            note("averaged", weights_of(model))
            note("evaluated", evaluate(model))
        note("restored", weights_of(model))

    run(both, when, lambda model: Weak(model.parameters()), pattern)


class Buffered(nn.Module):
    """Keeps the average in buffers of its own, as latent diffusion does."""

    def __init__(self, model, decay=0.95):
        super().__init__()
        self.names = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("count", torch.tensor(0))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.names[name] = name.replace(".", "")
                self.register_buffer(self.names[name], parameter.clone().detach().data)
        self.collected = []

    def forward(self, model):
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            shadows = dict(self.named_buffers())
            for key in parameters:
                shadow = shadows[self.names[key]]
                shadow.sub_((1.0 - decay) * (shadow - parameters[key]))

    def copy_to(self, model):
        parameters = dict(model.named_parameters())
        shadows = dict(self.named_buffers())
        for key in parameters:
            parameters[key].data.copy_(shadows[self.names[key]].data)

    def store(self, parameters):
        self.collected = [parameter.clone() for parameter in parameters]

    def restore(self, parameters):
        for kept, parameter in zip(self.collected, parameters, strict=True):
            parameter.data.copy_(kept.data)


@WHEN
def test_average_in_the_buffers_of_another_module(both, when):
    def pattern(model, optimizer, note, average):
        note("losses", each_step(model, optimizer, lambda: average(model)))
        note("average", average.state_dict())
        average.store(model.parameters())
        average.copy_to(model)
        note("evaluated", evaluate(model))
        average.restore(model.parameters())
        note("restored", weights_of(model))

    run(both, when, Buffered, pattern)


def test_average_with_bias_correction(both):
    def pattern(model, optimizer, note):
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(1, 4):
            train(model, optimizer, 1, first=step)
            for averaged, parameter in zip(average, model.parameters(), strict=True):
                averaged.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            note("corrected", [averaged / (1 - 0.9**step) for averaged in average])

    both(pattern)


def test_average_in_another_type(both):
    def pattern(model, optimizer, note):
        wide = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        narrow = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}

        def update():
            for name, parameter in model.named_parameters():
                wide[name].lerp_(parameter.detach().double(), 0.1)
                narrow[name].lerp_(parameter.detach().to(torch.bfloat16), 0.1)

        note("losses", each_step(model, optimizer, update))
        note("wide", wide)
        note("narrow", narrow)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(wide[name])
        note("evaluated", evaluate(model))

    both(pattern)


def test_average_of_a_part_of_the_model(both):
    def pattern(model, optimizer, note):
        average = copy.deepcopy(model.blocks[-3:])

        @torch.no_grad()
        def update():
            for averaged, parameter in zip(average.parameters(), model.blocks[-3:].parameters(), strict=True):
                averaged.lerp_(parameter, 0.2)

        note("losses", each_step(model, optimizer, update))
        note("average", average.state_dict())
        model.blocks[-3:].load_state_dict(average.state_dict())
        note("loaded", weights_of(model))

    both(pattern)


def test_average_of_trainable_parameters_only(both):
    def make():
        model = make_tower()
        model.embedding.requires_grad_(False)
        model.blocks[::2].requires_grad_(False)
        return model

    def pattern(model, optimizer, note):
        average = {name: p.clone().detach() for name, p in model.named_parameters() if p.requires_grad}
        note("names", list(average))

        def update():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    average[name].copy_(0.9 * average[name] + 0.1 * parameter.data)

        note("losses", each_step(model, optimizer, update))
        note("average", average)

    both(pattern, make=make)


@WHEN
def test_polyak_average_as_one_vector(both, when):
    def pattern(model, optimizer, note, average):
        count = 1
        for step in range(3):
            train(model, optimizer, 1, first=step)
            with torch.no_grad():
                vector = nn.utils.parameters_to_vector(model.parameters())
            average += (vector - average) / (count + 1)
            count += 1
        note("average", average)
        kept = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(average.clone(), model.parameters())
        note("evaluated", evaluate(model))
        nn.utils.vector_to_parameters(kept, model.parameters())
        note("restored", weights_of(model))

    run(both, when, lambda model: nn.utils.parameters_to_vector(model.parameters()).detach().clone(), pattern)


def test_running_extremes_of_the_weights(both):
    def pattern(model, optimizer, note):
        lowest = [parameter.detach().clone() for parameter in model.parameters()]
        highest = [parameter.detach().clone() for parameter in model.parameters()]

        @torch.no_grad()
        def update():
            for low, high, parameter in zip(lowest, highest, model.parameters(), strict=True):
                torch.minimum(low, parameter, out=low)
                high.copy_(torch.max(high, parameter))

        note("losses", each_step(model, optimizer, update))
        note("lowest", lowest)
        note("highest", highest)
        note("spread", [(high - low).max() for low, high in zip(lowest, highest, strict=True)])

    both(pattern)


def test_mean_variance_and_samples_of_a_trajectory(both):
    """SWAG."""

    def pattern(model, optimizer, note):
        mean = [torch.zeros_like(p.data) for p in model.parameters()]
        square = [torch.zeros_like(p.data) for p in model.parameters()]
        deviations = collections.deque(maxlen=2)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            for place, parameter in enumerate(model.parameters()):
                mean[place] = (mean[place] * step + parameter.data) / (step + 1)
                square[place] = (square[place] * step + parameter.data**2) / (step + 1)
            deviations.append([p.data - m for p, m in zip(model.parameters(), mean, strict=True)])
        note("deviations", list(deviations))
        kept = [parameter.data.clone() for parameter in model.parameters()]
        source = torch.Generator().manual_seed(2)
        for _ in range(2):
            for parameter, center, second in zip(model.parameters(), mean, square, strict=True):
                spread = torch.clamp(second - center**2, 1e-30).sqrt()
                parameter.data = center + spread * torch.randn(parameter.shape, generator=source)
            note("sample", evaluate(model))
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value

    both(pattern)


def test_average_of_the_latest_snapshots(both):
    def pattern(model, optimizer, note):
        snapshots = collections.deque(maxlen=3)
        for step in range(5):
            train(model, optimizer, 1, first=step)
            snapshots.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        average = {name: torch.stack([s[name] for s in snapshots]).mean(0) for name in snapshots[0]}
        note("average", average)
        model.load_state_dict(average)
        note("evaluated", evaluate(model))

    both(pattern)


def test_slow_weights_every_few_steps(both):
    """Lookahead."""

    def pattern(model, optimizer, note):
        slow = {parameter: parameter.clone().detach() for parameter in model.parameters()}
        for step in range(6):
            train(model, optimizer, 1, first=step)
            if step % 3 == 2:
                for parameter, value in slow.items():
                    value.add_(parameter.data - value, alpha=0.5)
                    parameter.data.copy_(value)
                note("slow", list(slow.values()))

    both(pattern)


def test_weights_pulled_to_their_average(both):
    """Reptile and elastic averaging: the average acts on the model in every step."""

    def pattern(model, optimizer, note):
        center = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            train(model, optimizer, 1, first=step)
            with torch.no_grad():
                for middle, parameter in zip(center, model.parameters(), strict=True):
                    pull = 0.1 * (parameter - middle)
                    parameter.sub_(pull)
                    middle.add_(pull)
        note("center", center)

    both(pattern)


def test_an_average_as_the_teacher_in_the_loss(both):
    def pattern(model, optimizer, note):
        teacher = copy_of(model).requires_grad_(False)

        def loss(model, step):
            ids = make_ids(step)
            with torch.no_grad():
                target = teacher(ids).softmax(-1)
            return loss_of(model, step) + nn.functional.mse_loss(model(ids).softmax(-1), target)

        for step in range(3):
            note("loss", train(model, optimizer, 1, first=step, loss=loss))
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), teacher.parameters(), strict=True):
                    theirs.data = theirs.data * 0.9 + ours.data * 0.1
        note("teacher", weights_of(teacher))

    both(pattern)


def test_predictions_of_model_and_average_together(both):
    def pattern(model, optimizer, note):
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))
        note("losses", each_step(model, optimizer, lambda: average.update_parameters(model)))
        with torch.no_grad():
            note("together", (model(make_ids(7)) + average(make_ids(7))) / 2)
            distance = sum((a - b).norm() for a, b in zip(model.parameters(), average.parameters(), strict=True))
            note("distance", distance)

    both(pattern)


def test_average_of_one_model_refuses_another_shape(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        average = [torch.zeros(3) for _ in model.parameters()]
        with raises_in_both(RuntimeError):
            torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.5)
        with raises_in_both(RuntimeError):
            average[0].lerp_(model.embedding.weight.detach(), 0.5)

    both(pattern)


# timm and diffusers


TIMM = {
    "v1": ("ModelEma", {"decay": 0.9}),
    "v2": ("ModelEmaV2", {"decay": 0.9}),
    "v3": ("ModelEmaV3", {"decay": 0.9}),
    "v3_loop": ("ModelEmaV3", {"decay": 0.9, "foreach": False, "use_warmup": True, "device": torch.device("cpu")}),
    "v3_parameters": ("ModelEmaV3", {"decay": 0.9, "exclude_buffers": True, "use_warmup": True}),
    "v3_bf16": ("ModelEmaV3", {"decay": 0.9, "dtype": torch.bfloat16}),
}


@WHEN
@pytest.mark.parametrize("kind", TIMM)
def test_timm_average(both, kind, when):
    name, kwargs = TIMM[kind]
    cls = getattr(timm_module("model_ema"), name)

    def pattern(model, optimizer, note, average):
        for step in range(3):
            train(model, optimizer, 1, first=step)
            average.update(model, step=step + 2) if kind.startswith("v3") else average.update(model)
        module = average.ema if kind == "v1" else average.module
        note("average", module.state_dict())
        note("training", module.training)
        with torch.no_grad():
            note("output", module(make_ids()))
        if kind != "v1":
            average.set(model)
            note("set", module.state_dict())
        note("attributes", sorted(key for key in vars(module) if not key.startswith("_")))

    run(both, when, lambda model: cls(model, **kwargs), pattern)


DIFFUSERS = {
    "loop": {"decay": 0.9},
    "foreach": {"decay": 0.9, "foreach": True},
    "warmup": {"decay": 0.99, "use_ema_warmup": True, "inv_gamma": 1.0, "power": 0.75, "min_decay": 0.1},
}


@WHEN
@pytest.mark.parametrize("kind", DIFFUSERS)
def test_diffusers_average(both, kind, when):
    training_utils = pytest.importorskip("diffusers.training_utils")

    def pattern(model, optimizer, note, average):
        for round_ in range(2):
            steps = each_step(model, optimizer, lambda: average.step(model.parameters()), 3, first=3 * round_)
            note("losses", steps)
            note("decay", average.cur_decay_value)
            average.store(model.parameters())
            average.copy_to(model.parameters())
            note("evaluated", evaluate(model))
            note("applied", weights_of(model))
            average.restore(model.parameters())
            note("restored", weights_of(model))
        note("shadow", average.shadow_params)
        state = copy.deepcopy(average.state_dict())
        again = training_utils.EMAModel(model.parameters(), **DIFFUSERS[kind])
        again.load_state_dict(state)
        again.to(dtype=torch.float32)
        again.step(model.parameters())
        note("loaded", again.state_dict())

    run(both, when, lambda model: training_utils.EMAModel(model.parameters(), **DIFFUSERS[kind]), pattern)


def test_diffusers_average_with_frozen_parameters(both):
    training_utils = pytest.importorskip("diffusers.training_utils")

    def make():
        model = make_tower()
        model.blocks[:20].requires_grad_(False)
        return model

    def pattern(model, optimizer, note):
        averages = [training_utils.EMAModel(model.parameters(), decay=0.9, foreach=each) for each in (False, True)]
        for step in range(3):
            train(model, optimizer, 1, first=step)
            for average in averages:
                average.step(model.parameters())
        note("shadows", [average.shadow_params for average in averages])

    both(pattern, make=make)


# Several models


def test_averaging_two_live_models(both):
    """Federated averaging: each trains on its own batches, then both get the mean."""
    results = []
    for attached in (False, True):
        models = [make_tower(), make_tower(seed=1)]
        optimizers = [make_adamw(model) for model in models]
        if attached and both.config is not None:
            for place, model in enumerate(models):
                optimizers[place] = PatrickStarEngine(model, both.config, optimizers[place]).optimizer
        losses = []
        for round_ in range(2):
            for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                losses += train(model, optimizer, 2, first=10 * place + 2 * round_)
            with torch.no_grad():
                for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (left + right) / 2
                    left.copy_(mean)
                    right.data.copy_(mean)
        results.append((models, torch.stack(losses)))
    (plain, expected), (ours, actual) = results
    assert torch.equal(expected, actual)
    for left, right in zip(plain, ours, strict=True):
        assert_same_model(left, right)
    assert_same_model(ours[0], ours[1])


def test_a_live_model_mixed_with_a_plain_one(both):
    """A soup of two fine-tunings, put into the live model."""

    def pattern(model, optimizer, note):
        other = make_tower(seed=3)
        train(model, optimizer, 2)
        train(other, make_adamw(other), 2, first=20)
        for share in (0.25, 0.75):
            mixed = {}
            theirs = other.state_dict()
            for name, value in model.state_dict().items():
                mixed[name] = torch.lerp(value, theirs[name], share)
            other.load_state_dict(mixed)
            note("mixed", evaluate(other))
        with torch.no_grad():
            for ours, given in zip(model.parameters(), other.parameters(), strict=True):
                ours.lerp_(given, 0.5)
        note("weights", weights_of(model))

    both(pattern)


def test_task_arithmetic_on_a_live_model(both):
    def pattern(model, optimizer, note):
        base = copy.deepcopy(model.state_dict())
        train(model, optimizer, 3)
        task = {name: value - base[name] for name, value in model.state_dict().items()}
        note("task", task)
        model.load_state_dict({name: base[name] - 0.5 * task[name] for name in base})
        note("negated", evaluate(model))

    both(pattern)


def test_average_kept_by_a_callback_of_the_trainer(both, tmp_path):
    from trainers import assert_same_weights, tight
    from trainers import train as run_trainer
    from transformers import TrainerCallback

    class Average(TrainerCallback):
        def __init__(self):
            self.values, self.evaluated = {}, []

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.average.update_parameters(model)
            for name, parameter in model.named_parameters():
                self.values[name] = 0.5 * self.values.get(name, 0.0) + 0.5 * parameter.data

    def run_one(place, config):
        callback = Average()
        trainer, recorder = run_trainer("gpt2", tmp_path / place, config, callbacks=[callback], max_steps=3)
        return trainer, recorder, callback

    config = both.config
    if config is not None:
        config = {**config, "chunk_numel": "auto", **(tight("gpt2") if "chunk_budget" in config else {})}
    stock, recorder, expected = run_one("stock", None)
    ours, our_recorder, actual = run_one("ours", config)
    assert recorder.losses == our_recorder.losses
    assert_same_weights(stock.model, ours.model)
    assert_same_weights(expected.average, actual.average)
    for name, value in expected.values.items():
        assert torch.equal(value, actual.values[name]), name
