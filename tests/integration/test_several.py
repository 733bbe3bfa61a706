"""Several models and optimizers, in any order, in one call or in several: bit for bit against plain Accelerate."""

import copy
import itertools

import pytest
import torch
from accelerate import Accelerator
from live.both import TIGHT, WIDTH, assert_same_model, loss_of, make_tower
from live.hf import CONFIGS, Accelerated, states
from models import make_model
from torch import nn
from torch.optim import lr_scheduler

from hf_patrickstar import BudgetError, CheckpointError, EngineError, PatrickStarAccelerator, PatrickStarEngine
from hf_patrickstar.integrations.accelerator_checkpoints import get_engine
from hf_patrickstar.memory.tiers import Tier


@pytest.fixture(params=list(CONFIGS))
def accelerated(request):
    """Runs a script with stock Accelerate, and with ours at a small budget and when all fits."""
    return Accelerated(CONFIGS[request.param])


def perceptron(sizes, seed):
    torch.manual_seed(seed)
    layers = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_encoder():
    return perceptron([2] + [WIDTH] * 8 + [4], 1)


def make_decoder():
    return perceptron([4] + [WIDTH] * 8 + [2], 2)


def make_judge():
    return perceptron([4] + [WIDTH] * 8 + [1], 3)


def adam(*models, lr=1e-2):
    return torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=lr, betas=(0.5, 0.9))


def batch(step, size=4):
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(step))


def note_all(note, *parts):
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            note("optimizer", states(part))
        else:
            note("model", part.state_dict())


def steps(accelerator, models, optimizers, note, first=0, count=3, max_norm=None):
    """One loss through all models, every optimizer's step."""
    for step in range(first, first + count):
        x = batch(step)
        for model in models[:2]:
            x = model(x)
        loss = (x - batch(step)).square().mean()
        for model in models[2:]:
            loss = loss + model(models[0](batch(step))).square().mean()
        accelerator.backward(loss)
        if max_norm is not None:
            everything = itertools.chain(*(model.parameters() for model in models))
            note("norm", accelerator.clip_grad_norm_(everything, max_norm))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        note("loss", loss.detach())


ORDERS = list(itertools.islice(itertools.permutations(range(6)), 0, None, 97))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_one_call_in_any_order(accelerated, order):
    """One optimizer over two models, two over the third."""

    def script(make, note):
        accelerator = make()
        models = [make_encoder(), make_decoder(), make_judge()]
        optimizers = [
            adam(*models[:2]),
            torch.optim.SGD(models[2][:6].parameters(), lr=0.05, momentum=0.9),
            adam(models[2][6:]),
        ]
        things = [*models, *optimizers]
        prepared = accelerator.prepare(*(things[place] for place in order))
        parts = [prepared[order.index(place)] for place in range(6)]
        steps(accelerator, parts[:3], parts[3:], note, max_norm=0.1)
        note_all(note, *parts)
        if isinstance(accelerator, PatrickStarAccelerator):
            encoder, decoder, judge = map(get_engine, parts[:3])
            assert encoder is decoder is not judge
            assert [len(engine.optimizers) for engine in (encoder, judge)] == [1, 2]

    accelerated(script)


def test_the_models_of_an_optimizer_in_two_calls(accelerated):
    """What was returned for the optimizer, and the schedulers made on it, go on when its second model comes."""

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        inner = adam(encoder, decoder)
        early = lr_scheduler.ExponentialLR(inner, 0.9)
        encoder, optimizer, early = accelerator.prepare(encoder, inner, early)
        late = lr_scheduler.StepLR(optimizer, 1, 0.5)
        for count in range(2):
            steps(accelerator, [encoder, decoder], [optimizer], note, 2 * count, 2)
            early.step()
            late.step()
            note("rates", [early.get_last_lr(), late.get_last_lr()])
            decoder = accelerator.prepare(decoder)
        note_all(note, encoder, decoder, optimizer)
        if isinstance(accelerator, PatrickStarAccelerator):
            assert get_engine(encoder) is get_engine(decoder)
            assert optimizer.optimizer is get_engine(encoder).optimizer

    accelerated(script)


