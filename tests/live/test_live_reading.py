"""Reading parameters of a live model, however one gets hold of them."""

import contextlib
import copy
import io
import pickle
import threading

import numpy
import pytest
import safetensors.torch
import torch
from support.live import WIDTH, Tower, live, loss_of, make_ids, make_tower, make_with_list, raises_in_both, train
from support.threads import in_threads
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode


def inference(model, step=9):
    with torch.no_grad():
        return model(make_ids(step))


def some(model):
    """A vector, a matrix and the tied table."""
    return model.scale, model.blocks[3].linear.weight, model.embedding.weight


def weights_of(model):
    return [block.linear.weight for block in model.blocks]


# What reads and leaves everything as it was: each function gives what it found.


def of_all_at_once(model):
    parameters = list(model.parameters())
    found = [sum(p.detach().double().pow(2).sum() for p in parameters).sqrt(), nn.utils.get_total_norm(parameters)]
    with torch.no_grad():
        found += [torch._foreach_norm(parameters), torch._foreach_norm(parameters, float("inf"))]
        found += [torch._foreach_mul(parameters, 2.0), torch.stack([p.norm() for p in parameters])]
    vectors = [parameters_to_vector(parameters), parameters_to_vector(p.detach() for p in parameters)]
    return [*found, *vectors, torch.cat([p.flatten() for p in parameters])]


def on_either_side_of_an_operator(model):
    scale, weight, other = model.scale, model.blocks[2].linear.weight, torch.linspace(-1, 1, WIDTH)
    found = [1 - scale, 2**scale, other @ weight, weight @ other, -scale, scale * weight, weight - weight.T]
    found += [torch.where(weight > 0, weight, scale), torch.equal(weight, weight), torch.allclose(weight, other)]
    found += [
        torch.cat([weight, weight]),
        torch.stack([scale, scale]),
        torch.einsum("i,ij,kj->ik", scale, weight, weight),
    ]
    torch.testing.assert_close(weight, weight.detach().clone(), rtol=0, atol=0, check_stride=True)
    buffer = torch.zeros(WIDTH)
    with torch.no_grad():
        buffer += scale
        buffer.add_(scale, alpha=0.5).lerp_(scale, 0.25).addcmul_(scale, other)
        found += [buffer, torch.add(scale, other, alpha=2, out=torch.empty(WIDTH))]
    first, *rest = scale
    return [*found, torch._foreach_add([buffer, other], [scale, model.norm.weight]), first, rest[-1], list(weight)]


def arrays(model):
    found = []
    for p in some(model):
        found += [p.detach().numpy(), p.detach().cpu().numpy(), p.data.numpy(), p.numpy(force=True)]
        found += [numpy.asarray(p.detach()), float(numpy.mean(p.detach().numpy()))]
        with raises_in_both(RuntimeError, match="requires grad"):
            p.numpy()
    with raises_in_both(RuntimeError, match="requires grad"):
        numpy.array(model.scale)
    with torch.no_grad():
        found += [model.scale.numpy(), numpy.asarray(model.blocks[1].linear.bias)]
    return [*found, numpy.percentile(numpy.array(model.head.weight.detach()), [5, 95])]


def numbers_and_texts(model):
    number = model.scale[0]
    found = [model.scale.tolist(), model.head.weight[1, 2].item(), float(number), int(number * 100), bool(number)]
    found += [round(number.item(), 2), max(model.scale).item(), sum(model.scale), f"{number.item():.4f}"]
    for p in some(model):
        found += [repr(p), str(p), f"{p}", f"{p.detach()}"]
    found += [repr(model), str(model.state_dict()), str(list(model.named_parameters())[:2])]
    for refused in (
        lambda: model.scale.item(),
        lambda: bool(model.scale),
        lambda: model.blocks[0].linear.weight[WIDTH],
    ):
        with raises_in_both(RuntimeError, IndexError):
            refused()
    with raises_in_both(TypeError):
        f"{model.scale:.3f}"
    with raises_in_both(RuntimeError):
        model.scale @ torch.ones(WIDTH + 1)
    return found


