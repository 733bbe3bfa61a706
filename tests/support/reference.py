"""Mixed-precision training in a page of plain torch: 16-bit weights, fp32 masters, torch's AdamW, torch's GradScaler.

It shares no code with the package. Gradients of one micro-batch are 16-bit; several are summed in fp32. Under autocast
the weights that it would not round are fp32.
"""

import contextlib
import itertools

import torch

ROUNDED = ("Linear", "Conv1D", "Conv2d", "MixtralExperts", "MixtralTopKRouter")
"""Names of the classes of modules whose weights autocast rounds, among the models of the tests."""


def rounded(model):
    """Names of the parameters that only such modules have."""
    kept = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ not in ROUNDED
        for parameter in module._parameters.values()
    }
    return [name for name, parameter in model.named_parameters() if id(parameter) not in kept]


class Reference:
    def __init__(self, model, dtype, make_optimizer, max_norm=None, scaler=None, autocast=True, device="cpu"):
        self.dtype, self.autocast, self.device = dtype, autocast, device
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
        named = dict(model.named_parameters())
        for name in rounded(model) if autocast else named:
            named[name].data = named[name].data.to(dtype)
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.optimizer = make_optimizer(self.masters)
        self.max_norm = max_norm
        self.scaler = scaler
        self.norms = []

    def step(self, batches, seeds=()):
        """One optimizer step over micro-batches, each with its seed; returns their losses and whether it was done."""
        sums, losses = {}, []
        for batch, seed in itertools.zip_longest(batches, seeds):
            if seed is not None:
                torch.manual_seed(seed)
            with (
                torch.autocast(self.device, self.dtype, cache_enabled=False)
                if self.autocast
                else contextlib.nullcontext()
            ):
                loss = self.model(**batch).loss
            losses.append(loss.item())
            scaled = loss / len(batches)
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()
            for name, parameter in self.parameters.items():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.float()
                sums[name] = sums[name] + gradient if name in sums else gradient
                parameter.grad = None
        for name, gradient in sums.items():
            self.masters[name].grad = gradient
        before = None
        if self.scaler:
            before = self.scaler.get_scale()
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_([self.masters[name] for name in self.parameters], self.max_norm)
            self.norms.append(norm.item())
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.masters[name].data)
        return losses, before is None or self.scaler.get_scale() >= before
