r"""A training loop over Accelerate, in chunks: one line differs from a loop without.

::

    python recipes/loop_accelerate.py --output_dir out                       # in chunks
    python recipes/loop_accelerate.py --output_dir out --resume --steps 12   # goes on from the last checkpoint in out
    python recipes/loop_accelerate.py --output_dir out --stock               # the same with accelerate.Accelerator
    accelerate launch --config_file recipes/accelerate/multi_gpu.yaml recipes/loop_accelerate.py --output_dir out

It trains a small GPT-2 with random weights on numbers that it makes itself; or a checkpoint on texts::

    python recipes/loop_accelerate.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --steps 1000 --save_steps 100 --mixed_precision bf16 --chunk_budget 4GiB
"""

import os

import common
import loop_common
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_constant_schedule_with_warmup

from hf_patrickstar import PatrickStarAccelerator

MICRO_BATCHES = 2  # of each step


def main(argv=None):
    """Trains; returns the losses."""
    parser = loop_common.make_parser(__doc__)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    options = parser.parse_args(argv)
    settings = {"mixed_precision": options.mixed_precision, "gradient_accumulation_steps": MICRO_BATCHES}
    if options.stock:
        accelerator = Accelerator(**settings)
    else:
        accelerator = PatrickStarAccelerator(**settings, patrickstar_config={"chunk_budget": options.chunk_budget})
    set_seed(loop_common.SEED)
    rows_per_step = MICRO_BATCHES * loop_common.BATCH_SIZE * accelerator.num_processes
    loader = loop_common.make_loader(loop_common.make_rows(options), options.steps, rows_per_step)
    model = loop_common.make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Accelerate lets it step once for every process.
    scheduler = get_constant_schedule_with_warmup(optimizer, 3 * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step, losses = 0, []
    if options.resume:
        place, step = loop_common.find_checkpoint(options)
        accelerator.load_state(place)
    model.train()
    for batch in accelerator.skip_first_batches(loader, step * MICRO_BATCHES):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            step += 1
            if step % options.save_steps == 0:
                accelerator.save_state(os.path.join(options.output_dir, f"checkpoint-{step}"))

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        options.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.print(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}" if losses else "nothing is left to train")
    return losses


if __name__ == "__main__":
    common.run(main)
