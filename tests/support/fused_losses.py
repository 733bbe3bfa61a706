"""Losses that read ``lm_head.weight`` outside of its module, in the shape of those of Liger Kernel and of CCE."""

import types

import torch
from support.models import make_model
from transformers.modeling_outputs import CausalLMOutput

ROWS = 8


class SavedLoss(torch.autograd.Function):
    """As Liger's: the forward computes gradients chunk by chunk, and the backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, target):
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, device=hidden.device)
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), ROWS):
            rows = slice(begin, begin + ROWS)
            logits = hidden[rows] @ weight.t()
            losses[rows], of_logits = loss_and_gradient(logits, target[rows], len(hidden))
            grad_hidden[rows] = of_logits @ weight
            torch.addmm(grad_weight, of_logits.t(), hidden[rows], out=grad_weight)
        ctx.save_for_backward(grad_hidden.detach(), grad_weight.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        return *(saved * grad for saved in ctx.saved_tensors), None


class RecomputedLoss(torch.autograd.Function):
    """As Cut Cross Entropy: the backward computes logits again, from a weight that autograd keeps."""

    @staticmethod
    def forward(ctx, hidden, weight, target):
        ctx.save_for_backward(hidden, weight, target)
        parts = zip(hidden.split(ROWS), target.split(ROWS), strict=True)
        return sum(loss_and_gradient(part @ weight.t(), labels, len(hidden))[0].sum() for part, labels in parts)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, target = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(hidden), ROWS):
            rows = slice(begin, begin + ROWS)
            of_logits = loss_and_gradient(hidden[rows] @ weight.t(), target[rows], len(hidden))[1] * grad
            grad_hidden[rows] = of_logits @ weight
            grad_weight += of_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight, None


def loss_and_gradient(logits, target, count):
    wide = torch.log_softmax(logits.float(), -1)
    kept = (target != -100).float() / count
    columns = target.clamp(min=0).unsqueeze(1)
    losses = -wide.gather(1, columns).squeeze(1) * kept
    return losses, (wide.exp().scatter_add(1, columns, -torch.ones_like(kept)[:, None]) * kept[:, None]).to(
        logits.dtype
    )


LOSSES = {"saved": SavedLoss, "recomputed": RecomputedLoss}


def make(kind, place, *, tied):
    """A model whose loss is fused, see ``fuse``; the weight of its output embedding may be that of the input."""
    model = make_model("llama")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return fuse(model, kind, place)


def fuse(model, kind, place):
    """Gives a model a fused loss: in its forward, as Liger replaces it, or outside of it, as trainers of TRL do."""
    if place == "in forward":

        def forward(self, input_ids, labels, **kwargs):
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            return CausalLMOutput(loss=fused(self, hidden, labels, kind))

        model.forward = types.MethodType(forward, model)
    return model


def fused(model, hidden, labels, kind):
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return LOSSES[kind].apply(hidden.reshape(len(target), -1), model.lm_head.weight, target)


def loss_of(model, batch, kind, place):
    if place == "in forward":
        return model(**batch).loss
    batch = dict(batch)
    labels = batch.pop("labels")
    return fused(model, model.model(**batch).last_hidden_state, labels, kind)