def metadata(model):
    found = []
    for p in (*some(model), model.scale.data):
        found += [p.shape, p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement(), len(p), p.stride(), p.T.shape]
        found += [p.dtype, p.device, p.layout, p.type(), p.get_device(), p.element_size(), p.itemsize, p.nbytes]
        found += [p.is_contiguous(), p.storage_offset(), p.is_leaf, p.requires_grad, p.grad_fn, p.retains_grad]
        found += [p.is_floating_point(), p.is_complex(), p.is_sparse, p.is_cuda, p.is_meta, p.is_quantized]
        found += [p.is_inference(), p.is_nested, p.grad is None, p.output_nr, torch.is_tensor(p), torch.typename(p)]
        found += [isinstance(p, nn.Parameter), type(p).__name__, type(p.data), type(p.detach()), type(p * 1)]
        found += [p.untyped_storage().nbytes(), p.data.untyped_storage().nbytes(), p.untyped_storage().device]
        found += [nn.parameter.is_lazy(p)]
    return found


def addresses(model):
    parameters = list(model.parameters())
    pointers = [p.data_ptr() for p in parameters]
    found = [len(set(pointers)), 0 in pointers, pointers == [p.data_ptr() for p in parameters]]
    storages = [p.untyped_storage().data_ptr() for p in parameters]
    state = model.state_dict()
    found += [len(set(storages)), 0 in storages, len({value.data_ptr() for value in state.values()})]
    found += [state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()]
    for p in some(model):
        found += [p.data.data_ptr() == p.data_ptr(), p.detach().data_ptr() == p.data_ptr(), p.is_set_to(p.data)]
        found += [p.data[1:].data_ptr() - p.data_ptr()]
    return found


def state_dicts(model):
    state = model.state_dict()
    found = [list(state), {key: value.clone() for key, value in state.items()}, dict(copy.deepcopy(state))]
    found += [{key: [type(value), value.is_leaf, value.shape, value.stride()] for key, value in state.items()}]
    found += [
        dict(model.blocks[3].state_dict(prefix="part.")),
        {key: x.double().sum().item() for key, x in state.items()},
    ]
    return [*found, [value.requires_grad for value in model.state_dict(keep_vars=True).values()]]


def saved(model):
    def by_torch(value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def by_safetensors(tensors):
        return dict(sorted(safetensors.torch.load(safetensors.torch.save(tensors)).items()))

    found = [by_torch(dict(model.named_parameters())), dict(by_torch(model.state_dict())), by_torch(model.scale.data)]
    found += [by_torch(model.scale), type(by_torch(model.scale)), by_torch([p.detach() for p in some(model)])]
    found += [pickle.loads(pickle.dumps(model.scale)), len(pickle.dumps(model.head.weight.detach())) < 10_000]
    found += [by_safetensors(dict(model.named_parameters())), by_safetensors({"data": model.scale.data})]
    with raises_in_both(RuntimeError, match="share memory"):
        safetensors.torch.save({"a": model.head.weight, "b": model.embedding.weight})
    return found


def cross_entropy(logits, ids):
    return functional.cross_entropy(logits.flatten(0, -2), ids.flatten())


def by_torch_func(model):
    ids = make_ids()
    values = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    halves = {name: value * 0.5 for name, value in values.items()}

    def of_one(values, ids):
        return cross_entropy(functional_call(model, (values, buffers), (ids[None, :-1],)), ids[None, 1:])

    found = [
        functional_call(model, halves, (ids,)),
        functional_call(model, {"scale": halves["scale"]}, (ids,)).detach(),
    ]
    found += [functional_call(model.blocks[2].linear, {"bias": torch.ones(WIDTH)}, (torch.ones(WIDTH),))]
    found += [functional_call(model, model.state_dict(), (ids,), tie_weights=False).detach()]
    found += [torch.func.grad(of_one)(values, ids[0])]
    found += torch.vmap(torch.func.grad_and_value(of_one), in_dims=(None, 0))(values, ids)
    ones = {name: torch.ones_like(value) for name, value in values.items()}
    found += [torch.func.jvp(lambda values: of_one(values, ids[0]), (values,), (ones,))]
    hidden = torch.linspace(-1, 1, WIDTH)
    found += [torch.func.jacrev(model.blocks[0])(hidden), torch.func.jacfwd(model.blocks[1])(hidden)]
    stacked, _ = torch.func.stack_module_state([model.blocks[0], model.blocks[1]])
    return [*found, stacked]


def under_gradient_modes(model):
    weight = model.blocks[5].linear.weight
    with torch.no_grad():
        found = [weight * 2, weight.sum(), weight.T.detach(), model(make_ids())]
        with torch.enable_grad():
            found += [weight * 2, weight.sum(), model(make_ids())]
    with torch.inference_mode():
        inferred = weight * 2
        found += [weight.norm().item(), model(make_ids()).sum().item(), inferred.is_inference()]
        found += [p.norm().item() for p in model.parameters()]
    with torch.set_grad_enabled(False):
        found += [weight.exp(), weight[0].detach()]
    with raises_in_both(RuntimeError):
        (weight * inferred).sum().backward()
    return [*found, inferred + 1, weight.grad is None, weight.is_inference()]


READS = [
    *(of_all_at_once, on_either_side_of_an_operator, arrays, numbers_and_texts, metadata, addresses),
    *(state_dicts, saved, by_torch_func, under_gradient_modes),
]


@live(everywhere=True)
def test_reads(model, optimizer, note):
    for step in range(2):
        for read in READS:
            note(read.__name__, read(model))
        note("losses", train(model, optimizer, first=step))


def make_odd():
    """Parameters of kinds that few models have, some frozen, and attributes that users put on them."""

    class Odd(Tower):
        def __init__(self):
            super().__init__()
            self.dummy, self.number = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(0.5))
            self.table = nn.ParameterDict({"one": nn.Parameter(torch.ones(3)), "two": torch.zeros(2)})
            self.list = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, ids):
            logits = super().forward(ids.to(self.dummy.device)) * self.number + self.table["one"].sum()
            return logits * self.list[0].sum() + self.list[1][0]

    torch.manual_seed(0)
    model = Odd()
    weight = model.blocks[3].linear.weight
    model.blocks[3].linear.weight = nn.Parameter(weight.detach().t().contiguous().t())
    for block in model.blocks[::2]:
        block.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.tag = name
    return model


