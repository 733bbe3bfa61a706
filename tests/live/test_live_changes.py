"""Changing what is trained: freezing, new, replaced and removed modules, adapters, while an engine is attached."""

import copy

import peft
import pytest
import torch
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from support.hf import states
from support.live import (
    VOCAB,
    WIDTH,
    Block,
    Tower,
    live,
    loss_of,
    make_adamw,
    make_ids,
    make_tower,
    raises_in_both,
    train,
)
from support.models import make_batch, make_model
from support.trainers import tight
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint


def room(nbytes):
    """Settings for patterns in which one module uses more parameters at once than the smallest budget has room for."""
    return {"chunk_budget": nbytes}


def add(optimizer, parameters, **options):
    optimizer.add_param_group({"params": list(parameters), **options})


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def values(parameters):
    """Copies of values, by the way everybody makes them."""
    return [parameter.detach().clone() for parameter in parameters]


def gradients(model):
    return {name: p.grad is not None and p.grad.clone() for name, p in model.named_parameters()}


def evaluated(model, step=9, loss=loss_of):
    with torch.no_grad():
        return loss(model, step)


# Freezing and unfreezing: each function says what is trained from then on.


def all_but_a_part(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm") or name == "scale")


def one_more_layer(model):
    model.blocks[-1].requires_grad_(True)


def one_name_of_a_tied_weight(model):
    model.requires_grad_(True)
    model.head.requires_grad_(False)


def a_reference_in_an_evaluation(model):
    """Only says ``requires_grad`` while nothing is recorded."""
    model.blocks[:4].requires_grad_(True)
    with torch.no_grad():
        loss_of(model, 8)
    with torch.inference_mode():
        loss_of(model, 8)
    model.blocks[:4].requires_grad_(False)
    model.blocks[4:].requires_grad_(True)


def nothing(model):
    model.requires_grad_(False)
    with raises_in_both(RuntimeError, match="does not require grad"):
        loss_of(model).backward()
    model.requires_grad_(True)


FREEZINGS = [
    *(one_more_layer, one_name_of_a_tied_weight, all_but_a_part, a_reference_in_an_evaluation, nothing),
]


def make_frozen():
    model = make_tower()
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


@live(make=make_frozen)
def test_freezing_and_unfreezing(model, optimizer, note):
    note("the norm alone", train(model, optimizer, 2))
    for step, freeze in enumerate(FREEZINGS):
        freeze(model)
        note(freeze.__name__, [len(trainable(model)), model.embedding.weight.requires_grad])
        note(freeze.__name__, train(model, optimizer, 2, first=2 + 2 * step))
        note(freeze.__name__, [len(optimizer.state_dict()["state"]), list(model.parameters())])


# New, replaced, moved and removed modules and parameters: each function changes the model that those before have left.


class Scaled(nn.Module):
    """Wraps a module, which moves one level down."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.module(x) * self.gain


class OwnLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return x @ self.weight.T + self.bias


def layer_appended(model, optimizer):
    model.blocks.append(Block())
    add(optimizer, model.blocks[-1].parameters(), lr=2e-2)


def layer_that_joins_the_optimizer_later(model, optimizer):
    model.blocks.append(Block())
    loss_of(model, 1).backward()
    found = gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    add(optimizer, model.blocks[-1].parameters())
    return found


def layer_that_is_in_the_optimizer_first(model, optimizer):
    block = Block()
    add(optimizer, block.parameters())
    losses = train(model, optimizer, first=1)
    model.blocks.insert(4, block)
    return losses


def layer_replaced(model, optimizer):
    old, model.blocks[3] = model.blocks[3], Block()
    add(optimizer, model.blocks[3].parameters())
    train(model, optimizer, first=1)
    found = [[type(p) is nn.Parameter for p in old.parameters()], values(old.parameters()), old(torch.ones(2, WIDTH))]
    with torch.no_grad():
        old.linear.weight.zero_()
    return found


def layers_dropped(model, optimizer):
    model.blocks = model.blocks[:9]
    del model.blocks[5:7]
    return [name for name, _ in model.named_parameters()]


def layer_taken_out_and_put_back(model, optimizer):
    last = model.blocks.pop(-1)

    def with_it(model, step=0):
        return loss_of(model, step) + last(torch.full((2, WIDTH), 0.1)).pow(2).mean()

    losses = train(model, optimizer, first=1) + train(model, optimizer, first=2, loss=with_it)  # in its group still
    with torch.no_grad():
        last.linear.bias.add_(0.5)
    found = [losses, values(last.parameters())]
    model.blocks.append(last)
    return found


def layers_become_nothing(model, optimizer):
    model.blocks[6].norm = nn.Identity()
    model.blocks[5].linear.bias = None
    norm = model.norm
    del model.norm
    with raises_in_both(AttributeError):
        loss_of(model)
    model.norm = norm


def other_order_and_shared(model, optimizer):
    model.blocks = nn.ModuleList(reversed(model.blocks))
    model.blocks[0], model.blocks[3] = model.blocks[3], model.blocks[0]
    model.blocks.append(model.blocks[1])
    return [[name for name, _ in model.named_parameters()], sorted(model.state_dict())]


def wrapped_and_unwrapped(model, optimizer):
    model.blocks[2] = Scaled(model.blocks[2])
    add(optimizer, [model.blocks[2].gain], weight_decay=0.0)
    found = [train(model, optimizer, 2, first=1), model.blocks[2].gain.detach().clone()]
    model.blocks[2] = model.blocks[2].module
    return found


def other_modules_with_the_same_parameters(model, optimizer):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module.bias is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, OwnLinear(module))


def parameter_replaced(model, optimizer):
    old, model.scale = model.scale, nn.Parameter(torch.full((WIDTH,), 1.5))
    loss_of(model, 1).backward()  # no optimizer has it yet
    found = [old.detach().clone(), type(old) is nn.Parameter, model.scale.grad.clone()]
    optimizer.step()
    optimizer.zero_grad()
    add(optimizer, [model.scale])
    return found


def parameter_and_buffer_exchanged(model, optimizer):
    scale, offset = model.scale, model.offset
    del model.scale, model.offset
    model.register_buffer("scale", scale.detach().clone())
    model.offset = nn.Parameter(offset)
    add(optimizer, [model.offset])
    return dict(model.named_buffers())


def untied_and_tied(model, optimizer):
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    add(optimizer, [model.head.weight])
    found = [train(model, optimizer, 2, first=1), torch.equal(model.head.weight, model.embedding.weight)]
    model.head.weight = model.embedding.weight
    model.blocks[3].norm.weight = model.blocks[4].norm.weight
    return found


def tensors_swapped(model, optimizer):
    new = nn.Parameter(torch.full((WIDTH,), 2.0))
    torch.utils.swap_tensors(model.norm.weight, new)
    return new


def state_taken_along(model, optimizer):
    """Rows of Adam's averages are copied by hand for a larger embedding, as code for new tokens does."""
    old = model.embedding.weight
    new = nn.Parameter(torch.cat([old.detach(), torch.zeros(8, WIDTH)]))
    model.embedding.weight = model.head.weight = new
    group = optimizer.param_groups[0]
    group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    state = optimizer.state.pop(old)
    optimizer.state[new] = {
        key: torch.cat([value, torch.zeros(8, WIDTH)]) if value.dim() else value for key, value in state.items()
    }


CHANGES = [
    *(layer_appended, layer_that_joins_the_optimizer_later, layer_that_is_in_the_optimizer_first, layer_replaced),
    *(layers_dropped, layer_taken_out_and_put_back, layers_become_nothing, other_order_and_shared),
    *(wrapped_and_unwrapped, untied_and_tied, parameter_replaced, tensors_swapped, state_taken_along),
    *(other_modules_with_the_same_parameters, parameter_and_buffer_exchanged),
]


@live(everywhere=True, settings=room(8192))
def test_changes_of_the_model(model, optimizer, note):
    for step, change in enumerate(CHANGES):
        torch.manual_seed(step)
        note(change.__name__, change(model, optimizer))
        note(change.__name__, [train(model, optimizer, first=step), len(list(model.parameters()))])


# Lazy modules, parametrisations, pruning


class LazyTower(Tower):
    def __init__(self):
        super().__init__()
        self.lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(WIDTH))

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        x = x + self.lazy(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize("dry_run", [False, True])
def test_lazy_modules(both, dry_run):
    def make():
        torch.manual_seed(0)
        return LazyTower()

    def make_optimizer(model):
        lazy = {id(parameter) for parameter in model.lazy.parameters()}
        return torch.optim.AdamW([p for p in model.parameters() if not dry_run or id(p) not in lazy], lr=1e-2)

    def pattern(model, optimizer, note):
        note("has no shape", nn.parameter.is_lazy(model.lazy[0].weight))
        if dry_run:
            with torch.no_grad():
                note("dry run", model(make_ids()))
            add(optimizer, model.lazy.parameters(), lr=3e-3)
        note("losses", train(model, optimizer, 2))
        note("has one", [nn.parameter.is_lazy(model.lazy[0].weight), type(model.lazy[0]).__name__])
        model.blocks.append(nn.LazyLinear(WIDTH))
        add(optimizer, model.blocks[-1].parameters())
        note("more", train(model, optimizer, 2, first=2))

    both(pattern, make=make, make_optimizer=make_optimizer)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


class Standardised(nn.Linear):
    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=1, keepdim=True)
        return nn.functional.linear(x, weight / (weight.std(dim=1, keepdim=True) + 1e-5), self.bias)


