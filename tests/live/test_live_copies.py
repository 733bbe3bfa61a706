"""Copies of a live model, in memory and in files: ordinary torch objects, and the original goes on training."""

import collections
import copy
import gc
import io
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from live.both import (
    WIDTH,
    Block,
    Tower,
    live,
    loss_of,
    make_adamw,
    make_ids,
    make_tower,
    train,
)
from models import make_batch, make_model
from torch import nn
from torch.nn.utils import prune
from trainers import tight

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


def _is_ours(thing):
    """Whether a value, a class or a function comes from the package."""
    thing = getattr(thing, "func", thing)
    thing = getattr(thing, "__self__", thing)
    return any(str(getattr(each, "__module__", "")).startswith("hf_patrickstar") for each in (thing, type(thing)))


def assert_ordinary(module, num_hooks=0):
    """No trace of an engine: torch's classes, hooks of the user only, memory of its own on the host."""
    found = 0
    for name, each in module.named_modules():
        assert not _is_ours(each), f"{name} is a {type(each)}"
        assert type(each._parameters) is dict, name
        assert type(each._buffers) is dict, name
        for key, value in vars(each).items():
            assert "patrickstar" not in key, f"{name}.{key}"
            assert not _is_ours(value), f"{name}.{key} is {value}"
        assert "forward" not in vars(each), name
        for kind in HOOKS:
            for hook in vars(each)[kind].values():
                assert not _is_ours(hook), f"{name}: {hook}"
                found += 1
    assert found == num_hooks, f"{found} hooks"
    for name, parameter in module.named_parameters():
        assert_ordinary_parameter(parameter, name)
    for name, buffer in module.named_buffers():
        assert type(buffer) is torch.Tensor, name
        assert buffer.device.type == "cpu", name


def assert_ordinary_parameter(parameter, name="", cls=nn.Parameter):
    assert type(parameter) is cls or type(parameter) is Marked, f"{name} is a {type(parameter)}"
    assert parameter.device.type == "cpu", name
    assert parameter.is_leaf, name
    assert parameter.grad is None, name
    assert not parameter._backward_hooks, name
    assert not parameter._post_accumulate_grad_hooks, name
    assert not any("patrickstar" in key or _is_ours(value) for key, value in vars(parameter).items()), name
    assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name
    assert bool(torch.isfinite(parameter).all()), name


def assert_no_trace(data):
    """The bytes can be read where the package is not installed."""
    assert b"patrickstar" not in data


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def through_pickle(thing, **settings):
    data = pickle.dumps(thing, **settings)
    assert_no_trace(data)
    return pickle.loads(data)


def through_save(thing, **settings):
    buffer = io.BytesIO()
    torch.save(thing, buffer, **settings)
    assert_no_trace(buffer.getvalue())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_dill(thing):
    dill = pytest.importorskip("dill")
    data = dill.dumps(thing, byref=True)
    assert_no_trace(data)
    return dill.loads(data)


def through_another_thread(thing):
    copies = []
    thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(thing)))
    thread.start()
    thread.join()
    return copies[0]


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "save": through_save,
    "dill": through_dill,
    "thread": through_another_thread,
    "no_grad": torch.no_grad()(copy.deepcopy),
    "old pickle": lambda thing: through_pickle(thing, protocol=2),
    "old file": lambda thing: through_save(thing, _use_new_zipfile_serialization=False),
    "copy of a copy": lambda thing: through_pickle(copy.deepcopy(copy.deepcopy(thing))),
}
FEW_WAYS = pytest.mark.parametrize("way", ["deepcopy", "save"])


# The model


class Marked(nn.Parameter):
    """A user's own class of parameters."""

    def doubled(self):
        return self.detach() * 2


def _scale_output(module, args, output):
    return output * 1.5


def _count_calls(module, args):
    module.calls += 1