@live(make=make_odd, settings={"chunk_budget": 6144})
def test_parameters_of_rare_kinds(model, optimizer, note):
    turned = model.blocks[3].linear.weight
    for step in range(2):
        for name, p in model.named_parameters():
            note(
                name,
                [p, p * 2, p.shape, p.dtype, p.requires_grad, p.is_leaf, p.tag],
            )
        note("texts", [repr(model.dummy), repr(model.number), str(model.blocks[0].linear.bias), repr(turned)])
        note("shallow", [copy.copy(model.scale), copy.copy(model.scale).tag])
        note("number", [model.number.item(), float(model.number), model.number.dim(), bool(model.number > 0)])
        note(
            "lists", [dict(model.table.items()), list(model.list), [name for name, _ in model.table.named_parameters()]]
        )
        note("turned", [turned.T, turned.flatten(), turned.data[2]])
        model.scale.sequence = [step]
        note("losses", train(model, optimizer, first=step))
        note(
            "attributes", [model.scale.sequence, sorted(name for name in vars(model.scale) if not name.startswith("_"))]
        )
    del model.scale.sequence
    note("deleted", hasattr(model.scale, "sequence"))


# Penalties: what is computed of weights outside of a forward is a part of the loss.


def of_the_gradient_of_the_loss(model):
    gradients = torch.autograd.grad(loss_of(model, 7), list(model.parameters()), create_graph=True)
    return sum(gradient.pow(2).sum() for gradient in gradients)


def meta_learning(model):
    values, ids = dict(model.named_parameters()), make_ids(20)
    loss = cross_entropy(functional_call(model, values, (ids[:, :-1],)), ids[:, 1:])
    gradients = torch.autograd.grad(loss, list(values.values()), create_graph=True)
    fast = {name: value - 0.1 * gradient for (name, value), gradient in zip(values.items(), gradients, strict=True)}
    return cross_entropy(functional_call(model, fast, (ids[:, :-1],)), ids[:, 1:])


def under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gram = sum((weight @ weight.T).diagonal().sum() for weight in weights_of(model)[:3])
        return gram + loss_of(model, 3) + sum(p.pow(2).sum() for p in model.parameters())


def under_hooks_on_saved_tensors(model):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
    with torch.autograd.graph.save_on_cpu():
        return penalty + loss_of(model, 3) + model.scale.pow(2).sum()


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


def custom_functions(model):
    x, penalty = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), 0
    for block, function in zip(model.blocks, [Saved, Attribute, FromModule] * 2, strict=False):
        x = function.apply(x + model.scale, block.linear if function is FromModule else block.linear.weight)
        penalty = penalty + x.pow(2).mean()
    return penalty


