"""Changing what is trained: freezing, new, replaced and removed modules, adapters, while an engine is attached."""

import copy
import types

import peft
import pytest
import torch
from live.both import VOCAB, WIDTH, Block, Tower, loss_of, make_adamw, make_ids, make_tower, raises_in_both, train
from live.hf import states
from models import make_batch, make_model
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from trainers import tight

from hf_patrickstar import EngineError, PatrickStarEngine


def room(both, nbytes):
    """Settings for patterns in which one module uses more parameters at once than the smallest budget has room for."""
    return {"chunk_budget": nbytes} if both.config else None


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def add(optimizer, parameters, **options):
    optimizer.add_param_group({"params": list(parameters), **options})


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def values(parameters):
    """Copies of values, by the way everybody makes them."""
    return [parameter.detach().clone() for parameter in parameters]


def gradients(model):
    return {name: p.grad is not None and p.grad.clone() for name, p in model.named_parameters()}


# Freezing and unfreezing


def make_frozen_tower(*names):
    """A Tower of which only the named submodules are trained."""
    model = make_tower()
    model.requires_grad_(False)
    for name in names:
        model.get_submodule(name).requires_grad_(True)
    return model


def test_layers_unfrozen_one_by_one_with_an_optimizer_over_all(both):
    def pattern(model, optimizer, note):
        note("only the norm", train(model, optimizer, 2))
        for stage, block in enumerate(list(model.blocks)[::-1][:3]):
            block.requires_grad_(True)
            note("trainable", len(trainable(model)))
            note("losses", train(model, optimizer, first=2 + stage))
        note("weights", values(model.blocks[-2].parameters()))

    both(pattern, make=lambda: make_frozen_tower("norm"))


def test_layers_unfrozen_with_add_param_group(both):
    """As fastai and Lightning's BaseFinetuning do: another learning rate for each group that joins."""

    def make_optimizer(model):
        return torch.optim.AdamW(trainable(model), lr=1e-2)

    def pattern(model, optimizer, note):
        note("first", train(model, optimizer, 2))
        for stage in range(3):
            block = model.blocks[-2 - stage]
            for parameter in block.parameters():
                parameter.requires_grad = True
            add(optimizer, block.parameters(), lr=1e-2 / 2 ** (stage + 1), weight_decay=0.0)
            note("losses", train(model, optimizer, first=2 + stage))
            note("groups", [(group["lr"], len(group["params"])) for group in optimizer.param_groups])

    both(pattern, make=lambda: make_frozen_tower("norm", "blocks.13"), make_optimizer=make_optimizer)


def test_everything_unfrozen_at_once(both):
    def pattern(model, optimizer, note):
        note("head", train(model, optimizer, 2))
        model.requires_grad_(True)
        note("all", train(model, optimizer, 2, first=2))

    both(pattern, make=lambda: make_frozen_tower("head"))


