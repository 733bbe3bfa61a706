"""Reading parameters of a live model, however one gets hold of them."""

import contextlib
import copy
import functools
import io
import itertools
import operator
import pickle
import threading
import weakref

import numpy
import pytest
import safetensors.torch
import torch
import torch.utils.flop_counter
from live.both import WIDTH, Block, Tower, copy_of, loss_of, make_ids, make_tower, raises_in_both, train
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode


def make_with_lists():
    """A model that keeps lists of its parameters from before anything was attached to it."""
    model = make_tower()
    model.kept = tuple(model.parameters())
    model.kept_by_name = tuple(model.named_parameters())
    model.kept_weights = tuple(block.linear.weight for block in model.blocks)
    return model


def make_shallow():
    """A model for what runs it many times; three times what the tight budget holds."""
    torch.manual_seed(0)
    return Tower(depth=8)


def make_partly_frozen():
    model = make_tower()
    for block in model.blocks[::2]:
        block.requires_grad_(False)
    return model


def weight_matrices(model):
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def inference(model, step=9):
    with torch.no_grad():
        return model(make_ids(step))


# Statistics


def test_norms_of_all_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("norms", [parameter.norm() for parameter in model.parameters()])
        with torch.no_grad():
            note("sums", [parameter.abs().sum() for parameter in model.parameters()])

    both(pattern)


def test_norms_before_the_first_step(both):
    def pattern(model, optimizer, note):
        note("norms", {name: parameter.norm().item() for name, parameter in model.named_parameters()})
        note("total", sum(parameter.detach().double().pow(2).sum() for parameter in model.parameters()).sqrt())

    both(pattern)


