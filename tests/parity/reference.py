"""Mixed-precision training in a page of plain torch: 16-bit weights, fp32 masters, torch's AdamW, torch's GradScaler.

It shares no code with the package. Gradients of one micro-batch are 16-bit; several are summed in fp32.
"""

import torch


class Reference:
    def __init__(self, model, dtype, make_optimizer, max_norm=None, scaler=None):
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.optimizer = make_optimizer(self.masters)
        self.max_norm = max_norm
        self.scaler = scaler
        self.norms = []

    def step(self, batches):
        """One optimizer step over micro-batches; returns their losses and whether the step was done."""
        sums, losses = {}, []
        for batch in batches:
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