def test_an_optimizer_that_has_trained_before_its_model_is_prepared(accelerated):
    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        optimizer, other = accelerator.prepare(adam(encoder), adam(decoder))
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        steps(accelerator, [encoder, decoder], [optimizer, other], note)
        decoder, encoder = accelerator.prepare(decoder, encoder)
        for step in range(3):
            steps(accelerator, [encoder, decoder], [optimizer, other], note, 3 + step, 1)
            scheduler.step()
        note("rate", optimizer.param_groups[0]["lr"])
        note_all(note, encoder, decoder, optimizer, other)
        if isinstance(accelerator, PatrickStarAccelerator):
            assert optimizer.optimizer is get_engine(encoder).optimizer

    accelerated(script)


@pytest.mark.parametrize("when", ["together", "later"])
@pytest.mark.parametrize("kinds", ["adam_adam", "adam_sgd", "sgd_adam"])
def test_two_optimizers_that_hold_some_of_the_same(accelerated, when, kinds):
    """In torch both update it from the same gradient, one after the other."""

    def make_one(kind, parameters):
        return torch.optim.Adam(parameters, 1e-2) if kind == "adam" else torch.optim.SGD(parameters, 0.05, momentum=0.9)

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        one, other = kinds.split("_")
        first, second = make_one(one, encoder[:10].parameters()), make_one(other, encoder[6:].parameters())
        third = adam(decoder)
        encoder, decoder, first, third = accelerator.prepare(encoder, decoder, first, third)
        if when == "later":
            steps(accelerator, [encoder, decoder], [first, third], note)
        second = accelerator.prepare(second)
        steps(accelerator, [encoder, decoder], [first, second, third], note, 3, max_norm=0.1)
        steps(accelerator, [encoder, decoder], [second, first, third], note, 6)
        note_all(note, encoder, decoder, first, second, third)

    accelerated(script)


def test_a_second_optimizer_takes_over(accelerated):
    """Both are kept, since both may be used."""

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        encoder, decoder, first = accelerator.prepare(encoder, decoder, adam(encoder, decoder))
        steps(accelerator, [encoder, decoder], [first], note)
        second = accelerator.prepare(torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.05))
        steps(accelerator, [encoder, decoder], [second], note, 3)
        steps(accelerator, [encoder, decoder], [first], note, 6)
        note_all(note, encoder, decoder, first, second)

    accelerated(script)


def test_optimizers_come_while_gradients_wait(accelerated):
    """A model that is prepared alone, a plain optimizer, then a prepared one of a part, and one of another part."""

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        encoder, decoder, third = accelerator.prepare(encoder, decoder, adam(decoder))
        plain = torch.optim.SGD(encoder.parameters(), lr=0.05)
        steps(accelerator, [encoder, decoder], [plain, third], note)
        accelerator.backward(decoder(encoder(batch(20))).square().mean())
        first = accelerator.prepare(adam(encoder[:8]))
        first.step()
        third.step()
        note("gradients", [parameter.grad for parameter in encoder.parameters()])
        second = accelerator.prepare(torch.optim.RMSprop(encoder[8:].parameters(), lr=1e-3))
        second.step()
        for optimizer in (first, second, third):
            optimizer.zero_grad()
        steps(accelerator, [encoder, decoder], [first, second, third], note, 3, max_norm=0.1)
        note_all(note, encoder, decoder, first, second, third)
        if isinstance(accelerator, PatrickStarAccelerator):
            assert len(get_engine(encoder).optimizers) == 2

    accelerated(script)


def test_clipping_over_several_engines_and_what_is_not_prepared(accelerated):
    def script(make, note):
        accelerator = make()
        encoder, decoder, judge = make_encoder(), make_decoder(), make_judge()
        encoder, decoder, first, second = accelerator.prepare(encoder, decoder, adam(encoder), adam(decoder))
        third = adam(judge)
        for step in range(3):
            x = encoder(batch(step))
            accelerator.backward(decoder(x).square().mean() + judge(x).square().mean())
            note("values", accelerator.clip_grad_value_([*decoder.parameters(), *judge.parameters()], 0.01))
            models = (encoder, decoder, judge)
            parameters = itertools.chain(*(model.parameters() for model in models))
            note("norm", accelerator.clip_grad_norm_(parameters, 0.05))
            note("of one", [accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type=1) for model in models])
            note("of a frozen one", accelerator.clip_grad_norm_(make_judge().requires_grad_(False).parameters(), 1.0))
            for optimizer in (first, second, third):
                optimizer.step()
                optimizer.zero_grad()
        note_all(note, encoder, decoder, judge, first, second)

    accelerated(script)


