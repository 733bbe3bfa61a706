"""A training loop of plain PyTorch, in chunks.

::

    python recipes/loop_pytorch.py --output_dir out
    python recipes/loop_pytorch.py --output_dir out --resume      # goes on from out/checkpoint
    python recipes/loop_pytorch.py --output_dir out --stock       # the same without chunks

It trains a small GPT-2 with random weights on numbers that it makes itself; ``--model_name_or_path MODEL`` trains a
checkpoint instead.
"""

import argparse
import os

import torch
from loop_accelerate import make_model

from hf_patrickstar import initialize_engine


def main(argv=None):
    """Trains; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--chunk_budget", default="128KiB", help="bytes of chunks on the device")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stock", action="store_true", help="train without chunks")
    options = parser.parse_args(argv)
    torch.manual_seed(7)
    place = os.path.join(options.output_dir, "checkpoint")

    def make():
        return make_model(options.model_name_or_path).train()

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    if options.stock:
        model = make()
        optimizer, engine = make_optimizer(model.parameters()), None
    else:
        model, optimizer = initialize_engine(make, {"chunk_budget": options.chunk_budget}, make_optimizer)
        engine = model.patrickstar_engine
    if options.resume:
        if engine is None:
            parser.error("--resume reads a checkpoint in chunks; leave --stock out")
        engine.load_checkpoint(place)

    losses = []
    for number in range(options.steps):
        batch = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(number))

        def micro_batch(batch=batch):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            return loss.item()

        # A step that runs out of device memory is repeated with more care.
        losses.append(micro_batch() if engine is None else engine.attempt(micro_batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.save_checkpoint(place)
    model.save_pretrained(options.output_dir)
    print(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