class Equipped(Tower):
    """Shared blocks and weights, lists of them, hooks, attributes, frozen parts, a class of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.blocks[7] = self.blocks[3]
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = self.blocks[5].linear.weight
        self.same = self.scale
        self.extra = Block()
        self.order = [self.extra, *self.blocks[:2]]
        self.weights = [self.extra.linear.weight, self.scale]
        self.blocks[:2].requires_grad_(False)
        self.norm.bias = Marked(torch.full((WIDTH,), 0.5))
        self.norm.bias.requires_grad_(False)
        self.scale.no_weight_decay = True
        self.embedding.weight.tags = ["input", "output"]

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.order:
            x = block(x)
        penalty = sum(weight.pow(2).mean() for weight in self.weights)
        return super().forward(ids) + self.head(x) + penalty + self.first(self.same).sum()

    def equip(self):
        self.blocks[2].register_forward_hook(_scale_output)
        self.blocks[4].calls = 0
        self.blocks[4].register_forward_pre_hook(_count_calls)
        self.settings = {"name": "tower", "numbers": [1, 2]}
        self.blocks[1].mask = torch.arange(3)
        self.history = collections.deque([1.0])
        return self


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_copied_at_any_time(both, way, before):
    def make():
        torch.manual_seed(0)
        model = Equipped()
        return model.equip() if before else model

    def pattern(model, optimizer, note):
        copies = [WAYS[way](model)] if before else []
        if not before:
            model.equip()
        train(model, optimizer)
        model.eval()
        model.blocks[3].train()
        copies.append(WAYS[way](model))
        model.train()
        loss = loss_of(model, 1)
        copies.append(WAYS[way](model))
        loss.backward()
        copies.append(WAYS[way](model))
        optimizer.step()
        optimizer.zero_grad()
        for copied in copies:
            assert_ordinary(copied, num_hooks=2)
            note(
                "shared", [copied.blocks[7] is copied.blocks[3], copied.same is copied.scale, copied.same is model.same]
            )
            note("tied", [copied.first.weight is copied.blocks[5].linear.weight, len(list(copied.parameters()))])
            note("tied", [copied.head.weight is copied.embedding.weight, copied.order[1] is copied.blocks[0]])
            note("list", [copied.weights[0] is copied.extra.linear.weight, copied.weights[1] is copied.scale])
            note("flags", [[p.requires_grad for p in copied.parameters()], [m.training for m in copied.modules()]])
            note("attributes", [hasattr(copied.scale, "no_weight_decay"), hasattr(copied.head.weight, "tags")])
            note("class", type(copied.norm.bias).__name__)
            note("values", copied.state_dict())
            note("output", [copied(make_ids()).detach(), copied.blocks[4].calls, model.blocks[4].calls])
            copied.settings["numbers"].append(3)
            note("settings", [copied.settings, model.settings, list(copied.history), copied.blocks[1].mask])
        with torch.no_grad():
            for parameter in copies[-1].parameters():
                parameter.fill_(3.0)
        note("original", [model.state_dict(), model.norm.bias.doubled()])
        note("copy trained", [train(copies[0], make_adamw(copies[0])), copies[0].state_dict()])
        copies.clear()
        gc.collect()

    both(pattern, make=make)


@live
def test_copies_as_an_ensemble(model, optimizer, note):
    shallow, members = copy.copy(model), nn.ModuleList()
    note("the same modules", shallow.blocks is model.blocks)
    for step in range(2):
        train(model, optimizer, 1, first=step)
        members.append(copy.deepcopy(model))
    assert_ordinary(members)
    parameters, buffers = torch.func.stack_module_state([*members, model])
    base = copy.deepcopy(model)

    def output(parameters, buffers, ids):
        return torch.func.functional_call(base, (parameters, buffers), (ids,))

    note("stacked", torch.func.vmap(output, in_dims=(0, 0, None))(parameters, buffers, make_ids()).detach())
    note("shallow", [shallow(make_ids()).detach(), weights_of(shallow)])
    wrapper = through_save(nn.ModuleDict({"policy": model, "value": nn.Linear(WIDTH, 1)}))
    assert_ordinary(wrapper)
    note("wrapped", wrapper["policy"].state_dict())


@pytest.mark.filterwarnings("ignore")
@live
def test_copies_that_are_changed(model, optimizer, note):
    train(model, optimizer)
    for dtype in (torch.bfloat16, torch.float64):
        copied = copy.deepcopy(model).to(dtype)
        assert_ordinary(copied)
        note("copy", [copied.state_dict(), copied(make_ids()).detach()])
    copied = copy.deepcopy(model)
    copied.blocks = copied.blocks[::3]
    copied.head = nn.Linear(WIDTH, 7)
    copied.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
    nn.utils.parametrizations.weight_norm(copied.blocks[0].linear)
    prune.l1_unstructured(copied.blocks[1].linear, "weight", amount=0.5)
    copied(make_ids()).sum().backward()
    note("gradients", [parameter.grad is None for parameter in copied.parameters()])
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        note("quantised", [type(quantised.blocks[0].linear).__name__, quantised(make_ids())])
    note("original", [list(model.state_dict()), type(model.blocks[0].linear) is nn.Linear])


# Parts of the model


@FEW_WAYS
def test_parts_copied(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for part in (model.blocks[3], model.blocks[3].linear, model.norm, model.blocks):
            copied = WAYS[way](part)
            assert_ordinary(copied)
            note("part", [weights_of(copied), copied[0](x) if part is model.blocks else copied(x)])
        one = WAYS[way](model.blocks[5].linear.weight)
        several = WAYS[way](list(model.parameters()))
        named = WAYS[way](dict(model.named_parameters()))
        listed = WAYS[way](nn.ParameterList([model.scale, model.norm.bias]))
        for parameter in (one, *several, *named.values(), *listed):
            assert_ordinary_parameter(parameter)
        note("parameters", [one, several, named, list(listed)])
        with torch.no_grad():
            one.zero_()
            several[0].zero_()
        note("originals", [model.blocks[5].linear.weight, model.embedding.weight])
        loss_of(model).backward()
        gradients = WAYS[way]({name: parameter.grad for name, parameter in model.named_parameters()})
        note("has none", copy.deepcopy(model.scale).grad)
        optimizer.step()
        optimizer.zero_grad()
        note("gradients", gradients)

    both(pattern)


@live
def test_files_of_one_tensor_hold_no_more_than_that(model, optimizer, note):
    train(model, optimizer)
    loss_of(model).backward()
    for name in ("blocks.3.linear.bias", "embedding.weight"):
        parameter = model.get_parameter(name)
        for tensor in (parameter, parameter.grad, parameter.data, parameter.detach(), [parameter]):
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            nbytes = parameter.numel() * 4
            note(name, [len(buffer.getvalue()) < nbytes + 3000, len(pickle.dumps(tensor)) < nbytes + 1500])


# State dicts


@live(everywhere=True)
def test_state_dicts_copied_kept_and_loaded(model, optimizer, note, tmp_path):
    train(model, optimizer)
    best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    arrays = {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    assert_no_trace(path.read_bytes())
    note("losses", train(model, optimizer, 2, first=1))
    note("copied", [*best, arrays, best[0]._metadata == model.state_dict()._metadata])
    for settings in ({"mmap": True}, {}):
        state = torch.load(path, weights_only=True, **settings)
        note("tied", state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr())
        fresh = make_tower(seed=9)
        fresh.load_state_dict(state, assign=bool(settings))
        note("fresh", fresh.state_dict())
    note("size", path.stat().st_size < 1.25 * 4 * sum(p.numel() for p in model.parameters()) + 300 * len(state))
    assert_ordinary(fresh)
    with torch.no_grad():
        torch._foreach_copy_(list(fresh.parameters()), list(model.parameters()))
    note("fresh", [fresh.state_dict(), train(fresh, make_adamw(fresh), 1)])
    note("loaded", str(model.load_state_dict(best[0])))
    optimizer.load_state_dict(best[1])
    note("losses", train(model, optimizer, 2, first=4))


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_a_state_dict_sent_to_another_process(both, strategy):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            sent = ForkingPickler.dumps({name: value.clone() for name, value in model.blocks[0].state_dict().items()})
            note("received", pickle.loads(sent))
            note("whole", pickle.loads(ForkingPickler.dumps(copy.deepcopy(model.norm))).state_dict())
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
            resource_sharer.stop()

    both(pattern)


# Optimizers and whole setups


def make_groups(model):
    groups = [{"params": list(model.blocks.parameters()), "lr": 1e-2, "name": "blocks"}]
    groups.append({"params": [model.scale, model.embedding.weight], "weight_decay": 0.0, "name": "others"})
    return torch.optim.AdamW(groups, lr=1e-3)


class Learner:
    """What scripts keep everything in."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.target = copy.deepcopy(model).requires_grad_(False)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        self.parameters = list(model.parameters())
        self.best = None
        self.steps = 0

    def learn(self, steps):
        losses = train(self.model, self.optimizer, steps, first=self.steps)
        self.scheduler.step()
        self.steps += steps
        self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for target, parameter in zip(self.target.parameters(), self.parameters, strict=True):
                target.lerp_(parameter, 0.1)
        return losses, self.scheduler.get_last_lr()