def test_each_of_two_models_of_one_engine_is_a_model_of_its_own(accelerated):
    """Zeroed, copied, frozen and evaluated by itself."""

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        encoder, decoder, optimizer = accelerator.prepare(encoder, decoder, adam(encoder, decoder))
        steps(accelerator, [encoder, decoder], [optimizer], note, count=1)
        accelerator.backward(decoder(encoder(batch(1))).square().mean())
        encoder.zero_grad()
        note("zeroed", [p.grad for p in encoder.parameters()])
        note("kept", [p.grad for p in decoder.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        encoder.requires_grad_(False)
        twin = copy.deepcopy(decoder)
        steps(accelerator, [encoder, decoder], [optimizer], note, 2)
        encoder.requires_grad_(True)
        with torch.no_grad():
            note("evaluated", [encoder.eval()(batch(9)), twin(encoder(batch(9)))])
        assert not hasattr(twin, "patrickstar_engine")
        steps(accelerator, [encoder, decoder], [optimizer], note, 5)
        note_all(note, encoder, decoder, twin, optimizer)

    accelerated(script)


def test_models_of_one_engine_are_given_back():
    encoder, decoder = make_encoder(), make_decoder()
    twins = copy.deepcopy([encoder, decoder])
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
    encoder, decoder, _ = accelerator.prepare(encoder, decoder, adam(encoder, decoder))
    with pytest.raises(EngineError, match="attached to this model already"):
        PatrickStarEngine(decoder, TIGHT, adam(decoder))
    get_engine(encoder).detach()
    for model, twin in zip((encoder, decoder), twins, strict=True):
        assert vars(model).keys() - {"_is_accelerate_prepared"} == vars(twin).keys()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        assert_same_model(twin, model)


def test_sixteen_bit_models_of_one_engine(tmp_path):
    """Each computes under autocast, configurations are saved with the type of the files, masters have all bits."""
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="bf16")
    encoder, model = make_encoder(), make_model("gpt2")
    first = model.state_dict()["transformer.wte.weight"].clone()
    encoder, model, optimizer = accelerator.prepare(encoder, model, adam(encoder, model))
    ids = torch.arange(8).reshape(1, 8)
    output = encoder(batch(0))
    assert torch.equal(output, output.bfloat16()), "computed in 16 bits"
    assert output.dtype is torch.float32
    accelerator.backward(output.square().mean() + model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    assert model.state_dict()["transformer.wte.weight"].dtype is torch.float32
    assert not torch.equal(model.state_dict()["transformer.wte.weight"], first)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_same_model(again, model)


# Saved and loaded


def prepare_four(accelerator, seed=0):
    torch.manual_seed(seed)
    models = [make_encoder(), make_decoder(), make_judge(), make_tower(seed)]
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.add_(seed)
    optimizers = [adam(*models[:2]), torch.optim.SGD(models[2].parameters(), lr=0.05, momentum=0.9)]
    return accelerator.prepare(*models, *optimizers)


@pytest.mark.parametrize("is_safe", [True, False], ids=["safetensors", "bin"])
def test_all_is_saved_and_loaded(accelerated, tmp_path, is_safe):
    """Two models of one engine, one of its own, one without an optimizer."""

    def script(make, note):
        accelerator = make()
        parts = prepare_four(accelerator)
        steps(accelerator, parts[:3], parts[4:], note)
        accelerator.save_state(str(tmp_path / "state"), safe_serialization=is_safe)
        note_all(note, *parts)
        steps(accelerator, parts[:3], parts[4:], note, 3)
        with torch.no_grad():
            parts[3].scale.fill_(2.0)
        others = prepare_four(other := make(), seed=1)
        for loaded_by, loaded in ((accelerator, parts), (other, others)):
            loaded_by.load_state(str(tmp_path / "state"))
            note_all(note, *loaded)
            steps(loaded_by, loaded[:3], loaded[4:], note, 3)
            note_all(note, *loaded)

    accelerated(script)


def test_states_outside_of_chunks_are_saved_and_loaded(accelerated, tmp_path):
    """Of a parameter of no model, and of those that another optimizer has in its chunks."""

    def prepare(accelerator):
        encoder, decoder = make_encoder(), make_decoder()
        scale = nn.Parameter(torch.ones(()))
        first = torch.optim.Adam([*encoder[:10].parameters(), scale], 1e-2)
        second = torch.optim.SGD(encoder[6:].parameters(), 0.05, momentum=0.9)
        return [*accelerator.prepare(encoder, decoder, first, second, adam(decoder)), scale]

    def train(accelerator, parts, note, first, count):
        encoder, decoder, *optimizers, scale = parts
        for step in range(first, first + count):
            loss = (decoder(encoder(batch(step)) * scale) - batch(step)).square().mean()
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            note("loss", loss.detach())

    def script(make, note):
        accelerator = make()
        parts = prepare(accelerator)
        train(accelerator, parts, note, 0, 3)
        accelerator.save_state(str(tmp_path / "state"))
        kept = parts[-1].detach().clone()
        train(accelerator, parts, note, 3, 2)
        for loaded_by in (accelerator, make()):
            loaded = parts if loaded_by is accelerator else prepare(loaded_by)
            loaded_by.load_state(str(tmp_path / "state"))
            loaded[-1].data.copy_(kept)  # no model has it, so it is not saved
            note_all(note, *loaded[:-1])
            train(loaded_by, loaded, note, 3, 3)
            note_all(note, *loaded[:-1])

    accelerated(script)


def test_stock_accelerate_reads_models_and_ours_all(tmp_path):
    stock = Accelerator(cpu=True)
    parts = prepare_four(stock)
    steps(stock, parts[:3], parts[4:], lambda name, value: None)
    stock.save_state(str(tmp_path / "stock"))
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
    ours = prepare_four(accelerator, seed=1)
    accelerator.load_state(str(tmp_path / "stock"))
    for left, right in zip(parts[:4], ours[:4], strict=True):
        assert_same_model(left, right)
    for left, right in zip(parts[4:], ours[4:], strict=True):
        for number, state in states(left).items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(states(right)[number][key]))


def test_a_checkpoint_of_fewer_optimizers_changes_nothing(tmp_path):
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
    encoder, decoder = make_encoder(), make_decoder()
    parts = accelerator.prepare(encoder, decoder, adam(encoder))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.prepare(adam(decoder))
    with torch.no_grad():
        encoder[0].weight.fill_(7.0)
    before = copy.deepcopy([part.state_dict() for part in parts])
    with pytest.raises(CheckpointError, match="has no training state: the checkpoint was saved with other models"):
        accelerator.load_state(str(tmp_path / "state"))
    for part, state in zip(parts[:2], before, strict=False):
        assert all(torch.equal(value, state[key]) for key, value in part.state_dict().items())


def test_what_was_added_since_the_last_step_is_in_the_checkpoint(tmp_path):
    def make(seed):
        model = make_tower(seed)
        accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
        model, optimizer = accelerator.prepare(model, adam(model))
        accelerator.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
        model.extra = nn.Linear(WIDTH, WIDTH)
        optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.1})
        return accelerator, model, optimizer

    accelerator, model, _ = make(0)
    accelerator.save_state(str(tmp_path / "state"))
    other, twin, optimizer = make(1)
    other.load_state(str(tmp_path / "state"))
    assert_same_model(model, twin)
    assert get_engine(twin).manager.find(twin.extra.weight) is not None
    assert len(optimizer.param_groups) == 2