def test_norms_of_all_parameters_in_one_call(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            note("foreach", torch._foreach_norm(list(model.parameters())))
            note("largest", torch._foreach_norm(list(model.parameters()), float("inf")))
            note("stacked", torch.stack([parameter.norm() for parameter in model.parameters()]).norm())
            note("total", nn.utils.get_total_norm(model.parameters()))
            note("doubled", torch._foreach_mul(list(model.parameters()), 2.0))

    both(pattern)


def test_histograms_for_a_logger(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            note(name, torch.histc(parameter.detach(), bins=8, min=-1, max=1))
            counts, edges = numpy.histogram(parameter.detach().cpu().numpy().flatten(), bins=6)
            note(name, counts)
            note(name, edges)
        note("of all", torch.histogram(torch.cat([p.data.flatten() for p in model.parameters()]), bins=16).hist)

    both(pattern)


def test_statistics_of_weights(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            note(name, [parameter.mean(), parameter.std(), parameter.var(unbiased=False), parameter.median()])
            note(name, [parameter.min(), parameter.max(), *parameter.aminmax(), parameter.argmax()])
            note(name, torch.quantile(parameter.detach(), torch.tensor([0.1, 0.5, 0.99])))
            note(name, parameter.abs().flatten().topk(3).values)
            note(name, list(parameter.flatten().kthvalue(2)))

    both(pattern)


def test_share_of_zeros_and_guard_against_non_finite_values(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            train(model, optimizer, first=step)
            note("zeros", [int((parameter == 0).sum()) for parameter in model.parameters()])
            note("nonzero", [torch.count_nonzero(parameter).item() for parameter in model.parameters()])
            note("finite", all(torch.isfinite(parameter).all() for parameter in model.parameters()))
            note("broken", [name for name, p in model.named_parameters() if p.isnan().any() or torch.isinf(p).any()])
            note("small", sum((parameter.abs() < 1e-2).sum() for parameter in model.parameters()))

    both(pattern)


def test_spectra_of_weight_matrices(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for weight in weight_matrices(model)[:6] + [model.head.weight]:
            values = torch.linalg.svdvals(weight.detach())
            share = values / values.sum()
            note("effective rank", torch.exp(-(share * share.log()).sum()))
            note("condition", torch.linalg.cond(weight))
            note("norms", [torch.linalg.matrix_norm(weight, 2), torch.linalg.norm(weight), torch.norm(weight, p=1)])
            note("rank", torch.linalg.matrix_rank(weight.data))
            note("covariance", torch.linalg.eigvalsh(weight.T @ weight))

    both(pattern)


def test_how_far_the_weights_moved(both):
    def pattern(model, optimizer, note):
        start = [parameter.detach().clone() for parameter in model.parameters()]
        before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        for step in range(3):
            train(model, optimizer, first=step)
            for name, parameter in model.named_parameters():
                change = parameter.data - before[name]
                note(name, torch.log10(change.std() / parameter.data.std()))
                before[name] = parameter.data.clone()
        for parameter, first in zip(model.parameters(), start, strict=True):
            note("distance", torch.dist(parameter, first))
            note("angle", functional.cosine_similarity(parameter.flatten(), first.flatten(), dim=0))

    both(pattern)


def test_layers_compared_with_each_other(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weights = [block.linear.weight for block in model.blocks]
        with torch.no_grad():
            flat = functional.normalize(torch.stack([weight.flatten() for weight in weights]))
        note("similarity", flat @ flat.T)
        note("differences", [(a - b).abs().mean() for a, b in itertools.pairwise(weights)])
        ordered = sorted(model.named_parameters(), key=lambda item: item[1].norm().item())
        note("by norm", [name for name, _ in ordered])
        note("largest", max(model.parameters(), key=lambda parameter: parameter.abs().max()))

    both(pattern)


def test_parameters_read_from_the_groups_of_the_optimizer(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for group in optimizer.param_groups:
            note("norms", [parameter.norm() for parameter in group["params"]])
            note("decayed", [group["weight_decay"] * parameter.data for parameter in group["params"]])
        note("the same", [a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)])

    both(pattern)


def test_frozen_parameters_are_read_too(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            note(name, [parameter, parameter * 2, parameter.data.norm(), parameter.requires_grad, parameter.is_leaf])
        note("trained", sum(p.numel() for p in model.parameters() if p.requires_grad))

    both(pattern, make=make_partly_frozen)


# Penalties


def test_a_weight_penalty_in_the_loss(both):
    def penalised(model, step):
        return loss_of(model, step) + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern)


def test_an_l1_penalty_on_what_is_called_weight(both):
    def penalised(model, step):
        names = [(name, parameter) for name, parameter in model.named_parameters() if "linear.weight" in name]
        penalty = torch.tensor(0.0)
        for _, parameter in names:
            penalty = penalty + torch.norm(parameter, 1)
        return loss_of(model, step) + 1e-3 * penalty

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


def test_penalties_by_attribute(both):
    def penalised(model, step):
        penalty = model.scale.abs().mean() + model.blocks[3].linear.weight.pow(2).sum()
        penalty = penalty + (model.head.weight - model.embedding.weight.detach()).pow(2).mean()
        penalty = penalty + model.get_parameter("blocks.5.norm.bias").exp().sum() + model.blocks[-1].linear.bias.sum()
        return loss_of(model, step) + 0.1 * penalty

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


@pytest.mark.parametrize("kept", ["kept", "kept_by_name", "kept_weights"])
def test_a_penalty_from_a_list_made_before_the_engine(both, kept):
    def penalised(model, step):
        parameters = getattr(model, kept)
        if kept == "kept_by_name":
            parameters = [parameter for name, parameter in parameters if not name.endswith("bias")]
        return loss_of(model, step) + 0.01 * sum((parameter**2).sum() for parameter in parameters)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))
        note("kept", [parameter for _, parameter in model.kept_by_name])

    both(pattern, make=make_with_lists, loss=penalised)


def test_a_penalty_from_a_list_made_long_ago(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())
        named = dict(model.named_parameters())
        train(model, optimizer, 2)
        note("losses", train(model, optimizer, 2, loss=lambda m, s: loss_of(m, s) + 0.1 * parameters[2].pow(2).sum()))
        penalty = torch.stack([value.abs().mean() for value in named.values()]).sum()
        note("penalty", penalty)
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
        note("values", named)

    both(pattern)


def test_penalties_on_orthogonality(both):
    def penalised(model, step):
        penalty = 0.0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                gram = module.weight.t() @ module.weight
                penalty = penalty + (gram - torch.eye(len(gram))).pow(2).sum()
        return loss_of(model, step) + 1e-3 * penalty

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


def test_penalties_on_the_largest_singular_value(both):
    def penalised(model, step):
        penalty = torch.linalg.svdvals(model.blocks[0].linear.weight)[0]
        for block in model.blocks[1:6]:
            weight = block.linear.weight
            vector = torch.ones(WIDTH) / WIDTH**0.5
            with torch.no_grad():
                for _ in range(2):
                    other = functional.normalize(torch.mv(weight, vector), dim=0)
                    vector = functional.normalize(torch.mv(weight.t(), other), dim=0)
            penalty = penalty + torch.dot(other, torch.mv(weight, vector))
        return loss_of(model, step) + 0.01 * penalty

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


def test_penalties_on_groups_of_neurons_and_on_neighbouring_layers(both):
    def penalised(model, step):
        weights = [block.linear.weight for block in model.blocks]
        lasso = sum(weight.norm(dim=1).sum() + weight[:, ::2].norm(dim=0).sum() for weight in weights)
        smooth = torch.stack(weights).diff(dim=0).pow(2).mean()
        return loss_of(model, step) + 1e-3 * lasso + smooth

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


def test_decay_towards_the_first_weights(both):
    def pattern(model, optimizer, note):
        first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def penalised(model, step):
            distance = sum((parameter - first[name]).pow(2).sum() for name, parameter in model.named_parameters())
            return loss_of(model, step) + 0.1 * distance

        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern)


def test_elastic_weight_consolidation(both):
    def pattern(model, optimizer, note):
        fisher = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
            for name, parameter in model.named_parameters():
                fisher[name] += parameter.grad.data.clone().pow(2) / 3
        model.zero_grad()
        means = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        note("fisher", fisher)

        def penalised(model, step):
            penalty = 0
            for name, parameter in model.named_parameters():
                penalty += (fisher[name] * (parameter - means[name]) ** 2).sum()
            return loss_of(model, step) + 100 * penalty

        note("losses", train(model, optimizer, 3, first=10, loss=penalised))

    both(pattern)


def test_a_penalty_computed_before_the_forward(both):
    def penalised(model, step):
        penalty = 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return penalty + loss_of(model, step)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_with_a_backward_of_its_own(both, first):
    def penalty(model):
        return 0.01 * sum(parameter.abs().sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.zero_grad()
            if first:
                penalty(model).backward()
            loss_of(model, step).backward()
            if not first:
                penalty(model).backward()
            note("gradients", [parameter.grad for parameter in model.parameters()])
            optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_a_penalty_alone_trains_what_it_names(both):
    def pattern(model, optimizer, note):
        for _ in range(2):
            optimizer.zero_grad()
            value = (model.blocks[4].linear.weight @ model.scale).sum() + model.embedding.weight[3].pow(2).sum()
            note("penalty", value)
            value.backward()
            note("has gradient", [parameter.grad is not None for parameter in model.parameters()])
            optimizer.step()
        optimizer.zero_grad()
        note("values", dict(model.named_parameters()))

    both(pattern)


def test_a_penalty_whose_graph_is_used_twice(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (penalty * 0.1).backward(retain_graph=True)
        (loss_of(model) + penalty * 0.01).backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_a_penalty_that_is_never_used(both):
    def pattern(model, optimizer, note):
        dropped = sum(parameter.pow(2).sum() for parameter in model.parameters())
        train(model, optimizer)
        again = [parameter.exp().sum() for parameter in model.parameters()]
        note("losses", train(model, optimizer, 2, first=1))
        note("values", [dropped, again])
        return dropped, again

    both(pattern)


def test_a_penalty_in_every_micro_batch(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for micro in range(3):
                penalty = sum(parameter.pow(2).mean() for parameter in model.parameters())
                ((loss_of(model, 3 * step + micro) + 0.1 * penalty) / 3).backward()
            note("gradients", [parameter.grad for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


class Weighted(Tower):
    """Has parameters that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.temperature = nn.Parameter(torch.tensor(0.3))


def make_weighted():
    torch.manual_seed(0)
    return Weighted()


def test_parameters_that_only_the_loss_uses(both):
    def weighted(model, step):
        parts = [loss_of(model, step) * model.temperature.exp(), loss_of(model, step + 1)]
        return sum(
            torch.exp(-variance) * part + variance for part, variance in zip(parts, model.log_variances, strict=True)
        )

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=weighted))
        note("learned", [model.log_variances, model.temperature, model.temperature.item(), float(model.temperature)])
        note("text", [f"{model.temperature.item():.4f}", f"{model.temperature.detach():.3e}", str(model.temperature)])

    both(pattern, make=make_weighted, loss=weighted)


class Bayesian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.spread = nn.Parameter(torch.full((WIDTH, WIDTH), -3.0))

    def forward(self, x):
        noise = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))
        return x + x @ (self.mean + functional.softplus(self.spread) * noise)


def test_a_divergence_of_the_weights_from_a_prior(both):
    def make():
        torch.manual_seed(0)
        model = make_tower()
        model.blocks = nn.ModuleList([Bayesian() for _ in range(20)])
        return model

    def penalised(model, step):
        divergence = 0
        for module in model.modules():
            if isinstance(module, Bayesian):
                normal = torch.distributions.Normal(module.mean, functional.softplus(module.spread))
                prior = torch.distributions.Normal(0.0, 0.5)
                divergence = divergence + torch.distributions.kl_divergence(normal, prior).sum()
        return loss_of(model, step) + 1e-4 * divergence

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, make=make, loss=penalised)


def test_losses_gathered_by_hooks(both):
    def pattern(model, optimizer, note):
        gathered = []
        handles = [
            block.register_forward_hook(lambda module, args, output: gathered.append(module.linear.weight.pow(2).sum()))
            for block in model.blocks
        ]

        def penalised(model, step):
            gathered.clear()
            return loss_of(model, step) + 0.01 * sum(gathered, torch.zeros(()))

        note("losses", train(model, optimizer, 2, loss=penalised))
        for handle in handles:
            handle.remove()

    both(pattern)


# Weights in computations outside of forward


def test_weights_used_by_functions_outside_of_forward(both):
    def outside(model, step):
        ids = make_ids(step)
        x = functional.embedding(ids[:, :-1], model.embedding.weight) + model.offset
        first, last = model.blocks[0], model.blocks[-1]
        x = functional.layer_norm(x, (WIDTH,), first.norm.weight, first.norm.bias)
        x = functional.linear(x, last.linear.weight, bias=last.linear.bias)
        x = torch.addmm(first.linear.bias, x.flatten(0, 1), first.linear.weight.t())
        return functional.cross_entropy((x * model.scale) @ model.embedding.weight.T, ids[:, 1:].flatten())

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=outside))
        note("both ways", train(model, optimizer, 2, loss=lambda m, s: outside(m, s) + loss_of(m, s)))

    both(pattern)


def test_nearest_rows_of_the_embedding(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        table = model.embedding.weight
        note("distances", torch.cdist(table, table))
        similarity = functional.cosine_similarity(table[3].unsqueeze(0), table)
        note("nearest", similarity.topk(4).indices)
        note("rows", model.embedding.weight[make_ids()[0]])
        note("looked up", model.embedding(torch.tensor([1, 2])))
        note("selected", table.index_select(0, torch.tensor([5, 0])))

    both(pattern)


def test_parameters_on_either_side_of_an_operator(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        scale, weight = model.scale, model.blocks[2].linear.weight
        other = torch.linspace(-1, 1, WIDTH)
        note("arithmetic", [1 - scale, 2 / scale, 2**scale, other @ weight, weight @ other, -scale, abs(scale)])
        note("together", [scale * weight, weight - weight.T, torch.where(weight > 0, weight, scale), scale @ weight])
        note("division", [scale // 0.3, scale % 0.3, other / scale, round(float(scale[0]), 3)])
        buffer = torch.zeros(WIDTH)
        with torch.no_grad():
            buffer += scale
            buffer.add_(scale, alpha=0.5).lerp_(scale, 0.25).addcmul_(scale, other)
            note("into another", buffer.copy_(buffer * 2))
            note("out", torch.add(scale, other, alpha=2, out=torch.empty(WIDTH)))
            note("named", torch.clamp(input=other, min=scale * 0.5, max=scale))
            note("in a list", torch._foreach_add([buffer, other], [scale, model.norm.weight]))
            note("product", torch.einsum("i,ij,kj->ik", scale, weight, model.blocks[3].linear.weight))

    both(pattern)


def test_conversions_and_tensors_like_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in (model.scale, model.blocks[7].linear.weight, model.embedding.weight):
            note("types", [parameter.double(), parameter.half(), parameter.to(torch.bfloat16), parameter.int()])
            note("same type", [parameter.float(), parameter.cpu(), parameter.to("cpu"), parameter.contiguous()])
            note("copies", [parameter.clone(), parameter.detach().clone(), parameter.type_as(parameter.double())])
            note("like", [torch.zeros_like(parameter), parameter.new_ones(2), torch.full_like(parameter, 2.0)])
            note("random", [torch.randn_like(parameter), torch.rand_like(parameter)])
            note("shaped", [parameter.flatten().view(-1, 4), torch.ones(parameter.numel()).view_as(parameter)])
            note("parameter", nn.Parameter(parameter.data.clone()))

    both(pattern)


def test_other_modules_made_of_live_weights(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        table = nn.Embedding.from_pretrained(model.embedding.weight.detach().clone())
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight = nn.Parameter(model.blocks[1].linear.weight.clone().detach())
        layer.bias.data = model.blocks[1].linear.bias.data.clone()
        train(model, optimizer, first=1)
        note("results", [table(torch.arange(4)), layer(torch.ones(WIDTH))])

    both(pattern)


def test_tensors_and_parameters_made_directly_of_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[1].linear.weight
        note("as a tensor", torch.as_tensor(weight))
        note("as another type", torch.asarray(weight.detach(), dtype=torch.float64))
        note("new tensor", weight.new_tensor(weight.detach()))
        note("parameter", nn.Parameter(weight))
        note("frozen parameter", nn.Parameter(weight, requires_grad=False))
        note("table", nn.Embedding.from_pretrained(weight)(torch.tensor([2, 0])))
        note("numbers", torch.tensor([parameter.norm() for parameter in model.parameters()]))

    both(pattern)


def test_parameters_joined(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weights, biases = zip(*((block.linear.weight, block.linear.bias) for block in model.blocks), strict=True)
        note("vector", parameters_to_vector(model.parameters()))
        note("detached", parameters_to_vector(p.detach() for p in model.parameters()))
        note("cat", torch.cat([parameter.flatten() for parameter in model.parameters()]))
        note("straight", [torch.cat(weights), torch.cat(biases), torch.stack(weights, dim=1), torch.vstack(weights)])
        note("hstack", torch.hstack([weights[0], biases[0].unsqueeze(1)]))
        note("block", [torch.block_diag(*weights[:2]), torch.kron(biases[0], biases[1])])
        note("mean", torch.stack(weights).mean(0))

    both(pattern)


def test_a_vector_of_all_parameters_in_the_loss(both):
    def penalised(model, step):
        vector = parameters_to_vector(model.parameters())
        return loss_of(model, step) + 0.1 * vector.norm() + torch.logsumexp(vector, 0)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


def test_penalties_under_autocast(both):
    def mixed(model, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
            gram = sum((weight @ weight.T).diagonal().sum() for weight in weight_matrices(model)[:5])
            return loss + 0.01 * gram + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=mixed))

    both(pattern, loss=mixed)


# numpy, texts, numbers


def test_numpy_arrays_of_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            note("detached", parameter.detach().numpy())
            note("on the host", parameter.detach().cpu().numpy())
            note("data", parameter.data.numpy())
            note("forced", parameter.numpy(force=True))
            note("asarray", numpy.asarray(parameter.detach()))
            note("mean", float(numpy.mean(parameter.detach().numpy())))
            with raises_in_both(RuntimeError, match="requires grad"):
                parameter.numpy()
        with raises_in_both(RuntimeError, match="requires grad"):
            numpy.array(model.scale)
        with torch.no_grad():
            note("without a graph", [model.scale.numpy(), numpy.asarray(model.blocks[1].linear.bias)])
        note("percentile", numpy.percentile(numpy.array(model.head.weight.detach()), [5, 95]))

    both(pattern)


def test_writing_into_the_array_that_numpy_shares(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        array = model.blocks[0].linear.weight.detach().numpy()
        array *= 0.5
        array[0] = 0.25
        note("read", [model.blocks[0].linear.weight, model.blocks[0].linear.weight.norm()])
        model.scale.data.numpy().fill(1.5)
        numpy.copyto(model.blocks[1].linear.bias.detach().numpy(), numpy.arange(WIDTH, dtype=numpy.float32) / WIDTH)
        note("inference", inference(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_an_array_that_is_kept_is_the_weight(both):
    def pattern(model, optimizer, note):
        array = model.blocks[3].linear.weight.detach().numpy()
        bias = model.blocks[3].linear.bias.data.numpy()
        note("before", array)
        for step in range(2):
            train(model, optimizer, first=step)
            note("after a step", array)
            note("bias", bias)
        array[:, 1] = 0.0
        note("losses", train(model, optimizer, 2, first=2))
        note("at last", array)
        return array, bias

    both(pattern)


def test_arrays_by_the_exchange_protocols(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[2].linear.weight
        note("dlpack", torch.from_dlpack(weight.detach()))
        note("to numpy", numpy.from_dlpack(weight.detach()))
        note("from numpy", torch.from_numpy(weight.detach().numpy()))
        note("bytes", weight.detach().numpy().tobytes())
        note("memory", bytes(memoryview(weight.detach().numpy())))
        note("buffer", numpy.frombuffer(weight.data.numpy().tobytes(), dtype=numpy.float32))

    both(pattern)


def test_texts_of_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in (model.scale, model.embedding.weight, model.blocks[3].linear.weight):
            note("texts", [repr(parameter), str(parameter), f"{parameter}", format(parameter)])
            note("data", [repr(parameter.data), str(parameter.detach()), repr([parameter])])
            note("row", [repr(parameter[0]), f"{parameter.norm():.5f}", f"{parameter.detach().mean():+.3e}"])
        note("model", [repr(model), str(model.state_dict()), str(list(model.named_parameters())[:3])])
        with torch._tensor_str.printoptions(precision=8, sci_mode=True):
            note("precise", repr(model.scale))
        with raises_in_both(TypeError):
            f"{model.scale:.3f}"

    both(pattern)


def test_texts_of_frozen_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("texts", [repr(model.blocks[0].linear.bias), str(model.blocks[1].linear.bias)])
        with torch.no_grad():
            note("silent", [repr(model.blocks[0].linear.bias), str(model.blocks[1].linear.bias)])

    both(pattern, make=make_partly_frozen)


def test_numbers_out_of_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("lists", [parameter.tolist() for parameter in list(model.parameters())[:6]])
        note("items", [model.scale[3].item(), model.head.weight[1, 2].item(), model.temperature.item()])
        note(
            "casts",
            [float(model.temperature), int(model.temperature * 100), bool(model.temperature), float(model.scale[0])],
        )
        note("as a number", [round(model.temperature.item(), 2), max(model.scale).item(), sum(model.scale)])
        with raises_in_both(RuntimeError):
            model.scale.item()
        with raises_in_both(RuntimeError):
            bool(model.scale)

    both(pattern, make=make_weighted)


def test_walking_over_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[6].linear.weight
        note("length", [len(weight), len(model.scale), len(model.embedding.weight)])
        note("rows", list(weight))
        note("backwards", [row.sum() for row in reversed(weight)])
        note("in pairs", [row @ other for row, other in zip(weight, model.blocks[7].linear.weight, strict=True)])
        first, *rest = model.scale
        note("unpacked", [first, len(rest), rest[-1]])
        note("enumerated", {place: value.item() for place, value in enumerate(model.scale)})
        note("contains", [0.125 in weight, weight[0, 0].item() in weight])

    both(pattern)


# Views


def test_parts_and_views_of_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[5].linear.weight
        note("parts", [weight[2], weight[-1, 3], weight[1:4, ::2], weight[..., 0], weight[[3, 1]], weight[:, None, 0]])
        note("masked", [weight[weight > 0], weight.masked_select(weight < 0), weight.take(torch.tensor([0, 20]))])
        note("turned", [weight.T, weight.t(), weight.mT, weight.transpose(0, 1), weight.permute(1, 0)])
        note(
            "shaped",
            [weight.view(-1), weight.reshape(8, 32), weight.flatten(), weight.unsqueeze(0), weight.view(4, -1)],
        )
        note("cut", [weight.chunk(4), weight.split([4, 12]), weight.unbind(1), weight.narrow(0, 2, 3)])
        note("diagonals", [weight.diagonal(), weight.tril(), torch.diag(weight), weight.trace()])
        note("wide", [model.scale.expand(3, WIDTH), weight.unfold(0, 4, 4), weight.gather(1, torch.zeros(3, 2).long())])
        note("turned shape", [weight.T.shape, weight.T.is_contiguous(), weight.T.stride(), weight[0].is_leaf])
        with raises_in_both(IndexError):
            weight[WIDTH]

    both(pattern)


def test_a_kept_data_shows_later_values(both):
    def pattern(model, optimizer, note):
        kept = [parameter.data for parameter in model.parameters()]
        train(model, optimizer)
        later = [parameter.data for parameter in model.parameters()]
        note("after one", [value.clone() for value in kept])
        note("losses", train(model, optimizer, 2, first=1))
        note("after three", kept)
        note("the later", later)
        note("the same", [bool((value == p).all()) for value, p in zip(kept, model.parameters(), strict=True)])
        return kept, later

    both(pattern)


def test_kept_views_show_later_values(both):
    def pattern(model, optimizer, note):
        weight, table = model.blocks[9].linear.weight, model.embedding.weight
        kept = [weight.detach(), weight.data[2], weight.detach().t(), table.data.view(-1)[5:40], table.data[:, 3]]
        with torch.no_grad():
            kept += [view.detach() for view in (weight[1:3], weight.T, *weight.chunk(2), model.scale.view(4, 4))]
        parts = dict(zip("qkv", weight.data.split([5, 5, 6]), strict=True))
        for step in range(2):
            train(model, optimizer, first=step)
            note("views", kept)
            note("parts", parts)
        return kept, parts

    both(pattern)


def test_views_taken_without_a_graph(both):
    def pattern(model, optimizer, note):
        weight = model.blocks[9].linear.weight
        with torch.no_grad():
            kept = [weight[1:3], weight.T, weight.view(-1), *weight.chunk(2)]
        note("graph", [[view.requires_grad, view.is_leaf, view.grad_fn] for view in kept])
        train(model, optimizer, 2)
        note("views", kept)
        return kept

    both(pattern)


def test_kept_views_within_the_graph_show_later_values(both):
    def pattern(model, optimizer, note):
        row = model.scale[2:5]
        turned = model.blocks[1].linear.weight.t()
        train(model, optimizer, 2)
        note("values", [row.detach(), turned.detach()])
        return row, turned

    both(pattern)


def test_a_kept_state_dict_shows_later_values(both):
    def pattern(model, optimizer, note):
        kept = model.state_dict()
        shallow, deep = copy.copy(kept), copy.deepcopy(kept)
        copied = {key: value.clone() for key, value in kept.items()}
        train(model, optimizer, 2)
        note("kept", dict(kept))
        note("shallow", dict(shallow))
        note("deep", dict(deep))
        note("copied", copied)
        return kept

    both(pattern)


# Comparisons and identity


def test_comparisons(both):
    def pattern(model, optimizer, note):
        other = copy_of(model)
        train(model, optimizer)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            note("equal", [torch.equal(mine, theirs), torch.equal(theirs, mine), torch.equal(mine, mine)])
            note("close", [torch.allclose(mine, theirs, atol=0.1), torch.isclose(mine, theirs).sum()])
            note("elementwise", [mine == theirs, mine != theirs, mine < theirs, theirs >= mine, mine > 0])
            note("eq", [torch.eq(mine, theirs).all(), mine.ne(theirs).any(), torch.maximum(mine, theirs)])
        torch.testing.assert_close(model.scale, model.scale.detach().clone(), rtol=0, atol=0, check_stride=True)
        with raises_in_both(AssertionError):
            torch.testing.assert_close(model.scale, other.scale, rtol=0, atol=0)
        numpy.testing.assert_array_equal(model.scale.detach(), model.scale.tolist())

    both(pattern)


def test_a_parameter_stays_the_same_object(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())
        names = {parameter: name for name, parameter in model.named_parameters()}
        references = [weakref.ref(parameter) for parameter in parameters]
        addresses = [id(parameter) for parameter in parameters]
        for step in range(2):
            train(model, optimizer, first=step)
            now = list(model.parameters())
            note("the same", all(a is b for a, b in zip(now, parameters, strict=True)))
            note("alive", all(a() is b for a, b in zip(references, now, strict=True)))
            note("by address", addresses == [id(parameter) for parameter in now])
            note("names", [names[parameter] for parameter in now])
            note("sets", [len(set(now)), set(now) == set(parameters), set(now) - {model.scale} == set(now)])
            note("tied", [model.head.weight is model.embedding.weight, any(p is model.scale for p in parameters)])
        note("held", [torch.Tensor.__hash__(p) == hash(p) for p in parameters])

    both(pattern)


def test_what_a_parameter_says_it_is(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for parameter in model.parameters():
                note("is", [isinstance(parameter, nn.Parameter), isinstance(parameter, torch.Tensor)])
                note("tensor", [torch.is_tensor(parameter), torch.is_floating_point(parameter), parameter.type()])
                note("class", [parameter.__class__.__name__, type(parameter).__name__, torch.typename(parameter)])
                note("data", [type(parameter.data), type(parameter.detach()), type(parameter * 1), type(parameter[0])])
                note("lazy", nn.parameter.is_lazy(parameter))
            train(model, optimizer, first=step)

    both(pattern)


def test_attributes_that_users_put_on_parameters(both):
    def make():
        model = make_tower()
        for name, parameter in model.named_parameters():
            parameter.tag = name
        model.scale.no_weight_decay = True
        return model

    def pattern(model, optimizer, note):
        model.blocks[3].linear.weight.sequence = [1, 2]
        train(model, optimizer)
        model.blocks[4].linear.weight.sequence = {"after": 3}
        train(model, optimizer, first=1)
        note("tags", [parameter.tag for parameter in model.parameters()])
        note("flags", [getattr(parameter, "no_weight_decay", False) for parameter in model.parameters()])
        note("later", [getattr(parameter, "sequence", None) for parameter in model.parameters()])
        note("held", sorted(name for name in vars(model.scale) if not name.startswith("_")))
        del model.blocks[3].linear.weight.sequence
        note("deleted", hasattr(model.blocks[3].linear.weight, "sequence"))

    both(pattern, make=make)


# Metadata


def metadata(parameter):
    return {
        "shape": [parameter.shape, parameter.size(), parameter.size(0), parameter.dim(), parameter.ndim],
        "numbers": [parameter.numel(), parameter.nelement(), len(parameter), parameter.stride(), parameter.stride(0)],
        "type": [parameter.dtype, parameter.device, parameter.layout, parameter.type(), parameter.get_device()],
        "bytes": [parameter.element_size(), parameter.itemsize, parameter.nbytes],
        "order": [parameter.is_contiguous(), parameter.storage_offset(), parameter.T.shape, parameter.T.stride()],
        "graph": [parameter.is_leaf, parameter.requires_grad, parameter.grad_fn, parameter.retains_grad],
        "kinds": [parameter.is_floating_point(), parameter.is_complex(), parameter.is_sparse, parameter.is_cuda],
        "more kinds": [parameter.is_meta, parameter.is_quantized, parameter.is_inference(), parameter.is_nested],
        "grad": [parameter.grad is None, parameter.output_nr],
    }


def test_metadata(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            note("one by one", {name: metadata(parameter) for name, parameter in model.named_parameters()})
            note("of the data", {name: metadata(parameter.data) for name, parameter in model.named_parameters()})
            first = next(model.parameters())
            note("of the model", [first.device, first.dtype, next(iter(model.blocks.parameters())).shape])
            note("counted", sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))
            note("trained", sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
            train(model, optimizer, first=step)

    both(pattern)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.ParameterDict({"one": nn.Parameter(torch.ones(3)), "two": torch.zeros(2)})

    def forward(self, x):
        return x + self.values["one"].sum()


class Odd(Tower):
    """Has parameters of kinds that few models have."""

    def __init__(self):
        super().__init__()
        self.dummy = nn.Parameter(torch.empty(0))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.table = Table()

    def forward(self, ids):
        logits = super().forward(ids.to(self.dummy.device)) * self.number
        return self.table(logits)


def test_parameters_of_rare_kinds(both):
    def make():
        torch.manual_seed(0)
        return Odd()

    def pattern(model, optimizer, note):
        for step in range(2):
            for name, parameter in model.named_parameters(recurse=False):
                note(name, [parameter, parameter.shape, parameter.stride(), parameter.dtype, parameter.is_contiguous()])
                note(name, [parameter.requires_grad, parameter.numel(), parameter.float().norm(), repr(parameter)])
            note("number", [model.number.item(), float(model.number), model.number.dim(), bool(model.number > 0)])
            note("names", [name for name, _ in model.table.values.named_parameters()])
            note("table", dict(model.table.values.items()))
            note("losses", train(model, optimizer, first=step))

    both(pattern, make=make)


def test_a_parameter_that_was_not_contiguous(both):
    def make():
        model = make_tower()
        weight = model.blocks[3].linear.weight
        model.blocks[3].linear.weight = nn.Parameter(weight.detach().t().contiguous().t())
        return model

    def pattern(model, optimizer, note):
        weight = model.blocks[3].linear.weight
        for step in range(2):
            note("weight", [weight, weight.T, weight.flatten(), weight.data[2]])
            note("losses", train(model, optimizer, first=step))

    both(pattern, make=make)


def test_storage_sizes(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for parameter in model.parameters():
                note("untyped", [parameter.untyped_storage().nbytes(), len(parameter.untyped_storage())])
                note("of data", parameter.data.untyped_storage().nbytes())
                note("device", parameter.untyped_storage().device)
            train(model, optimizer, first=step)

    both(pattern)


def test_addresses_tell_parameters_apart(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            parameters = list(model.parameters())
            pointers = [parameter.data_ptr() for parameter in parameters]
            note("distinct", [len(set(pointers)), 0 in pointers])
            note("again", pointers == [parameter.data_ptr() for parameter in model.parameters()])
            note("tied", model.head.weight.data_ptr() == model.embedding.weight.data_ptr())
            unique = {parameter.data_ptr(): parameter.numel() for _, parameter in model.named_parameters()}
            note("size of the model", sum(unique.values()))
            storages = [parameter.untyped_storage().data_ptr() for parameter in parameters]
            note("storages", [len(set(storages)), 0 in storages])
            state = model.state_dict()
            note("state", len({value.data_ptr() for value in state.values()}))
            note("tied in state", state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr())
            train(model, optimizer, first=step)

    both(pattern)


def test_data_has_the_address_of_its_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            note("data", parameter.data.data_ptr() == parameter.data_ptr())
            note("detached", parameter.detach().data_ptr() == parameter.data_ptr())
            note("row", parameter.data[1:].data_ptr() - parameter.data_ptr())
            note("set to", parameter.is_set_to(parameter.data))

    both(pattern)


# torch.func and second derivatives


def cross_entropy(logits, ids):
    return functional.cross_entropy(logits.flatten(0, -2), ids.flatten())


def test_functional_call_with_the_parameters_themselves(both):
    def functionally(model, step):
        ids = make_ids(step)
        return cross_entropy(functional_call(model, dict(model.named_parameters()), (ids[:, :-1],)), ids[:, 1:])

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=functionally))
        note("with all", functional_call(model, model.state_dict(), (make_ids(),), tie_weights=False).detach())

    both(pattern, loss=functionally)


def test_functional_call_with_other_values(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        ids = make_ids()
        halves = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
        note("all", functional_call(model, halves, (ids,)))
        note("some", functional_call(model, {"scale": halves["scale"]}, (ids,)).detach())
        note("submodule", functional_call(model.blocks[2].linear, {"bias": torch.ones(WIDTH)}, (torch.ones(WIDTH),)))
        note("unchanged", [inference(model), model.scale])
        noisy = {name: parameter + 0.01 for name, parameter in model.named_parameters()}
        loss = functional_call(model, noisy, (ids,)).pow(2).mean()
        loss.backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_gradients_of_every_sample(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())

        def of_one(values, ids):
            logits = functional_call(model, (values, buffers), (ids[None, :-1],))
            return cross_entropy(logits, ids[None, 1:])

        note("one", torch.func.grad(of_one)(values, make_ids()[0]))
        each, losses = torch.vmap(torch.func.grad_and_value(of_one), in_dims=(None, 0))(values, make_ids())
        note("each", each)
        note("losses", losses)

    both(pattern)


def test_directional_derivatives_by_torch_func(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        ones = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        ids = make_ids()

        def loss(values):
            return cross_entropy(functional_call(model, values, (ids[:, :-1],)), ids[:, 1:])

        note("forward", torch.func.jvp(loss, (values,), (ones,)))
        value, back = torch.func.vjp(loss, values)
        note("backward", [value, back(torch.ones(()))[0]])
        note("curvature", torch.func.jvp(torch.func.grad(loss), (values,), (ones,))[1])
        hidden = torch.linspace(-1, 1, WIDTH)
        note("jacobians", [torch.func.jacrev(model.blocks[0])(hidden), torch.func.jacfwd(model.blocks[1])(hidden)])

    both(pattern, make=make_shallow)


def test_an_ensemble_of_a_live_model_and_its_copy(both):
    def pattern(model, optimizer, note):
        other = copy_of(model)
        train(model, optimizer, 2, loss=loss_of_critic)
        parameters, buffers = torch.func.stack_module_state([model, other])
        note("stacked", parameters)
        skeleton, samples = copy_of(other).to("meta"), make_samples()

        def call(parameters, buffers):
            return functional_call(skeleton, (parameters, buffers), (samples,))

        note("values", torch.vmap(call)(parameters, buffers))

    both(pattern, make=make_critic, loss=loss_of_critic)


def test_a_step_of_meta_learning(both):
    def adapted(model, step):
        ids = make_ids(step)
        values = dict(model.named_parameters())
        loss = cross_entropy(functional_call(model, values, (ids[:, :-1],)), ids[:, 1:])
        gradients = torch.autograd.grad(loss, list(values.values()), create_graph=True)
        fast = {name: value - 0.1 * gradient for (name, value), gradient in zip(values.items(), gradients, strict=True)}
        ids = make_ids(step + 20)
        return cross_entropy(functional_call(model, fast, (ids[:, :-1],)), ids[:, 1:])

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=adapted))

    both(pattern, make=make_shallow, loss=adapted)


def test_gradients_asked_of_autograd(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        parameters = list(model.parameters())
        penalty = sum(parameter.pow(3).sum() for parameter in parameters)
        note("of a penalty", torch.autograd.grad(penalty, parameters))
        note("of one", torch.autograd.grad(model.scale.exp().sum(), model.scale))
        note("of a loss", torch.autograd.grad(loss_of(model), parameters))
        some = [model.blocks[4].linear.weight, model.scale]
        note("of some", torch.autograd.grad(loss_of(model, 1), some))
        note("unused", torch.autograd.grad(some[1].sum(), some, allow_unused=True)[0] is None)
        with raises_in_both(RuntimeError):
            torch.autograd.grad(some[1].sum(), some[0])
        note("left alone", [parameter.grad is None for parameter in parameters])

    both(pattern)


def test_products_with_the_hessian(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        parameters = list(model.parameters())
        generator = torch.Generator().manual_seed(3)
        vectors = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]
        gradients = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
        product = sum((gradient * vector).sum() for gradient, vector in zip(gradients, vectors, strict=True))
        products = torch.autograd.grad(product, parameters)
        note("products", products)
        note("trace", sum((a * b).sum() for a, b in zip(products, vectors, strict=True)))

    both(pattern)


def test_a_penalty_on_the_gradient_of_the_loss(both):
    def penalised(model, step):
        loss = loss_of(model, step)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, make=make_shallow, loss=penalised)


def test_a_gradient_of_a_penalty_in_the_loss(both):
    def penalised(model, step):
        weights = weight_matrices(model)
        inner = torch.autograd.grad(sum(w.pow(4).sum() for w in weights), weights, create_graph=True)
        return loss_of(model, step) + 0.1 * sum(gradient.abs().sum() for gradient in inner)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, loss=penalised)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make_critic():
    torch.manual_seed(0)
    return Critic()


def make_samples(step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(200 + step))


def loss_of_critic(model, step=0):
    return model(make_samples(step)).pow(2).mean()


def test_a_penalty_on_the_gradient_of_the_input(both):
    def penalised(model, step):
        real, fake = make_samples(step), make_samples(step + 10)
        between = torch.lerp(real, fake, 0.3).requires_grad_()
        value = model(between)
        gradient = torch.autograd.grad(value, between, torch.ones_like(value), create_graph=True, retain_graph=True)[0]
        return model(fake).mean() - model(real).mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern, make=make_critic, loss=penalised)


def test_adversarial_inputs_then_a_step(both):
    def attacked(model, step):
        samples = make_samples(step).requires_grad_()
        gradient = torch.autograd.grad(model(samples).sum(), samples)[0]
        return model((samples + 0.1 * gradient.sign()).detach()).pow(2).mean()

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=attacked))
        samples = make_samples().requires_grad_()
        model(samples).sum().backward(inputs=[samples])
        note("saliency", samples.grad)
        note("left alone", [parameter.grad is None for parameter in model.parameters()])

    both(pattern, make=make_critic, loss=attacked)


def test_autograd_functional(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, loss=loss_of_critic)
        samples, ones = make_samples()[:2], torch.ones(2, WIDTH)
        note("jacobian", torch.autograd.functional.jacobian(model, samples))
        note("hessian", torch.autograd.functional.hessian(lambda x: model(x).pow(2).sum(), samples[0]))
        note("hvp", torch.autograd.functional.hvp(lambda x: model(x).exp().sum(), samples, ones))
        note("vjp", torch.autograd.functional.vjp(model, samples, torch.ones(2, 1)))
        names, values = zip(*model.named_parameters(), strict=True)

        def of_values(*values):
            return functional_call(model, dict(zip(names, values, strict=True)), (samples,)).sum()

        note("of parameters", torch.autograd.functional.jacobian(of_values, values))

    both(pattern, make=make_critic, loss=loss_of_critic)


# Hooks


@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_parameters(both, before):
    def watch(model):
        model.seen = {name: [] for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: model.seen[name].append(gradient.norm()))
        handle = model.blocks[2].linear.weight.register_hook(lambda gradient: gradient * 0.5)
        return [handle, model.scale.register_hook(lambda gradient: torch.clamp(gradient, -1e-3, 1e-3))]

    def make():
        model = make_tower()
        if before:
            model.handles = watch(model)
        return model

    def pattern(model, optimizer, note):
        handles = model.handles if before else watch(model)
        note("losses", train(model, optimizer, 2))
        handles[0].remove()
        note("more", train(model, optimizer, 1, first=2))
        note("seen", model.seen)

    both(pattern, make=make)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_after_a_gradient_was_added(both, before):
    def watch(model):
        model.seen = {name: [] for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():

            def look(parameter, name=name):
                model.seen[name].append(
                    (parameter.grad.norm(), parameter.detach().norm(), (parameter * 2).sum().item())
                )

            parameter.register_post_accumulate_grad_hook(look)

    def make():
        model = make_tower()
        if before:
            watch(model)
        return model

    def pattern(model, optimizer, note):
        if not before:
            watch(model)
        note("losses", train(model, optimizer, 2))
        note("seen", model.seen)

    both(pattern, make=make)


@pytest.mark.parametrize("before", [True, False])
def test_weights_read_in_forward_hooks(both, before):
    def watch(model):
        model.seen = []

        def look(module, *_):
            other = model.blocks[0].linear.weight
            model.seen.append([module.linear.weight.norm().item(), other.detach().sum(), model.scale.mean()])

        for block in model.blocks[:12]:
            block.register_forward_pre_hook(look)
            block.register_forward_pre_hook(look, prepend=True)
            block.register_forward_hook(look)
            block.register_forward_hook(look, prepend=True)
        leaf = model.blocks[8].linear
        leaf.register_forward_pre_hook(lambda module, args: model.seen.append(module.weight.data.norm()))
        leaf.register_forward_hook(lambda module, args, output: model.seen.append(module.weight.detach().clone()))
        leaf.register_forward_hook(lambda module, args, output: output + module.weight.mean())

    def make():
        model = make_tower()
        if before:
            watch(model)
        return model

    def pattern(model, optimizer, note):
        if not before:
            watch(model)
        note("losses", train(model, optimizer, 2))
        note("inference", inference(model))
        note("seen", model.seen)

    both(pattern, make=make)


def test_weights_read_in_hooks_of_all_modules(both):
    def pattern(model, optimizer, note):
        seen = []

        def look(module, args, output):
            seen.extend(parameter.abs().max().item() for parameter in module.parameters(recurse=False))

        handle = nn.modules.module.register_module_forward_hook(look)
        try:
            note("losses", train(model, optimizer, 2))
        finally:
            handle.remove()
        note("seen", seen)

    both(pattern)


def test_weights_read_in_backward_hooks(both):
    def pattern(model, optimizer, note):
        seen = []

        def look(module, *_):
            seen.append([module.weight.norm().item(), module.bias.data.sum(), model.head.weight.detach()[0]])

        for block in model.blocks[:12]:
            block.linear.register_full_backward_hook(look)
            block.norm.register_full_backward_pre_hook(look)
        note("losses", train(model, optimizer, 2))
        note("seen", seen)

    both(pattern)


def test_weights_read_in_a_hook_on_an_activation(both):
    def pattern(model, optimizer, note):
        seen = []
        for block in model.blocks[:6]:

            def attach(module, args, output):
                output.register_hook(lambda gradient: seen.append((gradient @ module.linear.weight.detach()).norm()))

            block.register_forward_hook(attach)
        note("losses", train(model, optimizer, 2))
        note("seen", seen)

    both(pattern)


# Within forward and backward


class Borrowing(Tower):
    """Modules that use each other's weights."""

    def forward(self, ids):
        x = functional.embedding(ids, self.embedding.weight) + self.offset
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            x = block(x) @ other.linear.weight.T * 0.5 + other.linear.bias * self.scale
            x = x + block.norm.weight.mean()
        return functional.linear(self.norm(x), self.head.weight)


def make_borrowing():
    torch.manual_seed(0)
    return Borrowing(depth=16)


def test_forward_uses_weights_of_other_modules(both):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3))
        note("inference", inference(model))

    both(pattern, make=make_borrowing)


def test_an_autoencoder_decodes_by_the_transposed_encoder(both):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoders = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(12)])
            self.biases = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(3)])

        def forward(self, x):
            for encoder in self.encoders:
                x = torch.tanh(encoder(x))
            for place, encoder in enumerate(reversed(self.encoders)):
                x = functional.linear(x, encoder.weight.t(), self.biases[place % 3])
            return x

    def make():
        torch.manual_seed(0)
        return Auto()

    def loss(model, step):
        return functional.mse_loss(model(make_samples(step)), make_samples(step))

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=loss))
        note("lists", [list(model.biases), [encoder.weight.sum() for encoder in model.encoders]])

    both(pattern, make=make, loss=loss)


