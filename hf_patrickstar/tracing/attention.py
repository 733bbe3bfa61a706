"""Attention of tensors without values, as in training: masks that transformers leaves out, and dropout in the kernel.

[Note: masks without values]
transformers looks into a batch before it makes a mask of all pairs of tokens: if no token is padding and every row is
one sequence, causal attention needs no mask. Of tensors that have no values it cannot see that, and makes the mask,
which takes memory that a training does not take, and another kernel of attention. Who plans knows what the batch is.
Where nobody has imported transformers, no model is one of its models, and there is nothing to leave out.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def masks_of_batches(*, has_padding: bool, is_packed: bool) -> Iterator[None]:
    """Inside, masks are left out of models on fake tensors as they are in training.

    Args:
        has_padding: Whether some tokens of a batch are padding.
        is_packed: Whether a row of a batch may be several sequences, which begin where ``position_ids`` begin again.
    """
    masking_utils: Any = getattr(sys.modules.get("transformers"), "masking_utils", None)
    # Functions that look into a batch, and what they compute with: it takes memory for a moment.
    that_look = {
        "_ignore_causal_mask_sdpa": getattr(masking_utils, "fast_all", torch.all),
        "_ignore_bidirectional_mask_sdpa": torch.all,
    }
    with contextlib.ExitStack() as stack:
        if not is_packed and hasattr(masking_utils, "find_packed_sequence_indices"):
            find = masking_utils.find_packed_sequence_indices

            def find_none(position_ids: Any) -> Any:
                found = find(position_ids)  # what it computes with takes memory for a moment
                return None if isinstance(position_ids, FakeTensor) else found

            stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", find_none))
        for name, are_all in () if has_padding else that_look.items():
            look = getattr(masking_utils, name, None)
            if look is not None:
                stack.enter_context(mock.patch.object(masking_utils, name, _without_padding(look, are_all)))
        yield


def _without_padding(look: Any, are_all: Any) -> Any:
    def looks(padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(padding_mask, FakeTensor):
            are_all(padding_mask)
            padding_mask = None
        return look(padding_mask, *args, **kwargs)

    return looks


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention drops no scores: an accelerator drops them inside of its kernel, and writes none of them."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_to_all(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend_to_all):
        yield
