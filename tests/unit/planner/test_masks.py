"""Masks of batches without values are those of training."""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from hf_patrickstar.tracing.attention import masks_of_batches

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
MODELS = {
    "causal": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)),
    "both ways": lambda: BertForMaskedLM(BertConfig(**SIZES)),
}


def has_mask(model, inputs):
    """Whether attention gets a mask."""
    attend, masks = torch.nn.functional.scaled_dot_product_attention, []

    def attends(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask is not None)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attends):
        model(**inputs)
    assert len(masks) == 1
    return masks[0]


def make_inputs(num_padding=0):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, 8 - num_padding :] = 0
    return {"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_padding", [0, 3])
def test_a_mask_is_made_where_a_training_makes_one(name, num_padding):
    expected = has_mask(MODELS[name](), make_inputs(num_padding))
    assert expected == (num_padding > 0)
    with FakeTensorMode(), masks_of_batches(has_padding=num_padding > 0, is_packed=False):
        assert has_mask(MODELS[name](), make_inputs(num_padding)) == expected


def test_without_a_mask_among_the_inputs_there_is_none():
    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    assert not has_mask(MODELS["causal"](), inputs)
    with FakeTensorMode(), masks_of_batches(has_padding=False, is_packed=False):
        inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
        assert not has_mask(MODELS["causal"](), inputs)
    with FakeTensorMode():  # this is why
        inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
        assert has_mask(MODELS["causal"](), inputs)
