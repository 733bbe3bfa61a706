"""A training loop over Accelerate, in chunks: one line differs from a loop without.

::

    python recipes/loop_accelerate.py --output_dir out                       # in chunks
    python recipes/loop_accelerate.py --output_dir out --stock               # the same with accelerate.Accelerator
    accelerate launch --config_file recipes/accelerate/multi_gpu.yaml recipes/loop_accelerate.py --output_dir out

It trains a small GPT-2 with random weights on numbers that it makes itself, saves after half of the steps, and goes on
from what it has saved. ``--model_name_or_path MODEL`` trains a checkpoint instead.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, GPT2Config, get_linear_schedule_with_warmup

from hf_patrickstar import PatrickStarAccelerator

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 128}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}


def make_model(name):
    """A checkpoint, or a small model with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    return AutoModelForCausalLM.from_config(GPT2Config(**SIZES))


def main(argv=None):
    """Trains; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--chunk_budget", default="128KiB", help="bytes of chunks on the device")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--stock", action="store_true", help="train without chunks")
    options = parser.parse_args(argv)
    if options.stock:
        accelerator = Accelerator(mixed_precision=options.mixed_precision, gradient_accumulation_steps=2)
    else:
        accelerator = PatrickStarAccelerator(
            mixed_precision=options.mixed_precision,
            gradient_accumulation_steps=2,
            patrickstar_config={"chunk_budget": options.chunk_budget},
        )
    set_seed(7)
    model = make_model(options.model_name_or_path)
    rows = torch.randint(0, 100, (4 * options.steps, 16))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, options.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    place, losses = os.path.join(options.output_dir, "halfway"), []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if number == options.steps - 1:
            accelerator.save_state(place)
            accelerator.load_state(place)  # as another run would
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        options.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.print(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