def make_parametrised():
    """Half of the layers have parametrisations from before the engine."""
    model = make_tower()
    layers = [block.linear for block in model.blocks]
    parametrizations.weight_norm(layers[3])
    parametrizations.spectral_norm(layers[2])
    nn.utils.spectral_norm(layers[5])
    prune.l1_unstructured(layers[7], "weight", amount=0.4)
    parametrize.register_parametrization(layers[1], "weight", Symmetric())
    return model


@live(make=make_parametrised, settings=room(6144))
def test_parametrisations(model, optimizer, note):
    note("losses", train(model, optimizer))
    note("values", [dict(model.state_dict()), dict(model.named_buffers())])
    layers = [block.linear for block in model.blocks]
    parametrize.register_parametrization(layers[0], "weight", Symmetric())  # the original is the same Parameter
    nn.utils.weight_norm(layers[4])
    parametrizations.orthogonal(layers[6])
    add(optimizer, [layers[4].weight_g, layers[4].weight_v])
    note("registered", train(model, optimizer, 2, first=1))
    note("values", [dict(model.state_dict()), [layer.weight for layer in layers]])
    with parametrize.cached():
        note("cached", [loss_of(model, 3), evaluated(model)])
    with torch.no_grad():
        layers[0].weight = torch.full((WIDTH, WIDTH), 0.1)
        layers[1].parametrizations.weight.original.mul_(0.5)
    layers[6].weight = torch.eye(WIDTH)
    prune.l1_unstructured(layers[7], "weight", amount=0.5)
    layers[7].weight_orig.data.mul_(0.5)
    note("written", train(model, optimizer, first=3))
    parametrize.remove_parametrizations(layers[0], "weight")
    parametrize.remove_parametrizations(layers[1], "weight", leave_parametrized=False)
    parametrize.remove_parametrizations(layers[3], "weight")
    nn.utils.remove_weight_norm(layers[4])
    prune.remove(layers[7], "weight")
    add(optimizer, [layers[3].weight, layers[4].weight])
    layers[1].__class__ = Standardised
    note("removed", [train(model, optimizer, 2, first=4), dict(model.named_parameters())])
    note("zeros", [int((layer.weight == 0).sum()) for layer in layers])


