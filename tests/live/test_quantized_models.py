"""What users do with a quantized model beside training: as with a plain one, bit for bit, between steps and after."""

import copy
import io
import json
import re
import threading

import pytest
import safetensors.torch
import torch
from support import inside
from support.models import make_batch
from support.quantized import load, packed, saved, with_adapter, without_packing
from support.same import assert_same
from support.trainers import smallest_budget
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import LiveMixin

pytest.importorskip("bitsandbytes")


def make(kind, num_layers=2, **kwargs):
    return without_packing(with_adapter(load(kind, saved(num_layers).name, **kwargs))).train()


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, steps=2, seed=1):
    losses = []
    for step in range(steps):
        loss = model(**make_batch("llama", seed=seed + step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Pair:
    """A plain model, and one of the same weights in chunks; both have been trained."""

    def __init__(self, kind, factor=1.0, **kwargs):
        self.plain, self.ours = make(kind, **kwargs), make(kind, **kwargs)
        self.plain_optimizer = optimizer_of(self.plain)
        settings = {"chunk_budget": int(factor * smallest_budget(self.ours))}
        self.engine = PatrickStarEngine(self.ours, settings, optimizer_of(self.ours))
        self.check_training()

    def check_training(self, seed=1):
        expected = train(self.plain, self.plain_optimizer, seed=seed)
        assert train(self.ours, self.engine.optimizer, seed=seed) == expected
        assert self.engine.stats()["diverged_steps"] == 0

    def check_state(self):
        assert_same(self.plain.state_dict(), self.ours.state_dict())


@pytest.fixture(params=["nf4", "fp4, double", "int8"])
def pair(request):
    return Pair(request.param)


def same_files(left, right):
    """Whether two directories have the same tensors and the same configurations; returns the names of their files."""
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    for name in names:
        if name.endswith(".safetensors"):
            found = (safetensors.torch.load_file(where / name) for where in (left, right))
            assert_same(*(dict(sorted(tensors.items())) for tensors in found))
        elif name.endswith(".json"):
            assert json.loads((left / name).read_text()) == json.loads((right / name).read_text())
    return names


def test_state_dictionaries(pair):
    pair.check_state()
    kept = [model.state_dict(keep_vars=True) for model in (pair.plain, pair.ours)]
    assert_same(*({name: value.detach().clone() for name, value in found.items()} for found in kept))
    assert pair.ours.num_parameters() == pair.plain.num_parameters()
    assert list(dict(pair.ours.named_parameters())) == list(dict(pair.plain.named_parameters()))


def test_evaluation_and_generation_between_steps(pair):
    batch = make_batch("llama", seed=9)
    prompt = {key: value[:1, :4] for key, value in batch.items() if key != "labels"}
    found = []
    for model in (pair.plain, pair.ours):
        model.eval()
        with torch.no_grad():
            found.append(model(**batch).logits)
        found.append(model.generate(**prompt, max_new_tokens=6, do_sample=False))
        model.train()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    pair.check_training(seed=11)
    pair.check_state()


def test_an_evaluation_does_not_pack_weights_that_are_trained():
    """bitsandbytes does so on CPUs with AVX512-BF16, and the next step has no gradients of what comes before."""
    ours = with_adapter(load("nf4", saved(2).name)).train()
    layers = [module for module in ours.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    engine = PatrickStarEngine(ours, None, optimizer_of(ours))
    ours.eval()
    with torch.no_grad():
        ours(**make_batch("llama"))
    assert not any(hasattr(layer.weight.quant_state, "packing_format_for_cpu") for layer in layers)
    engine.detach()
    assert all(layer.support_avx512bf16_for_cpu is True for layer in layers)


def test_copies_are_ordinary_models(pair):
    buffer = io.BytesIO()
    torch.save(pair.ours, buffer)
    buffer.seek(0)
    copies = copy.deepcopy(pair.ours), torch.load(buffer, weights_only=False)
    batch = make_batch("llama", seed=9)
    expected = pair.plain(**batch).loss
    for copied in copies:
        assert not any(isinstance(parameter, LiveMixin) for parameter in copied.parameters())
        assert_same(pair.plain.state_dict(), copied.state_dict())
        assert torch.equal(copied(**batch).loss, expected)
    assert [type(p) for p in copies[0].parameters()] == [type(p) for p in pair.plain.parameters()]
    pair.check_training(seed=11)


def test_files(pair, tmp_path):
    for name, model in (("plain", pair.plain), ("ours", pair.ours)):
        model.save_pretrained(tmp_path / name / "adapter")
        model.get_base_model().save_pretrained(tmp_path / name / "base")
    assert "adapter_model.safetensors" in same_files(tmp_path / "plain/adapter", tmp_path / "ours/adapter")
    assert "model.safetensors" in same_files(tmp_path / "plain/base", tmp_path / "ours/base")
    pair.check_training(seed=11)


def test_merging_and_unmerging_between_steps(pair):
    for model in (pair.plain, pair.ours):
        model.merge_adapter()
    pair.check_state()
    for model in (pair.plain, pair.ours):
        model.unmerge_adapter()
    pair.check_state()
    pair.check_training(seed=11)


@pytest.mark.parametrize("kind", ["nf4, double", "int8"])
def test_dequantizing(kind):
    pair = Pair(kind, factor=4)
    for model in (pair.plain, pair.ours):
        model.get_base_model().dequantize(dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
    pair.check_training(seed=11)
    pair.check_state()
    assert not packed(pair.ours)


def test_detaching_gives_the_same_model_back(pair):
    model = make("nf4")  # not yet prepared
    modules = [module for module in model.modules() if hasattr(module, "quant_state")]
    before = [(m.weight, m.quant_state, m.quant_state.absmax, type(m.weight), vars(m).keys()) for m in modules]
    PatrickStarEngine(model, None, optimizer_of(model)).detach()
    for module, (weight, state, absmax, cls, names) in zip(modules, before, strict=True):
        assert module.weight is weight
        assert module.quant_state is weight.quant_state is state
        assert state.absmax is absmax
        assert (type(weight), type(absmax)) == (cls, torch.Tensor)
        assert "_live" not in vars(absmax)
        assert vars(module).keys() == names
    pair.engine.detach()
    pair.check_state()
    expected = train(pair.plain, pair.plain_optimizer, seed=11)
    assert train(pair.ours, pair.engine.optimizer.inner, seed=11) == expected
    pair.check_state()


def frozen_bytes(engine):
    """Bytes of chunks of packed weights and their scales, and those that no element has."""
    weights = [
        tensor for tensor in inside.tensors(engine) if re.search(r"base_layer\.weight(\.absmax)?$", tensor.spec.name)
    ]
    chunks = {id(tensor.chunk): tensor.chunk for tensor in weights}.values()
    others = [t for chunk in chunks for t in chunk.tensors if t not in weights]
    padding = sum(c.param_nbytes - sum(t.spec.nbytes for t in c.tensors) for c in chunks)
    return sum(c.param_nbytes for c in chunks) - padding - sum(t.spec.nbytes for t in others), padding


@pytest.mark.parametrize(("kind", "nbytes"), [("nf4", 0.5 + 4 / 64), ("fp4, double", 0.5 + 1 / 64), ("int8", 1)])
def test_bytes(kind, nbytes):
    """Of a base parameter, where it is at home; padding is a few bytes for each tensor, and the end of a chunk."""
    ours = make(kind)
    numel = sum(
        module.in_features * module.out_features for name, module in ours.named_modules() if name.endswith("_layer")
    )
    engine = PatrickStarEngine(ours, {"chunk_budget": smallest_budget(ours)}, optimizer_of(ours))
    found, padding = frozen_bytes(engine)
    assert found == nbytes * numel
    assert padding <= 0.02 * found
    assert engine.ledger.owners(Tier.HOST)["param"] == sum(chunk.param_nbytes for chunk in inside.chunks(engine))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
def test_bytes_are_stored_in_any_type(storage):
    """``bnb_4bit_quant_storage`` says in which; values of these mean nothing, and are not converted."""
    ours, plain = (make("nf4", bnb_4bit_quant_storage=storage) for _ in range(2))
    engine = PatrickStarEngine(
        ours, {"chunk_budget": smallest_budget(ours, "bf16")}, optimizer_of(ours), precision="bf16"
    )
    plain.forward = torch.autocast("cpu", torch.bfloat16)(plain.forward)
    assert train(ours, engine.optimizer) == train(plain, optimizer_of(plain))
    assert engine.stats()["chunk_evictions"] > 0
    assert_same(plain.state_dict(), ours.state_dict())


@pytest.mark.parametrize(
    ("kind", "dtype", "precision"),
    [("nf4", torch.float32, "no"), ("int8", torch.bfloat16, "no"), ("nf4", torch.float32, "bf16")],
)
def test_biases_of_packed_layers(kind, dtype, precision):
    """The library casts them to the type that it computes in, where they are."""
    plain, ours = (
        without_packing(with_adapter(load(kind, saved(2, Qwen2Config).name, dtype))).train() for _ in range(2)
    )
    assert any(name.endswith("q_proj.base_layer.bias") for name, _ in ours.named_parameters())
    for model in (plain, ours):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    settings = {"chunk_budget": smallest_budget(ours, precision)}
    engine = PatrickStarEngine(ours, settings, optimizer_of(ours), precision=precision)
    assert engine.dtype is (torch.bfloat16 if precision == "bf16" else dtype), "packed weights do not count"
    losses = train(ours, engine.optimizer)
    plain.forward = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")(plain.forward)
    assert losses == train(plain, optimizer_of(plain))
    del plain.forward
    assert_same(plain.state_dict(), ours.state_dict())
    assert engine.stats()["diverged_steps"] == engine.stats()["recorded_steps"] == 0


def test_a_packed_weight_that_an_evaluation_has_packed_again_is_refused():
    model = with_adapter(load("nf4", saved(2).name))
    layer = next(module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu"))
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match="an evaluation has packed it"):
        PatrickStarEngine(model, None, optimizer_of(model))
    assert not isinstance(layer.weight, LiveMixin)


def test_a_merged_model_is_saved_and_loaded(pair, tmp_path):
    for name, model in (("plain", pair.plain), ("ours", pair.ours)):
        model.merge_and_unload().save_pretrained(tmp_path / name)
    assert "model.safetensors" in same_files(tmp_path / "plain", tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", device_map={"": "cpu"})
    expected = pair.plain.get_base_model().state_dict()
    assert_same({name: expected[name] for name in again.state_dict()}, dict(again.state_dict()))


def test_training_beside_another_thread():
    """Parameters have guards then; the graph must keep no weight on the device all the same."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        Pair("nf4")
    finally:
        end.set()
        thread.join()