# Optimizers of one engine, without Accelerate


def two_optimizers(model):
    body = [p for block in model.blocks for p in block.parameters()]
    rest = [p for p in model.parameters() if all(p is not other for other in body)]
    return torch.optim.SGD(body, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)


@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_one_scaler_for_two_optimizers(config, overflows, is_unscaled):
    """Each is unscaled by itself, and one whose gradients overflowed does not keep the other from its step."""
    results = []
    for is_ours in (False, True):
        model = make_tower()
        optimizers = two_optimizers(model)
        if is_ours:
            optimizers = PatrickStarEngine(model, config, optimizers).optimizers
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        notes = []
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            if overflows and step == 1:
                model.blocks[0].linear.weight.grad[0, 0] = float("inf")
            for optimizer in optimizers if is_unscaled else ():
                scaler.unscale_(optimizer)
            if is_unscaled:
                notes.append(torch.nn.utils.clip_grad_norm_(model.blocks[1:].parameters(), 0.05))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            notes.append(torch.tensor(scaler.get_scale()))
        results.append((notes, model, optimizers))
    (notes, plain, _), (our_notes, ours, _) = results
    assert all(torch.equal(left, right) for left, right in zip(notes, our_notes, strict=True))
    assert_same_model(plain, ours)


@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
@pytest.mark.parametrize("zeroes_between", [False, True])
def test_clipping_counts_for_both_optimizers(config, zeroes_between):
    models = []
    for is_ours in (False, True):
        model = make_tower()
        optimizers = two_optimizers(model)
        if is_ours:
            optimizers = PatrickStarEngine(model, config, optimizers).optimizers
        for step in range(3):
            loss_of(model, step).backward()
            if is_ours:
                optimizers[0].clip_grad_norm_(model.parameters(), 0.01)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for optimizer in optimizers:
                optimizer.step()
                if zeroes_between:
                    optimizer.zero_grad()
            model.zero_grad()
        models.append(model)
    assert_same_model(*models)