class Checkpointed(Tower):
    """Computes its blocks again in backward; each reads a weight of the next, and one that it was handed."""

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block, following in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):

            def run(x, weight, block=block, following=following):
                return block(x) + following.linear.weight.mean(0) + weight.mean()

            weight = following.norm.weight
            x = torch.utils.checkpoint.checkpoint(run, x, weight, use_reentrant=False)
        return self.head(self.norm(x) * self.scale)


def test_recomputation_reads_weights_of_other_modules(both):
    def make():
        torch.manual_seed(0)
        return Checkpointed(depth=12)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("gradients", [p.norm() for p in model.parameters()])

    both(pattern, make=make)


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class FromModule(torch.autograd.Function):
    """Reads the weight from its module in forward and in backward, without a gradient for it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.module.weight, None


class CustomLinear(nn.Module):
    function = Saved

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x):
        if self.function is FromModule:
            return FromModule.apply(x, self) + x @ self.weight
        return self.function.apply(x, self.weight)


FUNCTIONS = [Saved, Attribute, FromModule]


def test_custom_functions_of_the_own_weight(both):
    def make():
        model = make_tower()
        for place, block in enumerate(model.blocks[::3]):
            block.linear = CustomLinear()
            block.linear.function = FUNCTIONS[place % 3]
        return model

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("weights", [block.linear.weight for block in model.blocks[::3]])

    both(pattern, make=make)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_custom_function_of_the_weight_of_another_module(both, function):
    def applied(model, step):
        penalty = 0
        x = make_samples(step)
        for block in model.blocks[:6]:
            argument = block.linear if function is FromModule else block.linear.weight
            x = function.apply(x + model.scale, argument)
            penalty = penalty + x.pow(2).mean()
        return loss_of(model, step) + 0.1 * penalty

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=applied))

    both(pattern, loss=applied)


def test_a_custom_function_within_forward_of_another_module(both):
    class Applying(Tower):
        def forward(self, ids):
            x = self.embedding(ids)
            for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
                x = Saved.apply(block(x), other.linear.weight) * 0.5 + Attribute.apply(x, self.blocks[3].linear.weight)
            return self.head(self.norm(x) * self.scale)

    def make():
        torch.manual_seed(0)
        return Applying(depth=10)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))

    both(pattern, make=make)


# Modes


def test_reading_under_every_gradient_mode(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[8].linear.weight
        with torch.no_grad():
            note("no grad", [weight * 2, weight.sum(), weight, weight.T.detach(), model(make_ids())])
            with torch.enable_grad():
                note("enabled within", [weight * 2, weight.sum(), model(make_ids())])
        with torch.inference_mode():
            inferred = weight * 2
            note("inference", [weight.norm().item(), weight, model(make_ids()).sum().item(), inferred.is_inference()])
        with torch.set_grad_enabled(False):
            note("set", [weight.exp(), weight[0].detach()])
        note("outside", [weight * 2, inferred + 1])
        with raises_in_both(RuntimeError):
            (weight * inferred).sum().backward()
        note("left alone", weight.grad is None)

    both(pattern)


def test_reading_in_inference_mode_then_training(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            with torch.inference_mode():
                model.eval()
                note("norms", [parameter.norm().item() for parameter in model.parameters()])
                note("logits", model(make_ids()).clone().tolist())
                model.train()
            note("losses", train(model, optimizer, first=step))
            note("ordinary", [parameter.is_inference() for parameter in model.parameters()])

    both(pattern)


def test_reading_under_modes_of_torch(both):
    class Counting(torch.overrides.TorchFunctionMode):
        linears = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.linears += func is functional.linear
            return func(*args, **(kwargs or {}))

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def pattern(model, optimizer, note):
        train(model, optimizer)
        with Counting() as counting:
            note("functions", [inference(model), model.scale.norm(), model.head.weight @ model.scale])
        note("linears", counting.linears)
        with Watching() as watching:
            note("dispatched", [model.scale.exp(), model.blocks[0].linear.weight @ model.blocks[1].linear.weight])
        note("products", watching.products)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            loss_of(model).backward()
        note("operations", counter.get_total_flops())
        optimizer.zero_grad()
        with torch.device("cpu"):
            note("device", model.scale + torch.ones(WIDTH))

    both(pattern)


def test_penalties_under_hooks_on_saved_tensors(both):
    def penalised(model, step):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            return loss_of(model, step) + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model) + model.scale.pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    both(pattern, loss=penalised)


def test_penalties_while_anomalies_are_looked_for(both):
    def penalised(model, step):
        return loss_of(model, step) + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        with torch.autograd.set_detect_anomaly(True):
            note("losses", train(model, optimizer, 2, loss=penalised))

    both(pattern)


# Dictionaries and files


def test_parameters_found_by_name(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        name = "blocks.4.linear.weight"
        note("by path", [model.get_parameter(name), functools.reduce(getattr, name.split("."), model)])
        note("by submodule", model.get_submodule("blocks.4").get_parameter("linear.weight"))
        note(
            "by attribute", [operator.attrgetter("linear.weight")(model.blocks[4]), vars(model)["_parameters"]["scale"]]
        )
        note("registered", [list(model._parameters), list(model.blocks[0].linear._parameters.values())])
        note("by item", {key: value.sum() for key, value in model.blocks[0].linear._parameters.items()})
        note("own", [name for name, _ in model.named_parameters(recurse=False)])
        note("all names", [name for name, _ in model.named_parameters(remove_duplicate=False)])
        note("prefixed", [(name, p.norm()) for name, p in model.blocks[1].named_parameters(prefix="block")])

    both(pattern)


def test_values_of_the_state_dict(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        state = model.state_dict()
        note("keys", list(state))
        note("values", {key: value.clone() for key, value in state.items()})
        note("facts", {key: [type(value), value.is_leaf, value.shape, value.stride()] for key, value in state.items()})
        note("part", dict(model.blocks[3].state_dict(prefix="part.")))
        note("variables", [value.requires_grad for value in model.state_dict(keep_vars=True).values()])
        note("copied", dict(copy.deepcopy(state)))
        note("sizes", {key: tuple(value.shape) for key, value in copy.copy(state).items()})
        note("numbers", {key: value.double().sum().item() for key, value in state.items()})

    both(pattern)


def test_parameters_written_to_files_of_safetensors(both, tmp_path):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        path = tmp_path / "weights.safetensors"
        for name, parameters in {
            "named": dict(model.named_parameters()),
            "data": {name: parameter.data for name, parameter in model.named_parameters()},
            "contiguous": {name: parameter.contiguous() for name, parameter in model.named_parameters()},
            "detached": {name: parameter.detach().cpu() for name, parameter in model.named_parameters()},
        }.items():
            safetensors.torch.save_file(parameters, path)
            note(name, dict(sorted(safetensors.torch.load_file(path).items())))
        block = safetensors.torch.load(safetensors.torch.save(dict(model.blocks[0].named_parameters())))
        note("bytes", dict(sorted(block.items())))
        safetensors.torch.save_model(model, str(path))
        note("model", dict(sorted(safetensors.torch.load_file(path).items())))
        with raises_in_both(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"a": model.head.weight, "b": model.embedding.weight}, path)

    both(pattern)


def test_parameters_written_by_torch_save(both):
    def written(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("named", written(dict(model.named_parameters())))
        note("state", dict(written(model.state_dict())))
        note("one", [written(model.scale), type(written(model.scale)), written(model.scale.data)])
        note("list", written([parameter.detach() for parameter in model.parameters()]))
        note("pickled", [pickle.loads(pickle.dumps(parameter)) for parameter in model.blocks[0].parameters()])
        note("size", len(pickle.dumps(model.head.weight.detach())) < 10_000)

    both(pattern)


# At any moment


def test_reading_at_every_moment_of_a_step(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())

        def look(moment):
            note(moment, [parameter.detach().clone() for parameter in parameters])
            note(moment, [parameter.norm() for parameter in model.parameters()])
            note(moment, model.blocks[1].linear.weight.tolist())

        for step in range(2):
            look("before")
            loss = loss_of(model, step)
            look("after forward")
            loss.backward()
            look("after backward")
            optimizer.step()
            look("after the step")
            optimizer.zero_grad()
            look("after zero_grad")

    both(pattern)


def test_reading_between_micro_batches(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for micro in range(2):
                loss_of(model, 2 * step + micro).backward()
                note("vector", parameters_to_vector(model.parameters()))
                note("inference", inference(model))
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_reading_with_two_graphs_alive(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        first = loss_of(model, 1)
        note("norm", model.blocks[0].linear.weight.norm())
        second = loss_of(model, 2) + model.blocks[0].linear.weight.pow(2).sum()
        note("inference", inference(model))
        first.backward()
        note("norm again", model.blocks[0].linear.weight.norm())
        second.backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_a_reader_that_stops_early_or_fails(both):
    def pattern(model, optimizer, note):
        for parameter in model.parameters():
            note("first", parameter)
            break
        walk = iter(model.named_parameters())
        note("second", next(walk))
        with raises_in_both(ZeroDivisionError):
            for parameter in model.parameters():
                1 / int(parameter.sum() * 0)
        with raises_in_both(RuntimeError):
            model.scale @ torch.ones(WIDTH + 1)
        note("losses", train(model, optimizer, 2))
        note("third", next(walk))

    both(pattern)


# Threads


def run_threads(*functions):
    """Runs every function in a thread of its own and returns what they gave."""
    results = [None] * len(functions)

    def run(place, function):
        results[place] = function()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_thread_reads_and_infers_between_steps(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            train(model, optimizer, first=step)
            note("norms", run_threads(lambda: [parameter.norm().item() for parameter in model.parameters()]))
            note("logits", run_threads(lambda: inference(model)))
            note("with a graph", run_threads(lambda: model(make_ids()).detach()))

    both(pattern)


class Stopping(nn.Linear):
    """A layer that stops while its parameters have values."""

    has_value: threading.Event | None = None
    may_end: threading.Event

    def forward(self, x):
        if self.has_value is not None:
            self.has_value.set()
            assert self.may_end.wait(30)
        return super().forward(x)


def make_stopping():
    model = make_tower()
    model.blocks[1].linear = Stopping(WIDTH, WIDTH)
    return model


def read_while_inferring(model, read, ends_late=False):
    """Lets a thread read the layer that stops, while another one infers; returns what both got.

    Args:
        model: Of ``make_stopping``.
        read: Gets the layer, and returns what is to be compared.
        ends_late: Whether the layer goes on in the middle of the read, after torch was called and before torch reads.
    """
    layer = model.blocks[1].linear
    layer.has_value, layer.may_end, has_ended = (threading.Event() for _ in range(3))

    class LateRead(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            layer.may_end.set()
            has_ended.wait(0.1)
            with torch._C.DisableTorchFunctionSubclass():  # torch's own code reads what is there now
                return func(*args, **(kwargs or {}))

    def infer():
        try:
            return inference(model)
        finally:
            has_ended.set()

    @torch.no_grad()  # a read that autograd records waits until the module has ended
    def read_inside():
        assert layer.has_value.wait(30)
        with LateRead() if ends_late else contextlib.nullcontext():
            found = read(layer)
        layer.may_end.set()
        return found

    logits, found = run_threads(infer, read_inside)
    layer.has_value = None
    return logits, found


def test_a_thread_reads_while_a_module_computes(both):
    """What the other thread gets is its own: the module's parameters have no value any more when it looks."""

    def read(layer):
        return {
            "detached": layer.weight.detach(),
            "data": layer.weight.data,
            "view": layer.weight[2:4],
            "array": layer.bias.detach().numpy(),
            "stacked": torch.stack([layer.weight, layer.weight]),
            "norm": layer.weight.norm(),
            "shapes": [
                tuple(layer.weight.shape),
                layer.weight.stride(),
                layer.weight.requires_grad,
                layer.bias.numel(),
            ],
            "state": layer.state_dict(),
        }

    def pattern(model, optimizer, note):
        for step in range(2):
            logits, found = read_while_inferring(model, read)
            inference(model)  # other chunks come where the layer's was
            note("logits", logits)
            for name, value in found.items():
                note(name, value)
            train(model, optimizer, first=step)
            note("after a step", {name: found[name] for name in ("detached", "data", "view", "array")})

    both(pattern, make=make_stopping)