PENALTIES = {
    "kept before the engine": lambda m: sum(p.pow(2).sum() for p in m.kept) + sum(p.abs().mean() for p in m.kept[:9]),
    "by attribute": lambda m: m.scale.abs().mean() + (m.head.weight - m.embedding.weight.detach()).pow(2).mean(),
    "neighbours": lambda m: torch.stack(weights_of(m)).diff(dim=0).pow(2).mean(),
    "vector": lambda m: parameters_to_vector(m.parameters()).norm() + parameters_to_vector(m.parameters()).logsumexp(0),
    "part": lambda m: (m.blocks[4].linear.weight @ m.scale).sum() + m.embedding.weight[3].pow(2).sum(),
    "parameters themselves": lambda m: functional_call(m, dict(m.named_parameters()), (make_ids(4),)).pow(2).mean(),
    "noisy": lambda m: functional_call(m, {n: p + 0.01 for n, p in m.named_parameters()}, (make_ids(),)).pow(2).mean(),
    "of the gradient of the loss": of_the_gradient_of_the_loss,
    "meta learning": meta_learning,
    "autocast": under_autocast,
    "saved tensors": under_hooks_on_saved_tensors,
    "custom functions": custom_functions,
}


@live(make=make_with_list, everywhere=True)
def test_penalties(model, optimizer, note):
    for step, (name, penalty) in enumerate(PENALTIES.items()):
        optimizer.zero_grad()
        value = penalty(model)  # before the forward in one step, after it in the next
        loss = loss_of(model, step) + 0.01 * (penalty(model) if step % 2 else value)
        loss.backward()
        note(name, [value.detach(), loss.detach(), [p.grad for p in some(model)]])
        optimizer.step()
    optimizer.zero_grad()


# Inside of forward and backward


class Borrowing(Tower):
    """Modules that use each other's weights, also by functions of the user."""

    def forward(self, ids):
        x = functional.embedding(ids, self.embedding.weight) + self.offset
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            x = block(x) @ other.linear.weight.T * 0.5 + other.linear.bias * self.scale
            x = Saved.apply(x, other.linear.weight) * 0.5 + Attribute.apply(x, self.blocks[3].linear.weight)
            x = FromModule.apply(x, self.blocks[2].linear) * 0.5 + block.norm.weight.mean()
        return functional.linear(self.norm(x), self.head.weight)


class Checkpointed(Tower):
    """Computes its blocks again in backward; each reads a weight of the next, and one that it was handed."""

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block, following in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):

            def run(x, weight, block=block, following=following):
                return block(x) + following.linear.weight.mean(0) + weight.mean()

            x = torch.utils.checkpoint.checkpoint(run, x, following.norm.weight, use_reentrant=False)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize("cls", [Borrowing, Checkpointed])
def test_models_that_read_weights_while_they_compute(both, cls):
    def make():
        torch.manual_seed(0)
        return cls()

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("inference", inference(model))

    both(pattern, make=make)


# Threads


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

    results = {}

    def infer():
        try:
            results["logits"] = inference(model)
        finally:
            has_ended.set()

    @torch.no_grad()  # a read that autograd records waits until the module has ended
    def read_inside():
        assert layer.has_value.wait(30)
        with LateRead() if ends_late else contextlib.nullcontext():
            results["found"] = read(layer)
        layer.may_end.set()

    in_threads(infer, read_inside)
    layer.has_value = None
    return results["logits"], results["found"]


@live(make=make_stopping)
def test_a_thread_reads_while_a_module_computes(model, optimizer, note):
    """What the other thread gets is its own: the module's parameters have no value any more when it looks."""

    def read(layer):
        weight = layer.weight
        kept = [weight.detach(), weight.data, weight[2:4], layer.bias.detach().numpy(), layer.state_dict()]
        shapes = [tuple(weight.shape), weight.stride(), weight.requires_grad, layer.bias.numel()]
        return kept, [torch.stack([weight, weight]), weight.norm(), shapes]

    for step in range(2):
        logits, (kept, other) = read_while_inferring(model, read)
        inference(model)  # other chunks come where the layer's was
        note("found", [logits, kept, other])
        train(model, optimizer, first=step)
        note("after a step", kept)


@live(make=make_stopping)
def test_a_module_that_ends_in_the_middle_of_a_read(model, optimizer, note):
    train(model, optimizer)
    reads = {
        "method": lambda layer: layer.weight.detach(),
        "clone": lambda layer: layer.weight.clone(),
        "function": lambda layer: functional.linear(torch.ones(2, WIDTH), layer.weight, layer.bias),
        "keyword": lambda layer: torch.sum(input=layer.weight),
        "list": lambda layer: torch.stack([layer.weight, layer.weight]),
        "state_dict": lambda layer: {name: value.clone() for name, value in layer.state_dict().items()},
    }
    for name, read in reads.items():
        note(name, read_while_inferring(model, read, ends_late=True))
