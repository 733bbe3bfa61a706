"""Parity on a GPU: bit for bit where kernels repeat themselves, to a stated tolerance where not.

Run by ``scripts/gpu_check.sh``. Everything resident is compared with plain torch on the device; masters on the host
with a reference whose masters are there. Clipping there sums norms on the device in our run and on the host in the
reference, so with clipping that comparison is to 1e-3 of the update.
"""

import pytest
import torch
from support.models import make_model, make_rows
from support.on_gpu import DEVICE, MIB, STEPS, assert_same, capped, repeats_itself, run_engine, run_plain, run_reference
from support.trainers import LossRecorder, arguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

pytestmark = pytest.mark.gpu
KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_plain_torch_repeats_itself_with_exact_kernels(name, exact):
    """Where this fails, the other tests compare to a tolerance, and say nothing about single bits."""
    assert repeats_itself(run_plain, name, 0.3)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "mixtral"])
def test_resident_fp32_is_plain_torch(name, exact):
    is_exact = repeats_itself(run_plain, name, 0.3)
    ours, state_dict, stats = run_engine(name, {}, max_norm=0.3)
    assert stats["chunk_loads"] == 0
    assert_same((ours, state_dict), run_plain(name, 0.3), is_exact)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_fast_attention_the_difference_is_the_noise_of_its_backward(name):
    ours, state_dict, _ = run_engine(name, {}, max_norm=0.3)
    assert_same((ours, state_dict), run_plain(name, 0.3), is_exact=False)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_capped_budget_is_the_reference(name, dtype, checkpointing, at_home_on_host, exact):
    is_exact = repeats_itself(run_reference, name, KINDS[dtype], checkpointing)
    expected = run_reference(name, KINDS[dtype], checkpointing)
    config = {**capped(name, KINDS[dtype].itemsize), "dtype": dtype, "debug_evict_all": True}
    ours, state_dict, stats = run_engine(name, config, checkpointing=checkpointing)
    assert stats["chunk_evictions"] > 0
    assert_same((ours, state_dict), expected, is_exact)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_states_that_cross_the_bus_are_updated_as_those_that_stay(name, dtype, monkeypatch, exact):
    """The same kernels update both: so the bits are the same, without clipping, whose norms add up elsewhere."""
    is_exact = repeats_itself(run_plain, name)
    expected = run_engine(name, {"dtype": dtype, "cpu_embedding": False})
    assert expected[2]["chunk_loads"] == 0
    monkeypatch.setattr("hf_patrickstar.setup.homes.UNMEASURED_SHARE", 0.0)
    config = {**capped(name, KINDS[dtype].itemsize), "dtype": dtype, "updates": "device"}
    config["device_budget"] += 16 * MIB
    ours, state_dict, stats = run_engine(name, config)
    assert stats["chunk_loads"] > 0
    numel = sum(parameter.numel() for parameter in make_model(name).parameters())
    assert stats["device_to_host_nbytes"] > STEPS * 12 * numel
    assert_same((ours, state_dict), expected[:2], is_exact)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_activations_that_leave_come_back_with_the_same_bits(name, checkpointing, at_home_on_host, exact):
    is_exact = repeats_itself(run_reference, name, torch.bfloat16, checkpointing)
    expected = run_reference(name, torch.bfloat16, checkpointing)
    config = {**capped(name, 2), "dtype": "bf16", "activation_offload": True}
    ours, state_dict, stats = run_engine(name, config, checkpointing=checkpointing)
    assert stats["offloaded_nbytes"] > 0
    assert not stats["diverged_steps"]
    assert_same((ours, state_dict), expected, is_exact)


def test_clipping_with_masters_on_the_host(at_home_on_host):
    losses, masters = run_reference("gpt2", torch.bfloat16, max_norm=0.3)
    config = {**capped("gpt2", 2), "dtype": "bf16"}
    ours, state_dict, _ = run_engine("gpt2", config, max_norm=0.3)
    torch.testing.assert_close(ours, losses, rtol=1e-3, atol=1e-3)
    for key, master in masters.items():
        torch.testing.assert_close(state_dict[key], master, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_trainer(precision, tmp_path, at_home_on_host):
    recorder = LossRecorder()
    config = {**capped("gpt2", 2 if precision else 4), "debug_evict_all": True}
    args = arguments(
        PatrickStarTrainingArguments,
        tmp_path,
        patrickstar=True,
        patrickstar_config=config,
        use_cpu=DEVICE == "cpu",
        max_steps=8,
        **({precision: True} if precision else {}),
    )
    data = make_rows("gpt2", 4) * 8  # few rows, again and again: the loss falls within eight steps
    trainer = PatrickStarTrainer(
        model=make_model("gpt2"), args=args, train_dataset=data, eval_dataset=data, callbacks=[recorder]
    )
    trainer.train()
    assert recorder.losses[-1] < recorder.losses[0]
    assert trainer.patrickstar_stats()["chunk_evictions"] > 0
    assert trainer.evaluate()["eval_loss"] < recorder.losses[0]
    assert trainer.model.device.type == torch.device(DEVICE).type
    generated = trainer.model.eval().generate(torch.ones(1, 4, dtype=torch.long, device=DEVICE), max_new_tokens=4)
    assert generated.shape[0] == 1


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lookups_at_home_tied_and_untied(name, at_home_on_host):
    config = capped(name, 4)
    expected, values, _ = run_engine(name, config, max_norm=0.3)
    ours, other, _ = run_engine(name, {**config, "cpu_embedding": True}, max_norm=0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for key, value in values.items():
        torch.testing.assert_close(other[key], value, rtol=1e-2, atol=1e-3)