@pytest.mark.parametrize(
    "read",
    [
        lambda layer: layer.weight.detach(),
        lambda layer: layer.weight.clone(),
        lambda layer: functional.linear(torch.ones(2, WIDTH), layer.weight, layer.bias),
        lambda layer: torch.sum(input=layer.weight),
        lambda layer: torch.stack([layer.weight, layer.weight]),
        lambda layer: {name: value.clone() for name, value in layer.state_dict().items()},
    ],
    ids=["method", "clone", "function", "keyword", "list", "state_dict"],
)
def test_a_module_that_ends_in_the_middle_of_a_read(both, read):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("found", read_while_inferring(model, read, ends_late=True))

    both(pattern, make=make_stopping)


def test_several_threads_infer_at_once_between_steps(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            train(model, optimizer, first=step)
            note("logits", run_threads(*[lambda step=step: inference(model, step) for step in range(4)]))
            note(
                "mixed",
                run_threads(
                    lambda: inference(model),
                    lambda: parameters_to_vector(p.detach() for p in model.parameters()),
                    lambda: {key: value.clone() for key, value in model.state_dict().items()},
                ),
            )

    both(pattern)


def test_a_thread_trains_and_another_reads_afterwards(both):
    def pattern(model, optimizer, note):
        note("losses", run_threads(lambda: train(model, optimizer, 2)))
        note("here", [parameter.norm() for parameter in model.parameters()])
        note("there", run_threads(lambda: [parameter.norm().item() for parameter in model.parameters()]))
        note("more", train(model, optimizer, 1, first=2))

    both(pattern)
