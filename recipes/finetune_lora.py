r"""Trains LoRA adapters over a frozen causal language model (PEFT).

The frozen model takes 2 bytes per parameter in 16-bit, on both tiers together, and has no optimizer states::

    python recipes/finetune_lora.py --model_name_or_path MODEL --dataset_name DATASET --output_dir out \
        --do_train --do_eval --bf16 --patrickstar --patrickstar_config '{"device_budget": "8GiB"}'

From files::

    python recipes/finetune_lora.py --model_name_or_path ./my-model --train_file corpus.txt --output_dir out \
        --do_train --lora_r 16 --lora_target_modules q_proj,v_proj --merge_to merged --patrickstar

What is saved in ``out`` is the adapter alone, as PEFT saves it; ``--merge_to DIR`` also writes the whole model with the
adapter merged. Without ``--patrickstar`` it is the stock Trainer.
"""

import dataclasses
import importlib.util

import common
from finetune_clm import DataArguments, make_blocks
from transformers import AutoModelForCausalLM, default_data_collator, set_seed

from hf_patrickstar import PatrickStarTrainer as Trainer
from hf_patrickstar import PatrickStarTrainingArguments as TrainingArguments


@dataclasses.dataclass
class AdapterArguments:
    """The adapters."""

    lora_r: int = dataclasses.field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = dataclasses.field(default=32, metadata={"help": "Their weight is alpha over rank."})
    lora_dropout: float = dataclasses.field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: str = dataclasses.field(
        default="all-linear", metadata={"help": "Names of modules, separated by commas, or 'all-linear'."}
    )
    merge_to: str | None = dataclasses.field(
        default=None, metadata={"help": "Directory for the model with the adapters merged."}
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Runs the recipe.

    Args:
        argv: Options; those of the command line by default.

    Returns:
        The metrics of training and evaluation.

    Raises:
        FileNotFoundError: If a file or directory that was named does not exist.
        ValueError: If the options or the data cannot work, or PEFT is not installed.
    """
    model_args, data_args, adapter_args, args = common.parse_arguments(
        (common.ModelArguments, DataArguments, AdapterArguments, TrainingArguments), argv
    )
    common.check_arguments(model_args, data_args, args)
    if importlib.util.find_spec("peft") is None:
        raise ValueError("PEFT is not installed; pip install 'hf_patrickstar[peft]'")
    if adapter_args.lora_r < 1:
        raise ValueError(f"--lora_r is {adapter_args.lora_r}; give a rank of at least 1")
    if adapter_args.merge_to is not None and not args.do_train:
        raise ValueError("--merge_to merges adapters that this run has trained; add --do_train")
    common.set_up_logging(args)
    checkpoint = common.find_checkpoint(args) if args.do_train else None
    set_seed(args.seed)

    splits = common.load_splits(data_args, args, keep_linebreaks=True)
    config, tokenizer = common.load_config_and_tokenizer(model_args, padding=False)
    if len(tokenizer) > config.get_text_config().vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {config.get_text_config().vocab_size}, and new "
            "embeddings of a frozen model would stay random; give the model's own tokenizer"
        )
    block_size = common.choose_length(data_args.block_size, 1024, config, tokenizer, "--block_size")
    blocks = {name: make_blocks(split, tokenizer, block_size, data_args, args) for name, split in splits.items()}
    with common.reading_weights(args, config, tokenizer):
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, revision=model_args.model_revision, dtype=model_args.dtype
        )
    model = with_adapters(model, adapter_args)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=common.take(blocks["train"], data_args.max_train_samples) if args.do_train else None,
        eval_dataset=common.take(blocks["validation"], data_args.max_eval_samples) if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    results = common.train_and_evaluate(trainer, checkpoint, perplexity=True)
    if args.patrickstar:
        common.print_patrickstar_stats(trainer)
    if adapter_args.merge_to is not None and trainer.is_world_process_zero():
        merge(args.output_dir, model_args, adapter_args.merge_to, tokenizer)
    return results


def with_adapters(model, adapter_args):
    """Freezes a model, with adapters that are trained."""
    import peft

    targets = adapter_args.lora_target_modules
    config = peft.LoraConfig(
        r=adapter_args.lora_r,
        lora_alpha=adapter_args.lora_alpha,
        lora_dropout=adapter_args.lora_dropout,
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"--lora_target_modules: {error}") from error


def merge(adapter, model_args, target, tokenizer):
    """Writes the model with the saved adapter merged, as anybody could do later."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, dtype=model_args.dtype
    )
    peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    common.run(main)