@FEW_WAYS
def test_an_object_that_holds_everything_copied(both, way):
    def pattern(model, optimizer, note):
        learner = Learner(model, optimizer)
        learner.learn(2)
        copied = WAYS[way](learner)
        assert_ordinary(copied.model)
        assert_ordinary(copied.target)
        assert type(copied.optimizer) is torch.optim.AdamW
        note("parameters", [a is b for a, b in zip(copied.parameters, copied.model.parameters(), strict=True)])
        note("best", [copied.best, copied.scheduler.optimizer is copied.optimizer])
        note("names", [group["name"] for group in copied.optimizer.param_groups])
        note("copy", [copied.learn(2), weights_of(copied.target)])
        note("original", learner.learn(2))

    both(pattern, make_optimizer=make_groups)


@FEW_WAYS
def test_an_optimizer_copied_alone(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        copied, groups, state = (
            WAYS[way](each) for each in (optimizer, optimizer.param_groups, optimizer.state_dict())
        )
        assert type(copied) is torch.optim.AdamW
        parameters = [parameter for group in copied.param_groups for parameter in group["params"]]
        for parameter in (*parameters, *(parameter for group in groups for parameter in group["params"])):
            assert_ordinary_parameter(parameter)
        note("groups", [[group["lr"], group["weight_decay"], group["params"]] for group in groups])
        note("states", [state, [copied.state[parameter] for parameter in parameters]])
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        copied.step()
        note("after a step", parameters)
        other = copy.deepcopy(model)
        own = make_groups(other)
        own.load_state_dict(state)
        note("losses", train(other, own, 2, first=2))

    both(pattern, make_optimizer=make_groups)


# Traced and exported


@pytest.mark.filterwarnings("ignore")
@live
def test_captures_in_the_middle_of_training(model, optimizer, note):
    """``torch.jit``, ``torch.export`` and ``torch.fx`` get values; what they made does not follow the training."""
    for step in range(2):
        train(model, optimizer, first=step)
        model.eval()
        traced = torch.jit.trace(model, make_ids(step))
        note("traced", [traced(make_ids(step)).detach(), traced(make_ids(step + 5)).detach()])
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.freeze(traced), buffer)
        buffer.seek(0)
        note("saved", torch.jit.load(buffer)(make_ids(step)).detach())
        note("part", [p.detach() for p in torch.jit.trace(model.blocks[4], torch.ones(2, WIDTH)).parameters()])
        model.train()
    model.eval()
    exported = torch.export.export(model, (make_ids(),))
    note("exported", [exported.module()(make_ids()).detach(), dict(exported.state_dict.items())])
    model.train()
    symbolic = torch.fx.symbolic_trace(model)
    note("symbolic", [collections.Counter(node.op for node in symbolic.graph.nodes), symbolic(make_ids()).detach()])
    note("copied", copy.deepcopy(symbolic).state_dict())
    note("losses", train(symbolic, optimizer, 2, first=2))


