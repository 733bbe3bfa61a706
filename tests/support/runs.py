"""Training in chunks that move, whose every result is kept."""

import torch
from support import inside
from support.small import CHUNK_NUMEL, Stack, loss_of, make

from hf_patrickstar import PatrickStarEngine


class Run:
    """An engine over a small model, and what came out of it.

    Args:
        make_optimizer: Makes torch's optimizer of the parameters.
        model: The model; of ``factory`` if there is none.
        factory: Makes the model.
        loss_of: The loss of a model for a batch with a number.
        accumulation: How many micro-batches make a step.
        num_chunks: How many chunks have room on the device, in fp32.
        **config: Settings beside these.

    Attributes:
        found: Copies of what was kept.
    """

    def __init__(
        self,
        make_optimizer=None,
        *,
        model=None,
        factory=Stack,
        loss_of=loss_of,
        accumulation=1,
        num_chunks=3,
        **config,
    ):
        self.model = (make(factory) if model is None else model).train()
        config = {
            "placement": "host",
            "chunk_numel": CHUNK_NUMEL,
            "chunk_budget": f"{4 * num_chunks * CHUNK_NUMEL}B",  # a number is refused where it is so small
            **config,
        }
        make_optimizer = make_optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        made = make_optimizer(self.model.parameters())
        self.engine = PatrickStarEngine(self.model, config, made, gradient_accumulation_steps=accumulation)
        self.optimizer = self.engine.optimizer
        self.found = []
        self._loss_of = loss_of

    @property
    def parameters(self):
        return list(self.model.parameters())

    @property
    def num_under_way(self):
        """How many chunks are being updated."""
        return inside.num_under_way(self.engine)

    def keep(self, *values):
        self.found += [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]

    def keep_state(self, state):
        self.keep(*(value for entry in state["state"].values() for value in entry.values()))

    def backward(self, seed=0):
        loss = self._loss_of(self.model, seed)
        loss.backward()
        self.keep(loss)

    def step(self, seed=0, after=lambda run: None):
        """A step with clipped gradients; ``after`` is called before they are dropped."""
        self.backward(seed)
        self.keep(self.optimizer.clip_grad_norm_(None, 0.5))
        self.optimizer.step()
        after(self)
        self.optimizer.zero_grad()

    def end(self):
        """All that was kept, and the values."""
        self.keep(*self.model.state_dict().values())
        return self.found