def test_steps_of_two_optimizers_are_recorded_once_and_do_not_diverge():
    model = make_tower()
    engine = PatrickStarEngine(model, CONFIGS["tight"], two_optimizers(model))
    recorded = []
    for step in range(8):
        loss_of(model, step).backward()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recorded.append(engine.stats()["recorded_steps"])
    assert engine.stats()["diverged_steps"] == 0
    assert recorded[3] == recorded[-1]


@pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
def test_an_optimizer_is_added_to_an_engine(config):
    """With the state that it has, to an engine that has none and to one that has one."""
    results = []
    for is_ours in (False, True):
        model = make_tower()
        optimizers = list(two_optimizers(model))
        engine = PatrickStarEngine(model, config) if is_ours else None
        losses = []
        for step in range(6):
            if engine is not None and step in (2, 4):
                optimizers[step // 2 - 1] = engine.add_optimizer(optimizers[step // 2 - 1])
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, model, optimizers))
        if engine is not None:
            assert engine.optimizers == optimizers
            assert engine.training_state is not None
            assert not any(optimizer.inner.state for optimizer in optimizers[1:])
    (losses, plain, _), (our_losses, ours, _) = results
    assert torch.equal(torch.stack(losses), torch.stack(our_losses))
    assert_same_model(plain, ours)


def test_an_optimizer_that_does_not_fit_is_not_added():
    model = make_tower()
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    engine = PatrickStarEngine(model, {**TIGHT, "host_budget": 5 * nbytes})
    before = engine.ledger.owners(Tier.HOST)
    with pytest.raises(BudgetError):
        engine.add_optimizer(adam(model))
    assert engine.optimizers == []
    assert engine.ledger.owners(Tier.HOST) == before
    loss_of(model).backward()
    other = make_tower()
    with pytest.raises(EngineError, match="not one is the model's"):
        engine.add_optimizer(adam(other))
    loss_of(other).backward()
    for left, right in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


# What the user's optimizer has beside


class Remembering(torch.optim.SGD):
    """An optimizer with a method and an attribute of its own."""

    _step_supports_amp_scaling = True
    mode = "train"

    def eval(self):
        self.mode = "eval"

    def norm_of_momenta(self):
        return sum(float(state["momentum_buffer"].norm()) for state in self.state.values())


def test_methods_and_attributes_of_the_users_optimizer():
    plain = make_tower()
    expected = Remembering(plain.parameters(), lr=0.05, momentum=0.9)
    model = make_tower()
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
    model, optimizer = accelerator.prepare(model, Remembering(model.parameters(), lr=0.05, momentum=0.9))
    for step in range(2):
        loss_of(plain, step).backward()
        expected.step()
        expected.zero_grad()
        accelerator.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    chunked = optimizer.optimizer
    for found in (optimizer, chunked):
        assert found.mode == "train"
        assert found.norm_of_momenta() == expected.norm_of_momenta()
        assert found._step_supports_amp_scaling is False
        with pytest.raises(AttributeError, match="nothing_like_it"):
            found.nothing_like_it  # noqa: B018
    optimizer.eval()
    assert (chunked.inner.mode, chunked.mode, optimizer.mode) == ("eval", "eval", "eval")