# Hugging Face

HF = {"chunk_numel": "auto", **tight("gpt2")}


def gpt2_loss(model, step=0):
    return model(**make_batch("gpt2", seed=step)).loss


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{place}": place for place in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@live(make=lambda: make_model("gpt2"), loss=gpt2_loss, settings=HF)
def test_a_hugging_face_model_copied_saved_and_in_pipelines(model, optimizer, note, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, pipeline

    train(model, optimizer, 1, loss=gpt2_loss)
    for way in ("deepcopy", "save"):
        copied = WAYS[way](model)
        assert_ordinary(copied)
        note("copy", [copied.lm_head.weight is copied.transformer.wte.weight, copied.state_dict()])
        note("config", copied.config.to_dict() == model.config.to_dict())
        note("generated", copied.eval().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False))
    model.save_pretrained(tmp_path)
    note("loaded", AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    fresh = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    note("from the state dict", fresh.state_dict())
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    note("text", generate("w3 w4 w5", max_new_tokens=4, do_sample=False, return_full_text=False))
    features = pipeline("feature-extraction", model=model.transformer, tokenizer=tokenizer)
    note("features", torch.tensor(features("w3 w4 w5")))
    model.train()


def test_a_trainer_copied_and_pickled(both, tmp_path):
    """A copy of the stock Trainer trains nothing: its scheduler has put a ``step`` of the original on its optimizer.

    So the copy of ours is compared with the stock Trainer itself. Accelerate keeps weak references, which cannot be
    pickled: they, and the optimizer that it wrapped, go before the Trainer is pickled.
    """
    from trainers import assert_same_weights, logged, make_trainer, run
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Copies(TrainerCallback):
        def __init__(self):
            self.copies = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.copies.append(copy.deepcopy(model))

    stock = make_trainer(Trainer, TrainingArguments, tmp_path / "stock")
    config = {"patrickstar_config": {key: value for key, value in HF.items() if key != "chunk_numel"}}
    ours = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path / "ours", **config)
    made = []
    for trainer in (stock, ours):
        callback = Copies()
        trainer.add_callback(callback)
        run(trainer)
        trainer.remove_callback(callback)
        made.append(callback.copies)
    for left, right in zip(*made, strict=True):
        assert_ordinary(right)
        assert_same_weights(left, right)
    copied, (pickled, our_pickled) = copy.deepcopy(ours), map(_pickled, (stock, ours))
    assert copied.model_wrapped is copied.model
    for plain, each in ((stock, ours), (stock, copied), (pickled, our_pickled)):
        if each is not ours:
            assert_ordinary(each.model)
        assert each.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for trainer in (stock, ours, copied, pickled, our_pickled):
        run(trainer)
    for plain, each in ((stock, ours), (stock, copied), (pickled, our_pickled)):
        assert logged(each, "loss") == logged(plain, "loss")
        assert_same_weights(plain.model, each.model)


def _pickled(trainer):
    accelerator, handler = trainer.accelerator, trainer.callback_handler
    accelerator.gradient_state.dataloader_references = [None]
    kept = trainer.optimizer, trainer.lr_scheduler
    lists = accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders
    trainer.optimizer = trainer.lr_scheduler = None
    handler.optimizer = handler.lr_scheduler = handler.train_dataloader = None
    accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = [], [], []
    made = pickle.loads(pickle.dumps(trainer))
    accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = lists
    trainer.optimizer, trainer.lr_scheduler = kept
    return made