# Functions for every tensor of the model, and modules that compute with what their children hold


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, mask=None):
        return self.head(self.layers(self.embedding(ids), src_key_padding_mask=mask))


@pytest.mark.filterwarnings("ignore")
def test_encoder_layers_in_evaluation(both):
    """torch computes a layer at once in evaluation, from its children's parameters, unless hooks are in the way.

    With a padding mask that way rounds differently, and leaves zeros where nothing is asked for.
    """

    def make():
        torch.manual_seed(0)
        return Encoder()

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

    both(pattern, make=make, settings={"chunk_numel": 1280, "chunk_budget": 16384})
    assert torch.allclose(*rows, atol=1e-6)


# Adapters


def lora_config(cls=peft.LoraConfig, **kwargs):
    kwargs.setdefault("target_modules", r"blocks\.[0-3]\.linear")
    return cls(**{"r": 4, "init_lora_weights": False, **kwargs} if cls is peft.LoraConfig else kwargs)


def make_lora(**kwargs):
    def make():
        model = make_tower()
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora_config(**kwargs))

    return make


KINDS = {
    "dora": lambda: lora_config(use_dora=True, lora_dropout=0.3),
    "bias_all": lambda: lora_config(bias="all"),
    "pissa": lambda: lora_config(init_lora_weights="pissa"),  # reads the live weight and writes what is left of it
    "ia3": lambda: lora_config(peft.IA3Config, feedforward_modules=r"blocks\.\d\.linear"),
    "oft": lambda: lora_config(peft.OFTConfig, oft_block_size=4, use_cayley_neumann=False),
    "tokens": lambda: peft.TrainableTokensConfig(target_modules=["embedding"], token_indices=[1, 5, 7]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(both, kind):
    """Put on the live model, trained, merged for a forward, unmerged, trained again."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, KINDS[kind]())
        second = torch.optim.AdamW(trainable(wrapped), lr=1e-2)
        note("losses", [train(wrapped, second, 2), wrapped.get_nb_trainable_parameters(), states(second)])
        wrapped.eval()
        note("not merged", evaluated(wrapped))
        wrapped.merge_adapter()
        note("merged", evaluated(wrapped))
        wrapped.unmerge_adapter()
        wrapped.train()
        note("again", train(wrapped, second, 1, first=2))
        note("adapter", peft.get_peft_model_state_dict(wrapped))

    both(pattern, more=0, settings=room(8192))


@live(make=make_lora())
def test_the_life_of_an_adapter(model, optimizer, note, tmp_path):
    note("losses", train(model, optimizer, 2))
    model.merge_adapter()
    note("merged", [evaluated(model), model.base_model.model.blocks[0].linear.base_layer.weight])
    model.unmerge_adapter()
    with model.disable_adapter():
        note("without", evaluated(model))
    note("copied", copy.deepcopy(model).merge_and_unload().state_dict())
    saved = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
    note("losses", train(model, optimizer, first=2))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    peft.set_peft_model_state_dict(model, saved)
    note("set", evaluated(model))
    doubled = {key.replace(".weight", ".default.weight"): value * 2 for key, value in saved.items()}
    hotswap_adapter_from_state_dict(model, doubled, "default", lora_config())
    note("swapped", evaluated(model))
    model.load_adapter(tmp_path, "saved", is_trainable=True)
    model.set_adapter("saved")
    add(optimizer, trainable(model))
    note("loaded", train(model, optimizer, 2, first=3))
    model.set_adapter("default")
    model.delete_adapter("saved")
    note("losses", [train(model, optimizer, first=5), [name for name, _ in model.named_parameters()]])


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
        super().__init__()
        self.recomputed = recomputed
        self.experts = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for layer in [*self.experts, *self.blocks]:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize(("recomputed", "before"), [(False, True), (True, False)], ids=["before", "recomputed"])
def test_lora_on_parameters_of_experts(both, recomputed, before):
    config = lora_config(r=2, target_modules=[], target_parameters=["experts.0.up", "experts.0.down", "experts.2.up"])

    def make():
        torch.manual_seed(0)
        model = ExpertTower(recomputed)
        return peft.get_peft_model(model, config) if before else model

    def pattern(model, optimizer, note):
        if not before:
            train(model, optimizer)
            model = peft.get_peft_model(model, config)
            optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
        note("losses", train(model, optimizer, 2))
        note("names", [[name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]])
        model.merge_adapter()
        note("merged", evaluated(model))
        model.unmerge_adapter()
        note("losses", train(model, optimizer))
        note("without", model.merge_and_unload().state_dict())

    both(pattern, make=make, more=0, settings=room(12288))


# Models of transformers


def hf_loss(model, step=0):
    batch = make_batch("gpt2", 2, seed=step)
    ids = batch["input_ids"] % model.get_input_embeddings().weight.shape[0]
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("is_anew", [True, False])
def test_token_embeddings_resized(both, is_anew):
    """The weight is the same Parameter with data of another shape; the optimizer is made anew, or drops its state."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2, loss=hf_loss)
        weight = model.get_input_embeddings().weight
        model.resize_token_embeddings(90 if is_anew else 104, mean_resizing=is_anew)
        note("rows", [tuple(weight.shape), model.lm_head.weight is model.transformer.wte.weight, model.lm_head.weight])
        note("the same", weight is model.get_input_embeddings().weight)
        if is_anew:
            optimizer = make_adamw(model)
        else:
            del optimizer.state[weight]
        note("losses", train(model, optimizer, 2, first=2, loss=hf_loss))
        note("state", states(optimizer))

    settings = {"chunk_numel": "auto", **tight("gpt2", 1.3)}
    both(pattern, lambda: make_model("gpt2"), make_adamw, loss=hf_loss, more=0, settings=settings)