def test_freezing_again_keeps_the_state(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        for block in model.blocks[:20]:
            block.requires_grad_(False)
        before = values(model.blocks[3].parameters())
        note("frozen", train(model, optimizer, 2, first=2))
        note("did not move", [torch.equal(a, b) for a, b in zip(before, model.blocks[3].parameters(), strict=True)])
        model.blocks[:10].requires_grad_(True)
        note("unfrozen", train(model, optimizer, 2, first=4))

    both(pattern)


def test_freezing_everything_but_the_head(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("norm") or name == "scale")
        note("trainable", sum(p.numel() for p in trainable(model)))
        note("losses", train(model, optimizer, 3, first=1))
        note("gradients", gradients(model))

    both(pattern)


def test_one_name_of_a_tied_weight_frozen(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.head.requires_grad_(False)
        note("the other name says", model.embedding.weight.requires_grad)
        note("frozen", train(model, optimizer, 2, first=1))
        model.embedding.weight.requires_grad = True
        note("losses", train(model, optimizer, 2, first=3))

    both(pattern)


def test_frozen_between_backward_and_step(both):
    """The gradient is there, so torch's optimizers use it."""

    def pattern(model, optimizer, note):
        loss_of(model).backward()
        model.blocks[:5].requires_grad_(False)
        note("still there", [p.grad.clone() for p in model.blocks[2].parameters()])
        optimizer.step()
        note("moved", values(model.blocks[2].parameters()))
        optimizer.zero_grad()

    both(pattern)


def test_frozen_between_micro_batches(both):
    def pattern(model, optimizer, note):
        loss_of(model, 0).backward()
        model.blocks[10:].requires_grad_(False)
        loss_of(model, 1).backward()
        note("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)

    both(pattern)


def test_unfrozen_between_forward_and_backward(both):
    """What was frozen in forward gets no gradient from its graph."""

    def pattern(model, optimizer, note):
        loss = loss_of(model)
        model.blocks[0].requires_grad_(True)
        loss.backward()
        note("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad()

    both(pattern, make=lambda: make_frozen_tower("norm", "blocks.3", "blocks.8"))


def test_frozen_in_an_evaluation_under_no_grad(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            note("evaluated", loss_of(model, 9))
        note("without no_grad", loss_of(model, 8))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_frozen_layers_that_only_say_requires_grad_in_an_evaluation(both):
    """As a reference adapter is switched on for a forward under no_grad: nothing of it is ever trained."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        for step in range(2):
            model.blocks[:8].requires_grad_(True)
            with torch.no_grad():
                note("reference", loss_of(model, step))
            with torch.inference_mode():
                note("inference", float(loss_of(model, step)))
            model.blocks[:8].requires_grad_(False)
            note("losses", train(model, optimizer, first=1 + step))
        note("has no state", len(optimizer.state_dict()["state"]))

    both(pattern, make=lambda: make_frozen_tower("norm", "blocks.8"))


def test_the_discriminator_frozen_while_its_input_is_trained(both):
    """GAN code freezes one half while the gradient runs through it to the other."""

    def pattern(model, optimizer, note):
        front, back = model.blocks[:7], model.blocks[7:]
        for step in range(2):
            for half, other in ((front, back), (back, front)):
                half.requires_grad_(False)
                other.requires_grad_(True)
                note("losses", train(model, optimizer, first=step))
        model.requires_grad_(True)

    both(pattern)


def test_random_layers_active_in_each_period(both):
    """LISA: every few steps other layers are unfrozen; the states of those that rest are kept."""

    def pattern(model, optimizer, note):
        generator = torch.Generator().manual_seed(3)
        for period in range(4):
            model.blocks.requires_grad_(False)
            for place in torch.randperm(len(model.blocks), generator=generator)[:4].tolist():
                model.blocks[place].requires_grad_(True)
            note("losses", train(model, optimizer, 2, first=2 * period))
            note("states", len(optimizer.state_dict()["state"]))

    both(pattern)


def test_biases_alone(both):
    """BitFit, switched on in the middle."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("bias")
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_everything_frozen_is_refused_by_backward(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.requires_grad_(False)
        with raises_in_both(RuntimeError, match="does not require grad"):
            loss_of(model).backward()
        model.requires_grad_(True)
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_a_frozen_model_trains_what_is_put_before_it(both):
    """A soft prompt that belongs to the script, with an optimizer of its own."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.requires_grad_(False)
        prompt = torch.zeros(1, 1, WIDTH, requires_grad=True)
        prompting = torch.optim.Adam([prompt], lr=0.1)
        for step in range(3):
            ids = make_ids(step)
            x = torch.cat([prompt.expand(len(ids), -1, -1), model.embedding(ids)], 1)
            for block in model.blocks[:6]:
                x = block(x)
            loss = nn.functional.cross_entropy(model.head(model.norm(x))[:, :-1].flatten(0, 1), ids.flatten())
            loss.backward()
            prompting.step()
            prompting.zero_grad()
            note("loss", loss.detach())
        note("prompt", prompt)

    both(pattern, more=0)


class DroppingTower(Tower):
    """LayerDrop: a layer is left out with a probability of a half."""

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def make_dropping():
    torch.manual_seed(0)
    return DroppingTower()


def test_layers_dropped_at_random(both):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 4))
        model.eval()
        with torch.no_grad():
            note("evaluated", loss_of(model, 9))
        model.train()

    both(pattern, make=make_dropping)


def test_layers_dropped_at_random_with_gradients_of_zero(both):
    """With set_to_none=False a layer that was left out has a gradient of zeros, and decays."""

    def pattern(model, optimizer, note):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, step)
            loss.backward()
            note("gradients", gradients(model))
            optimizer.step()
            note("loss", loss.detach())

    both(pattern, make=make_dropping, make_optimizer=make_sgd)


# Parameters that join the optimizer


def test_parameters_of_the_model_that_were_in_no_group(both):
    def make_optimizer(model):
        return torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)

    def pattern(model, optimizer, note):
        note("blocks alone", train(model, optimizer, 2))
        note("the others have gradients", model.scale.grad is None)
        add(optimizer, [model.scale], lr=0.1)
        note("scale too", train(model, optimizer, first=2))
        add(optimizer, [model.embedding.weight, *model.norm.parameters()])
        note("all", train(model, optimizer, first=3))
        with raises_in_both(ValueError, match="more than one parameter group"):
            add(optimizer, [model.scale])

    both(pattern, make_optimizer=make_optimizer)


def test_a_parameter_taken_out_of_its_group(both):
    """The lists of the groups are the user's: what is taken out keeps its value, and its state if it comes back."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        group = optimizer.param_groups[0]
        place = next(place for place, parameter in enumerate(group["params"]) if parameter is model.scale)
        scale = group["params"].pop(place)
        before = scale.detach().clone()
        note("without it", train(model, optimizer, first=2))
        note("the same", torch.equal(before, model.scale))
        group["params"].insert(place, scale)
        note("with it", train(model, optimizer, first=3))

    both(pattern)


def test_parameters_moved_between_groups_by_hand(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        group = optimizer.param_groups[0]
        decayed = [parameter for parameter in group["params"] if parameter.dim() > 1]
        rest = [parameter for parameter in group["params"] if parameter.dim() <= 1]
        group["params"] = decayed
        optimizer.param_groups.append({**group, "params": rest, "weight_decay": 0.0, "lr": 3e-3})
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_learning_rate_and_decay_changed_by_hand(both):
    def pattern(model, optimizer, note):
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
                group["weight_decay"] = 0.1 * step
                group["betas"] = (0.9 - 0.1 * step, 0.99)
            note("losses", train(model, optimizer, first=step))

    both(pattern)


def test_a_new_optimizer_for_the_second_stage(both):
    """A plain torch optimizer made over the live model, in place of the first."""

    def pattern(model, optimizer, note):
        note("first stage", train(model, optimizer, 2))
        model.blocks[:30].requires_grad_(False)
        second = torch.optim.RMSprop(trainable(model), lr=1e-3, momentum=0.5)
        note("second stage", train(model, second, 3, first=2))
        note("state", states(second))

    both(pattern, more=0)


# New, replaced, moved and removed modules


def make_block(seed):
    torch.manual_seed(seed)
    return Block()


def test_a_layer_appended_in_the_middle(both):
    def pattern(model, optimizer, note):
        note("before", train(model, optimizer, 2))
        model.blocks.append(make_block(3))
        add(optimizer, model.blocks[-1].parameters(), lr=2e-2)
        note("after", train(model, optimizer, 2, first=2))
        note("weights", values(model.blocks[-1].parameters()))

    both(pattern)


def test_a_layer_appended_that_joins_the_optimizer_later(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks.append(make_block(3))
        loss_of(model, 1).backward()
        note("gradients", gradients(model))
        optimizer.step()
        note("not moved", values(model.blocks[-1].parameters()))
        optimizer.zero_grad()
        model.zero_grad()
        add(optimizer, model.blocks[-1].parameters())
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_add_param_group_before_the_layer_is_in_the_model(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        block = make_block(5)
        add(optimizer, block.parameters())
        note("only in the optimizer", train(model, optimizer, first=1))
        model.blocks.insert(4, block)
        note("in both", train(model, optimizer, 2, first=2))

    both(pattern)


def test_a_second_head_with_a_loss_of_its_own(both):
    def with_probe(model, step=0):
        ids = make_ids(step)
        pooled = model.norm(model.blocks[0](model.embedding(ids))).mean(1)
        return loss_of(model, step) + nn.functional.cross_entropy(model.heads["parity"](pooled), ids[:, 0] % 2)

    def pattern(model, optimizer, note):
        note("one task", train(model, optimizer, 2))
        model.heads = nn.ModuleDict({"parity": nn.Linear(WIDTH, 2)})
        add(optimizer, model.heads.parameters())
        note("two tasks", train(model, optimizer, 2, first=2, loss=with_probe))
        note("head", values(model.heads.parameters()))

    both(pattern, loss=with_probe)


def test_a_replaced_head(both):
    """Fine-tuning another task: the head, which was tied, is a new one; the embedding stays."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        model.head = nn.Linear(WIDTH, VOCAB)
        add(optimizer, model.head.parameters())
        note("losses", train(model, optimizer, 2, first=2))
        note("untied", torch.equal(model.head.weight, model.embedding.weight))

    both(pattern)


def test_a_replaced_layer_is_an_ordinary_module(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        old = model.blocks[3]
        model.blocks[3] = make_block(4)
        add(optimizer, model.blocks[3].parameters())
        note("losses", train(model, optimizer, 1, first=2))
        note("an ordinary parameter", [type(parameter) is nn.Parameter for parameter in old.parameters()])
        note("values", values(old.parameters()))
        note("runs alone", old(torch.ones(2, WIDTH)))
        with torch.no_grad():
            old.linear.weight.zero_()
        note("its state is kept", states(optimizer))
        return old

    both(pattern)


def test_layers_dropped_from_the_end(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks = model.blocks[:12]
        note("parameters", [name for name, _ in model.named_parameters()])
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_layers_deleted_in_place(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        del model.blocks[5:30]
        note("losses", train(model, optimizer, 2, first=1))
        del model.blocks[0]
        note("fewer", train(model, optimizer, 1, first=3))

    both(pattern)


def test_a_layer_taken_out_and_put_back(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        last = model.blocks.pop(-1)
        note("without", train(model, optimizer, 2, first=2))
        note("kept", values(last.parameters()))
        with torch.no_grad():
            last.linear.bias.add_(0.5)
        model.blocks.append(last)
        note("with", train(model, optimizer, 2, first=4))

    both(pattern)


def test_a_layer_taken_out_that_goes_on_training_outside(both):
    """It is still in the optimizer's groups, so the optimizer updates it wherever it is used."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        last = model.blocks.pop(-1)

        def with_it(model, step=0):
            return loss_of(model, step) + last(torch.full((2, WIDTH), 0.1)).pow(2).mean()

        note("losses", train(model, optimizer, 3, first=1, loss=with_it))
        note("values", values(last.parameters()))
        return last

    both(pattern)


def test_a_layer_replaced_by_nothing(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.norm = nn.Identity()
        model.blocks[7].norm = nn.Identity()
        note("losses", train(model, optimizer, 2, first=1))
        model.blocks[7].linear.bias = None
        note("without a bias", train(model, optimizer, 2, first=3))

    both(pattern)


def test_an_attribute_deleted_and_set_again(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        norm = model.norm
        del model.norm
        with raises_in_both(AttributeError):
            loss_of(model)
        model.norm = norm
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_layers_in_another_order(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks = nn.ModuleList(reversed(model.blocks))
        note("reversed", train(model, optimizer, first=1))
        model.blocks[0], model.blocks[8] = model.blocks[8], model.blocks[0]
        note("swapped", train(model, optimizer, first=2))
        note("names", [name for name, _ in model.named_parameters()])

    both(pattern)


def test_a_layer_used_twice_from_now_on(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks[4] = model.blocks[3]
        model.blocks.append(model.blocks[0])
        note("losses", train(model, optimizer, 2, first=1))
        note("parameters", len(list(model.parameters())))
        note("all names", sorted(model.state_dict()))

    both(pattern)


def test_layers_stacked_progressively(both):
    """Copies of trained layers on top: the model grows to twice its depth."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        new = [copy.deepcopy(block) for block in model.blocks[:6]]
        model.blocks.extend(new)
        for block in new:
            add(optimizer, block.parameters())
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_a_new_optimizer_after_the_model_grew(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks.append(make_block(6))
        model.blocks = model.blocks[8:]
        second = make_adamw(model)
        note("losses", train(model, second, 3, first=1))
        note("state", states(second))

    both(pattern, more=0)


class Scaled(nn.Module):
    """Wraps a module, which moves one level down."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.module(x) * self.gain


def test_a_layer_wrapped_and_unwrapped(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks[2] = Scaled(model.blocks[2])
        add(optimizer, [model.blocks[2].gain], weight_decay=0.0)
        note("wrapped", train(model, optimizer, 2, first=1))
        note("gain", model.blocks[2].gain)
        model.blocks[2] = model.blocks[2].module
        note("unwrapped", train(model, optimizer, 1, first=3))

    both(pattern)


class OwnLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_every_linear_replaced_by_one_with_the_same_parameters(both):
    """As converters to another kernel or to quantisation do: other modules, the very same Parameter objects."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module.bias is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, OwnLinear(module))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_a_wider_layer_with_the_old_weights(both):
    """net2net: the new layer computes the same at first."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        norm, linear = model.blocks[1].norm, model.blocks[1].linear
        wide, back = nn.Linear(WIDTH, WIDTH + 8), nn.Linear(WIDTH + 8, WIDTH, bias=False)
        with torch.no_grad():
            wide.weight[:WIDTH].copy_(linear.weight)
            wide.weight[WIDTH:] = linear.weight[:8]
            wide.bias[:WIDTH] = linear.bias
            wide.bias[WIDTH:] = linear.bias[:8]
            back.weight.copy_(torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, 8)], 1))
        model.blocks[1].linear = nn.Sequential(wide, back)
        add(optimizer, model.blocks[1].linear.parameters())
        note("losses", train(model, optimizer, 2, first=2))
        note("norm is the same", norm is model.blocks[1].norm)

    both(pattern, settings=room(both, 6144))


def test_a_vocabulary_that_grows(both):
    """A larger embedding with the old rows, the head tied to it, and the optimizer made anew."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        old = model.embedding.weight.data
        model.embedding = nn.Embedding(VOCAB + 8, WIDTH)
        model.embedding.weight.data[:VOCAB] = old
        model.head = nn.Linear(WIDTH, VOCAB + 8, bias=False)
        model.head.weight = model.embedding.weight
        second = make_adamw(model)
        note("losses", train(model, second, 3, first=2))
        note("state", states(second))

    both(pattern, more=0, settings=room(both, 6144))


def test_the_state_of_a_grown_embedding_taken_along(both):
    """Rows of Adam's averages are copied by hand for the new parameter, as code for new tokens does."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        old = model.embedding.weight
        new = nn.Parameter(torch.cat([old.detach(), torch.zeros(8, WIDTH)]))
        model.embedding.weight = model.head.weight = new
        group = optimizer.param_groups[0]
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            key: torch.cat([value, torch.zeros(8, WIDTH)]) if value.dim() else value for key, value in state.items()
        }
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern, settings=room(both, 6144))


def test_neurons_removed(both):
    """Structured pruning by new Parameters of fewer rows."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model.blocks[0].linear = nn.Sequential(first, second)
        train(model, optimizer, 1, first=1)
        keep = first.weight.norm(dim=1).topk(10).indices.sort().values
        first.weight = nn.Parameter(first.weight.data[keep])
        first.bias = nn.Parameter(first.bias.data[keep])
        second.weight = nn.Parameter(second.weight.data[:, keep])
        add(optimizer, model.blocks[0].linear.parameters())
        note("losses", train(model, optimizer, 2, first=2))
        note("shapes", [tuple(parameter.shape) for parameter in model.blocks[0].parameters()])

    both(pattern)


def test_neurons_removed_through_data(both):
    """The same Parameter with fewer rows: ``.data`` takes any shape."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.embedding.weight
        weight.data = weight.data[:20].clone()
        note("shape", tuple(weight.shape))
        note("trainable", weight.requires_grad)
        note("rows", model.head(torch.ones(1, WIDTH)))

        def small(model, step=0):
            ids = make_ids(step) % 20
            logits = model(ids[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        note("losses", train(model, optimizer, 3, first=1, loss=small))

    both(pattern, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05), more=0)


# Parameters replaced, registered, tied


def test_a_replaced_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        old = model.scale
        model.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        add(optimizer, [model.scale])
        note("losses", train(model, optimizer, 2, first=1))
        note("old", old)
        note("an ordinary parameter", type(old) is nn.Parameter)
        note("new", model.scale)

    both(pattern)


def test_a_replaced_parameter_that_no_optimizer_has(both):
    """As in plain torch it gets gradients, and stays as it is."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.scale = nn.Parameter(model.scale.detach() * 2)
        loss_of(model, 1).backward()
        note("gradient", model.scale.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        note("new", model.scale)
        note("gradient stays", model.scale.grad.clone())

    both(pattern)


def test_a_parameter_registered_later(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.head.register_parameter("bias", nn.Parameter(torch.zeros(VOCAB)))
        add(optimizer, [model.head.bias], lr=0.1, weight_decay=0.0)
        note("losses", train(model, optimizer, 2, first=1))
        note("bias", model.head.bias)
        model.head.register_parameter("bias", None)
        note("without", train(model, optimizer, 1, first=3))

    both(pattern)


def test_a_parameter_that_becomes_a_buffer_and_a_buffer_that_becomes_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        scale, offset = model.scale, model.offset
        del model.scale, model.offset
        model.register_buffer("scale", scale.detach().clone())
        model.offset = nn.Parameter(offset)
        add(optimizer, [model.offset])
        note("losses", train(model, optimizer, 2, first=1))
        note("buffers", dict(model.named_buffers()))
        note("offset", model.offset)

    both(pattern)


def test_weights_tied_in_the_middle(both):
    """The weight that stays gets the gradients of both uses; the other is nowhere in the model any more."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks[1:4]:
            block.linear.weight = model.blocks[0].linear.weight
        note("tied", train(model, optimizer, 2, first=1))
        note("parameters", len(list(model.parameters())))
        note("state dict", len(model.state_dict()))

    both(pattern)


def test_weights_untied_in_the_middle(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        add(optimizer, [model.head.weight])
        note("untied", train(model, optimizer, 2, first=1))
        note("differ", torch.equal(model.head.weight, model.embedding.weight))
        model.head.weight = model.embedding.weight
        note("tied again", train(model, optimizer, 1, first=3))

    both(pattern)


def test_prompts_appended_to_a_parameter_list(both):
    def prompted(model, step=0):
        return loss_of(model, step) + sum((p * model.offset).sum().square() for p in model.prompts)

    def pattern(model, optimizer, note):
        model.prompts = nn.ParameterList()
        train(model, optimizer)
        for task in range(3):
            model.prompts.append(nn.Parameter(torch.full((2, WIDTH), 0.1 * (task + 1))))
            add(optimizer, [model.prompts[-1]])
            note("losses", train(model, optimizer, first=1 + task, loss=prompted))
        note("prompts", values(model.prompts))

    both(pattern, loss=prompted)


def test_load_state_dict_that_assigns(both):
    """``assign=True`` makes the loaded tensors the parameters; the optimizer is made anew."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        state = {key: value.clone() * 0.5 for key, value in model.state_dict().items()}
        old = model.scale
        note("result", str(model.load_state_dict(state, assign=True)))
        note("another object", model.scale is old)
        note("trainable", model.scale.requires_grad)
        second = make_adamw(model)
        note("losses", train(model, second, 2, first=1))
        note("state", states(second))

    both(pattern, more=0)


def test_a_submodule_that_assigns_what_it_loads(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        block = model.blocks[2]
        block.load_state_dict({key: value + 0.1 for key, value in block.state_dict().items()}, assign=True)
        add(optimizer, block.parameters())
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_swap_tensors(both):
    """torch's own way to exchange two tensors in place, as PEFT's hot-swapping does."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        new = nn.Parameter(torch.full((WIDTH,), 2.0))
        torch.utils.swap_tensors(model.scale, new)
        note("swapped", model.scale)
        note("the other", new)
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_state_saved_before_layers_were_added_and_loaded_after(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        saved = copy.deepcopy(model.state_dict())
        model.blocks.append(make_block(8))
        add(optimizer, model.blocks[-1].parameters())
        train(model, optimizer, first=1)
        with raises_in_both(RuntimeError, match="Missing key"):
            model.load_state_dict(saved)
        note("missing", model.load_state_dict(saved, strict=False).missing_keys)
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


# Lazy modules, parametrisations, pruning


class LazyTower(Tower):
    def __init__(self):
        super().__init__(24)
        self.lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(WIDTH))

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        x = x + self.lazy(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def make_lazy():
    torch.manual_seed(0)
    return LazyTower()


def test_lazy_modules_whose_first_forward_is_a_training_step(both):
    def pattern(model, optimizer, note):
        note("has shapes", nn.parameter.is_lazy(model.lazy[0].weight))
        note("losses", train(model, optimizer, 3))
        note("has shapes now", nn.parameter.is_lazy(model.lazy[0].weight))
        note("class", type(model.lazy[0]).__name__)
        note("weights", values(model.lazy.parameters()))

    both(pattern, make=make_lazy)


def test_lazy_modules_after_a_dry_run(both):
    def make_optimizer(model):
        lazy = {id(parameter) for parameter in model.lazy.parameters()}
        return torch.optim.AdamW([p for p in model.parameters() if id(p) not in lazy], lr=1e-2)

    def pattern(model, optimizer, note):
        with torch.no_grad():
            note("dry run", model(make_ids()))
        add(optimizer, model.lazy.parameters(), lr=3e-3)
        note("losses", train(model, optimizer, 2))

    both(pattern, make=make_lazy, make_optimizer=make_optimizer)


def test_a_lazy_module_added_in_the_middle(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks.append(nn.LazyLinear(WIDTH))
        add(optimizer, model.blocks[-1].parameters())
        note("losses", train(model, optimizer, 2, first=1))
        note("weights", values(model.blocks[-1].parameters()))

    both(pattern)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def test_a_parametrisation_registered_and_removed(both):
    """The original is the same Parameter under another name, so the optimizer goes on with it."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        linear = model.blocks[0].linear
        parametrize.register_parametrization(linear, "weight", Symmetric())
        note("symmetric", linear.weight)
        note("registered", train(model, optimizer, 2, first=1))
        note("original", linear.parametrizations.weight.original)
        with parametrize.cached():
            note("cached", loss_of(model, 3))
        parametrize.remove_parametrizations(linear, "weight")
        note("removed", linear.weight)
        note("after", train(model, optimizer, 2, first=4))

    both(pattern)


def test_a_parametrisation_removed_without_its_effect(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        linear = model.blocks[0].linear
        parametrize.register_parametrization(linear, "weight", Symmetric())
        train(model, optimizer, first=1)
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
        note("the original", linear.weight)

    both(pattern)


def test_weight_norm_as_a_parametrisation(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        linear = parametrizations.weight_norm(model.blocks[0].linear)
        add(optimizer, linear.parametrizations.parameters())
        note("losses", train(model, optimizer, 2, first=1))
        note("magnitude", linear.parametrizations.weight.original0)
        parametrize.remove_parametrizations(linear, "weight")
        add(optimizer, [linear.weight])
        note("removed", train(model, optimizer, 2, first=3))

    both(pattern, settings=room(both, 6144))


def test_weight_norm_by_hooks(both):
    """The older function, which Hugging Face's audio models still call."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        linear = nn.utils.weight_norm(model.blocks[0].linear)
        add(optimizer, [linear.weight_g, linear.weight_v])
        note("losses", train(model, optimizer, 2, first=1))
        note("magnitude", linear.weight_g)
        nn.utils.remove_weight_norm(linear)
        add(optimizer, [linear.weight])
        note("removed", train(model, optimizer, 2, first=3))

    both(pattern, settings=room(both, 6144))


@pytest.mark.parametrize("register", [parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "hooks"])
def test_spectral_norm_registered_in_the_middle(both, register):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks[:2]:
            register(block.linear)
        note("losses", train(model, optimizer, 2, first=1))
        note("buffers", dict(model.named_buffers()))
        note("names", [name for name, _ in model.named_parameters()][:12])

    both(pattern)


def test_orthogonal_weights(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        linear = parametrizations.orthogonal(model.blocks[0].linear)
        note("losses", train(model, optimizer, 2, first=1))
        note("weight", linear.weight)

    both(pattern, settings=room(both, 6144))


def test_pruned_by_magnitude_in_the_middle(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        for block in model.blocks[:3]:
            prune.l1_unstructured(block.linear, "weight", amount=0.3)
        note("pruned", train(model, optimizer, 2, first=2))
        note("zeros", [int((block.linear.weight == 0).sum()) for block in model.blocks[:3]])
        prune.ln_structured(model.blocks[0].linear, "weight", amount=4, n=2, dim=0)
        note("pruned twice", train(model, optimizer, 1, first=4))
        for block in model.blocks[:3]:
            prune.remove(block.linear, "weight")
        note("for good", model.blocks[0].linear.weight)
        note("losses", train(model, optimizer, 1, first=5))

    both(pattern)


def test_pruned_over_all_layers_at_once(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        pairs = [(block.linear, "weight") for block in model.blocks]
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.5)
        note("masks", [linear.weight_mask.sum() for linear, _ in pairs])
        note("losses", train(model, optimizer, 2, first=1))
        for pair in pairs:
            prune.remove(*pair)

    both(pattern)


def test_the_lottery_ticket(both):
    """Pruned by magnitude, rewound to the first weights, trained again."""

    def pattern(model, optimizer, note):
        first = copy.deepcopy(model.state_dict())
        train(model, optimizer, 2)
        masks = {name: p.abs() > p.abs().median() for name, p in model.named_parameters() if p.dim() > 1}
        model.load_state_dict(first)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in masks:
                    parameter.mul_(masks[name])
                    parameter.register_hook(lambda gradient, mask=masks[name]: gradient * mask)
        note("losses", train(model, optimizer, 2, first=2))
        note("zeros", [int((p == 0).sum()) for p in model.parameters()])

    both(pattern)


# Functions for every tensor of the model, and modules that compute with what their children hold


def test_functions_applied_to_the_model_and_its_gradients(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss_of(model, 1).backward()
        model.blocks[3]._apply(lambda tensor: tensor * 0.5)
        model.blocks[4]._apply(lambda tensor: tensor.detach().mul_(2.0))
        model._apply(lambda tensor: tensor + 0.01, recurse=False)
        note("values", values(model.parameters()))
        note("gradients", gradients(model))
        note("scale", model.offset)
        optimizer.step()
        optimizer.zero_grad()
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_what_would_move_the_model_is_refused_and_changes_nothing(both):
    if both.config is None:
        pytest.skip("plain torch does it")
    model = make_tower()
    optimizer = PatrickStarEngine(model, both.config, make_adamw(model)).optimizer
    train(model, optimizer)
    before, offset = copy.deepcopy(model.state_dict()), model.offset
    moves = (model.share_memory, model.half, lambda: model.to("meta"), lambda: model._apply(lambda t: t.unsqueeze(0)))
    for move in moves:
        with pytest.raises(EngineError, match=r"^parameter '.*' .*detach\(\)"):
            move()
        assert model.offset is offset
        assert not model.offset.is_shared()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
    copied = copy.deepcopy(model)
    assert all(parameter.is_shared() for parameter in copied.share_memory().parameters())


class Encoder(nn.Module):
    def __init__(self, norm_first):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, mask=None):
        return self.head(self.layers(self.embedding(ids), src_key_padding_mask=mask))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_in_evaluation(both, norm_first):
    """torch computes a layer at once in evaluation, from its children's parameters, unless hooks are in the way.

    With a padding mask that way rounds differently, and leaves zeros where nothing is asked for.
    """

    def make():
        torch.manual_seed(0)
        return Encoder(norm_first)

    rows = []

    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.eval()
        mask = torch.arange(6).repeat(4, 1) >= torch.tensor([[6], [4], [2], [5]])
        with torch.no_grad():
            note("output", model(make_ids()))
            note("layer", model.layers.layers[1](torch.ones(2, 3, WIDTH)))
            rows.append(model(make_ids(), mask)[~mask])
        note("with a graph", model(make_ids(), mask)[~mask].detach())
        model.train()

    settings = {"chunk_numel": 1280, "chunk_budget": 16384} if both.config and "chunk_numel" in both.config else None
    both(pattern, make=make, settings=settings)
    assert torch.allclose(*rows, atol=1e-6)


# Adapters by hand and by PEFT


class HandMadeLora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.requires_grad = False
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def test_lora_by_hand_put_in_and_merged(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.requires_grad_(False)
        for block in model.blocks[:8]:
            block.linear = HandMadeLora(block.linear)
        lora = torch.optim.AdamW(trainable(model), lr=1e-2)
        note("adapters", train(model, lora, 3, first=1))
        for block in model.blocks[:8]:
            wrapper = block.linear
            with torch.no_grad():
                wrapper.base.weight += wrapper.b @ wrapper.a
            block.linear = wrapper.base
        with torch.no_grad():
            note("merged", loss_of(model, 5))
        model.requires_grad_(True)

    both(pattern)


def lora_config(cls=peft.LoraConfig, **kwargs):
    kwargs.setdefault("target_modules", r"blocks\.\d\.linear")
    return cls(**{"r": 4, "init_lora_weights": False, **kwargs} if cls is peft.LoraConfig else kwargs)


def make_lora(**kwargs):
    def make():
        model = make_tower()
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora_config(**kwargs))

    return make


def test_get_peft_model_after_the_engine(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        wrapped = peft.get_peft_model(model, lora_config())
        note("counts", wrapped.get_nb_trainable_parameters())
        add(optimizer, trainable(wrapped))
        note("losses", train(wrapped, optimizer, 2, first=1))
        note("adapter", peft.get_peft_model_state_dict(wrapped))
        return wrapped

    both(pattern)


def test_get_peft_model_after_the_engine_with_a_new_optimizer(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        wrapped = peft.get_peft_model(model, lora_config())
        second = torch.optim.AdamW(trainable(wrapped), lr=1e-2)
        note("losses", train(wrapped, second, 3, first=1))
        note("adapter", peft.get_peft_model_state_dict(wrapped))
        note("state", states(second))

    both(pattern, more=0)


@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian", "orthogonal"])
def test_adapters_whose_first_values_come_from_the_base_weights(both, init):
    """PiSSA and OLoRA read the live weight and write what is left of it."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        wrapped = peft.get_peft_model(model, lora_config(init_lora_weights=init))
        note("what is left", model.blocks[0].linear.base_layer.weight)
        add(optimizer, trainable(wrapped))
        note("losses", train(wrapped, optimizer, 2, first=1))

    both(pattern)


@pytest.mark.parametrize(
    "config",
    [
        lambda: lora_config(use_dora=True),
        lambda: lora_config(use_rslora=True, lora_bias=True),
        lambda: lora_config(bias="all"),
        lambda: lora_config(bias="lora_only"),
        lambda: lora_config(lora_dropout=0.3),
        lambda: lora_config(peft.IA3Config, feedforward_modules=r"blocks\.\d\.linear"),
        lambda: lora_config(peft.LoHaConfig, r=2),
        lambda: lora_config(peft.LoKrConfig, r=2),
        lambda: lora_config(peft.OFTConfig, oft_block_size=4, use_cayley_neumann=False),
        lambda: lora_config(peft.VeraConfig, r=4),
        lambda: lora_config(peft.LNTuningConfig, target_modules=r".*norm"),
        lambda: peft.TrainableTokensConfig(target_modules=["embedding"], token_indices=[1, 5, 7]),
    ],
    ids=[
        *["dora", "rslora_bias", "bias_all", "bias_lora", "dropout", "ia3"],
        *["loha", "lokr", "oft", "vera", "layer_norms", "tokens"],
    ],
)
def test_kinds_of_adapters(both, config):
    """Put on the live model, trained, merged for a forward, unmerged, trained again."""

    def pattern(model, optimizer, note):
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config())
        second = torch.optim.AdamW(trainable(wrapped), lr=1e-2)
        note("losses", train(wrapped, second, 2))
        wrapped.eval()
        with torch.no_grad():
            note("not merged", wrapped(make_ids(5)))
            wrapped.merge_adapter()
            note("merged", wrapped(make_ids(5)))
            wrapped.unmerge_adapter()
        wrapped.train()
        note("again", train(wrapped, second, 1, first=2))
        note("adapter", peft.get_peft_model_state_dict(wrapped))

    both(pattern, more=0, settings=room(both, 8192))


def test_an_adapter_merged_and_unmerged_while_it_is_trained(both):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        for step in range(2):
            model.merge_adapter()
            note("merged weight", model.base_model.model.blocks[0].linear.base_layer.weight)
            with torch.no_grad():
                note("merged", loss_of(model, 10 + step))
            model.unmerge_adapter()
            note("losses", train(model, optimizer, first=2 + step))

    both(pattern, make=make_lora())


def test_merge_and_unload(both, tmp_path):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        with torch.no_grad():
            note("with the adapter", loss_of(model, 9))
        merged = model.merge_and_unload()
        note("class", type(merged).__name__)
        note("state", merged.state_dict())
        with torch.no_grad():
            note("merged", loss_of(merged, 9))
        torch.save(merged.state_dict(), tmp_path / "merged.pt")
        note("saved", torch.load(tmp_path / "merged.pt"))
        return merged

    both(pattern, make=make_lora(), more=0)


def test_merge_and_unload_and_train_all_of_it(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        merged = model.merge_and_unload()
        merged.requires_grad_(True)
        second = make_adamw(merged)
        note("losses", train(merged, second, 2, first=2))
        note("state", merged.state_dict())

    both(pattern, make=make_lora(), more=0)


def test_a_deep_copy_merged_while_training_goes_on(both):
    """Checkpoints of the merged model are made from a copy."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        merged = copy.deepcopy(model).merge_and_unload()
        note("merged", merged.state_dict())
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern, make=make_lora())


def test_unload_without_merging(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        base = model.unload()
        note("base", base.state_dict())
        with torch.no_grad():
            note("loss", loss_of(base, 9))

    both(pattern, make=make_lora(), more=0)


def test_the_adapter_disabled_for_a_reference(both):
    """DPO without a second model: logits of the base, between those of the policy, in one step."""

    def preferring(model, step=0):
        policy = loss_of(model, step)
        with torch.no_grad(), model.disable_adapter():
            reference = loss_of(model, step)
        return (policy - reference).sigmoid() + policy

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=preferring))
        with model.disable_adapter():
            note("without", loss_of(model, 9))
        note("trainable", len(trainable(model)))

    both(pattern, make=make_lora(), loss=preferring)


def test_a_second_adapter_added_and_activated(both):
    def pattern(model, optimizer, note):
        note("first", train(model, optimizer, 2))
        model.add_adapter("second", lora_config(r=2, target_modules=r"blocks\.1\d\.linear"))
        model.set_adapter("second")
        add(optimizer, trainable(model))
        note("active", model.active_adapters)
        note("second", train(model, optimizer, 2, first=2))
        model.set_adapter("default")
        note("first again", train(model, optimizer, 2, first=4))
        model.base_model.set_adapter(["default", "second"])
        note("both", train(model, optimizer, 2, first=6))

    both(pattern, make=make_lora())


def test_a_reference_adapter_that_follows(both):
    """TRL: the reference is an adapter of its own, switched on under no_grad, and mixed with the policy's."""

    def pattern(model, optimizer, note):
        model.add_adapter("ref", lora_config())
        named = dict(model.named_parameters())
        pairs = [(p, named[name.replace(".default.", ".ref.")]) for name, p in named.items() if ".default." in name]
        for policy, reference in pairs:
            reference.data.copy_(policy.data)
        for step in range(3):
            with torch.no_grad():
                model.set_adapter("ref")
                note("reference", loss_of(model, step))
                model.set_adapter("default")
            note("losses", train(model, optimizer, first=step))
            for policy, reference in pairs:
                reference.data.mul_(0.4).add_(policy.data, alpha=0.6)
        note("values", values(reference for _, reference in pairs))

    both(pattern, make=make_lora())


def test_an_adapter_deleted(both):
    def pattern(model, optimizer, note):
        model.add_adapter("second", lora_config(r=2))
        model.set_adapter("second")
        add(optimizer, trainable(model))
        train(model, optimizer, 2)
        model.delete_adapter("second")
        model.set_adapter("default")
        note("losses", train(model, optimizer, 2, first=2))
        note("names", [name for name, _ in model.named_parameters()])

    both(pattern, make=make_lora())


def test_adapters_combined_to_a_new_one(both):
    def pattern(model, optimizer, note):
        model.add_adapter("second", lora_config())
        train(model, optimizer, 2)
        model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "linear", combination_type="linear")
        model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "svd", combination_type="svd")
        for parameter in model.parameters():  # peft turns some on their side, and products round by the layout
            parameter.data = parameter.data.contiguous()
        for name in ("linear", "svd"):
            model.set_adapter(name)
            with torch.no_grad():
                note(name, loss_of(model, 9))
        model.set_adapter("default")

    both(pattern, make=make_lora())


def test_an_adapter_saved_and_loaded_under_another_name(both, tmp_path):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        model.save_pretrained(tmp_path, save_embedding_layers=False)
        train(model, optimizer, first=2)
        model.load_adapter(tmp_path, "saved", is_trainable=True)
        model.set_adapter("saved")
        with torch.no_grad():
            note("as saved", loss_of(model, 9))
        add(optimizer, trainable(model))
        note("losses", train(model, optimizer, 2, first=3))

    both(pattern, make=make_lora())


def test_the_weights_of_an_adapter_set_and_hot_swapped(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        saved = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
        train(model, optimizer, first=1)
        peft.set_peft_model_state_dict(model, saved)
        with torch.no_grad():
            note("set", loss_of(model, 9))
        doubled = {key.replace(".weight", ".default.weight"): value * 2 for key, value in saved.items()}
        hotswap_adapter_from_state_dict(model, doubled, "default", lora_config())
        with torch.no_grad():
            note("swapped", loss_of(model, 9))

    both(pattern, make=make_lora())


def test_modules_to_save(both):
    """A copy of the module is trained beside the original, for each adapter."""

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        model.add_adapter("second", lora_config(modules_to_save=["norm"], target_modules=["blocks.8.linear"]))
        model.set_adapter("second")
        add(optimizer, trainable(model))
        note("second", train(model, optimizer, 2, first=2))
        note("adapters", [peft.get_peft_model_state_dict(model, adapter_name=n) for n in ("default", "second")])
        model.set_adapter("default")

    # The tower's last norm and those of the blocks: PEFT goes by the last part of a name.
    both(pattern, make=make_lora(modules_to_save=["norm"]))


class WithLoss(Tower):
    """Answers as models of transformers do; AdaLoRA adds its penalty to the loss that it finds there."""

    def forward(self, ids):
        logits = super().forward(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)


def own_loss(model, step=0):
    return model(make_ids(step)).loss


def test_adalora_with_its_penalty_and_rank_allocation(both):
    def make():
        torch.manual_seed(0)
        config = peft.AdaLoraConfig(
            target_modules=r"blocks\.\d\.linear", init_r=4, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=7
        )
        return peft.get_peft_model(WithLoss(), config)

    def pattern(model, optimizer, note):
        for step in range(8):
            loss = own_loss(model, step)
            loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            note("loss", loss.detach())
        note("ranks", model.peft_config["default"].rank_pattern)
        note("importance", model.base_model.rankallocator.exp_avg_ipt)

    both(pattern, make=make, loss=own_loss, settings=room(both, 8192))


class Experts(nn.Module):
    """Weights of all experts in one parameter each, as mixtures of experts of transformers have them."""

    def __init__(self, count=3):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 8) * 0.2)
        self.down = nn.Parameter(torch.randn(count, 8, WIDTH) * 0.2)
        self.router = nn.Linear(WIDTH, count)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        inner = torch.einsum("bsw,ewh->ebsh", x, self.up).relu()
        return x + torch.einsum("ebsh,ehw,bse->bsw", inner, self.down, weights)


class ExpertTower(Tower):
    def __init__(self, recomputed):
        super().__init__(24)
        self.recomputed = recomputed
        self.experts = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for layer in [*self.experts, *self.blocks]:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_lora_on_parameters_of_experts(both, recomputed):
    def make():
        torch.manual_seed(0)
        config = lora_config(
            r=2, target_modules=[], target_parameters=["experts.0.up", "experts.0.down", "experts.2.up"]
        )
        return peft.get_peft_model(ExpertTower(recomputed), config)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3))
        note("parameters", [name for name, _ in model.named_parameters()])
        note("buffers", [name for name, _ in model.named_buffers()])
        model.merge_adapter()
        with torch.no_grad():
            note("merged", loss_of(model, 9))
        model.unmerge_adapter()

    both(pattern, make=make, settings=room(both, 12288))


def test_lora_on_parameters_put_on_the_live_model(both):
    def make():
        torch.manual_seed(0)
        return ExpertTower(True)

    def pattern(model, optimizer, note):
        train(model, optimizer)
        config = lora_config(r=2, target_modules=[], target_parameters=["experts.1.up", "experts.1.down"])
        wrapped = peft.get_peft_model(model, config)
        second = torch.optim.AdamW(trainable(wrapped), lr=1e-2)
        note("losses", train(wrapped, second, 2, first=1))
        merged = wrapped.merge_and_unload()
        note("merged", merged.state_dict())

    both(pattern, make=make, more=0, settings=room(both, 12288))


# Models of transformers


def hf_loss(model, step=0):
    return model(**make_batch("gpt2", 2, seed=step)).loss


def hf_settings(both, factor=1.0):
    return {"chunk_numel": "auto", **tight("gpt2", factor)} if both.config else None


@pytest.mark.parametrize("size", [104, 90])
def test_token_embeddings_resized_and_the_optimizer_made_anew(both, size):
    def small_loss(model, step=0):
        batch = make_batch("gpt2", 2, seed=step)
        ids = batch["input_ids"] % size
        return model(input_ids=ids, labels=ids).loss

    def pattern(model, optimizer, note):
        train(model, optimizer, 2, loss=small_loss)
        model.resize_token_embeddings(size)
        note("size", tuple(model.get_input_embeddings().weight.shape))
        note("tied", model.lm_head.weight is model.transformer.wte.weight)
        note("rows", model.lm_head.weight)
        second = make_adamw(model)
        note("losses", train(model, second, 2, first=2, loss=small_loss))
        note("state", states(second))

    both(pattern, make=lambda: make_model("gpt2"), more=0, settings=hf_settings(both, 1.3))


def test_token_embeddings_resized_under_an_optimizer_without_state(both):
    """The weight stays the same Parameter, with data of another shape."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2, loss=hf_loss)
        weight = model.get_input_embeddings().weight
        model.resize_token_embeddings(100, mean_resizing=False)
        note("the same object", weight is model.get_input_embeddings().weight)
        note("losses", train(model, optimizer, 2, first=2, loss=hf_loss))
        note("rows", weight)

    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    settings = hf_settings(both, 1.3)
    both(pattern, lambda: make_model("gpt2"), make_optimizer, loss=hf_loss, settings=settings)


def test_token_embeddings_resized_and_their_state_dropped(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2, loss=hf_loss)
        weight = model.get_input_embeddings().weight
        model.resize_token_embeddings(100, mean_resizing=False)
        del optimizer.state[weight]
        note("losses", train(model, optimizer, 2, first=2, loss=hf_loss))
        note("steps", [float(optimizer.state[parameter]["step"]) for parameter in model.parameters()])

    both(pattern, make=lambda: make_model("gpt2"), loss=hf_loss, settings=hf_settings(both, 1.3))


def test_new_tokens_alone_are_trained(both):
    """Rows of the old tokens are put back after every step, as textual inversion does."""

    def pattern(model, optimizer, note):
        model.resize_token_embeddings(100)
        model.requires_grad_(False)
        weight = model.get_input_embeddings().weight
        weight.requires_grad_(True)
        before = weight.data.clone()
        second = torch.optim.AdamW([weight], lr=1e-2)
        for step in range(2):
            note("losses", train(model, second, first=step, loss=hf_loss))
            with torch.no_grad():
                model.get_input_embeddings().weight[:96] = before[:96]
        note("weight", weight)

    both(pattern, make=lambda: make_model("gpt2"), more=0, settings=hf_settings(both, 1.3))


def test_last_layers_of_a_language_model_dropped(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, loss=hf_loss)
        model.transformer.h = model.transformer.h[:2]
        model.config.n_layer = 2
        note("losses", train(model, optimizer, 2, first=1, loss=hf_loss))
        model.eval()
        note("generated", model.generate(make_batch("gpt2", 1)["input_ids"][:, :4], max_new_tokens=4, do_sample=False))
        model.train()

    both(pattern, make=lambda: make_model("gpt2"), loss=hf_loss, settings=hf_settings(both))


def test_a_merged_adapter_saved_as_a_pretrained_model(both, tmp_path):
    def make():
        model = make_model("gpt2")
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(model, config)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=hf_loss))
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path)
        read = type(merged).from_pretrained(tmp_path)
        note("saved", read.state_dict())
        with torch.no_grad():
            note("merged", hf_loss(merged, 9))
            note("read", hf_loss(read, 9))

    both(pattern, make=make, more=0, settings=hf_settings(both, 1.2))


def test_an_adapter_added_by_the_model_itself(both):
    """transformers' own PEFT methods on a live model: add_adapter, disable_adapters, enable_adapters."""

    def pattern(model, optimizer, note):
        train(model, optimizer, loss=hf_loss)
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False)
        model.add_adapter(config, "extra")
        model.requires_grad_(False)
        model.set_adapter("extra")
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora" in name
        second = torch.optim.AdamW(trainable(model), lr=1e-2)
        note("losses", train(model, second, 2, first=1, loss=hf_loss))
        model.disable_adapters()
        with torch.no_grad():
            note("disabled", hf_loss(model, 9))
        model.enable_adapters()
        with torch.no_grad():
            note("enabled", hf_loss(model, 9))

    both(pattern, make=lambda: make_model("gpt2"), more=0, settings=hf_settings(both, 1.2))
