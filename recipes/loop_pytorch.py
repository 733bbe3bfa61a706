r"""A training loop of plain PyTorch, in chunks.

::

    python recipes/loop_pytorch.py --output_dir out
    python recipes/loop_pytorch.py --output_dir out --resume --steps 12   # goes on from the last checkpoint in out
    python recipes/loop_pytorch.py --output_dir out --stock               # the same without chunks

It trains a small GPT-2 with random weights on numbers that it makes itself; or a checkpoint on texts::

    python recipes/loop_pytorch.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --steps 1000 --save_steps 100 --chunk_budget 4GiB
"""

import itertools
import os

import common
import loop_common
import torch

from hf_patrickstar import get_engine, initialize_engine


def main(argv=None):
    """Trains; returns the losses."""
    parser = loop_common.make_parser(__doc__)
    options = parser.parse_args(argv)
    if options.stock and options.resume:
        parser.error("--resume reads a checkpoint in chunks; leave --stock out")
    torch.manual_seed(loop_common.SEED)
    loader = loop_common.make_loader(loop_common.make_rows(options), options.steps, loop_common.BATCH_SIZE)

    def make():
        return loop_common.make_model(options).train()

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    if options.stock:
        model = make()
        optimizer, engine = make_optimizer(model.parameters()), None
    else:
        model, optimizer = initialize_engine(make, {"chunk_budget": options.chunk_budget}, make_optimizer)
        engine = get_engine(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, total_iters=3)
    device = "cpu" if engine is None else engine.device

    first, losses = 0, []
    if options.resume:
        place, first = loop_common.find_checkpoint(options)
        engine.load_checkpoint(place)
        others = torch.load(f"{place}.pt")
        scheduler.load_state_dict(others["scheduler"])
        torch.set_rng_state(others["random"])
    for step, batch in enumerate(itertools.islice(loader, first, None), first + 1):
        batch = batch.to(device)

        def micro_batch(batch=batch):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            return loss.item()

        # A micro-batch that runs out of device memory is repeated with more care.
        losses.append(micro_batch() if engine is None else engine.attempt(micro_batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if engine is not None and step % options.save_steps == 0:
            place = os.path.join(options.output_dir, f"checkpoint-{step}")
            os.makedirs(options.output_dir, exist_ok=True)
            # First what the engine does not know, so that it is there whenever the checkpoint is.
            torch.save({"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}, f"{place}.pt")
            engine.save_checkpoint(place)
    model.save_pretrained(options.output_dir)
    print(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}" if losses else "nothing is left to train")
    return losses


if __name__ == "__main__":
    common.run(main)
