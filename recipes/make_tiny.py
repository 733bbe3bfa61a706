"""Writes tiny checkpoints and data for every recipe, so that all of them can be tried without a network.

::

    python recipes/make_tiny.py --output_dir tiny

The texts are sentences about numbers; the models have random weights and about 100,000 parameters.
"""

import argparse
import json
import pathlib

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OTHERS = ("and", "is", "plus", "after", "comes", "even", "odd", ".")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")


def make_tokenizer():
    """A tokenizer of whole words."""
    words = {word: number for number, word in enumerate((*SPECIAL, *DIGITS, *OTHERS))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


def make_rows():
    """Sentences, with what several tasks want of them."""
    rows = []
    for left in range(10):
        for right in range(10 - left):
            total = DIGITS[left + right]
            question = f"{DIGITS[left]} plus {DIGITS[right]} is"
            kind = "even" if (left + right) % 2 == 0 else "odd"
            rows.append({"text": f"{question} {total} . {total} is {kind} .", "label": kind})
            rows[-1] |= {"source": question, "target": total, "prompt": f"{question} ", "completion": total}
    return rows


def make_models(tokenizer):
    """One small model for each family of recipes."""
    size = len(tokenizer)
    common = {"vocab_size": size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bert = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    yield "clm", GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, **common))
    yield "mlm", BertForMaskedLM(BertConfig(vocab_size=size, pad_token_id=0, max_position_embeddings=64, **bert))
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    yield "seq2seq", T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **common, **t5))
    yield "vision", ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=2, **bert))


def make_images(folder):
    """Images that are brighter on the left, or on the right."""
    from PIL import Image

    for number in range(32):
        kind = ("left", "right")[number % 2]
        image = torch.randint(0, 100, (32, 32, 3), generator=torch.Generator().manual_seed(number))
        side = slice(0, 16) if kind == "left" else slice(16, 32)
        image[:, side] += 150
        place = folder / kind / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.to(torch.uint8).numpy()).save(place)


def write_rows(path, rows, *names):
    """Writes some columns of rows."""
    path.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in rows), encoding="utf-8")


def main(argv=None):
    """Writes everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    folder = pathlib.Path(parser.parse_args(argv).output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    for name, model in make_models(tokenizer):
        model.save_pretrained(folder / name)
        if name == "vision":
            ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / name)
        else:
            tokenizer.save_pretrained(folder / name)
    rows = make_rows()
    (folder / "corpus.txt").write_text("\n".join(row["text"] for row in rows * 4), encoding="utf-8")
    write_rows(folder / "labels.jsonl", rows, "text", "label")
    write_rows(folder / "pairs.jsonl", rows, "source", "target")
    write_rows(folder / "sft.jsonl", rows, "prompt", "completion")
    wrong = [{**row, "chosen": row["completion"], "rejected": "nine and nine"} for row in rows]
    write_rows(folder / "dpo.jsonl", wrong, "prompt", "chosen", "rejected")
    make_images(folder / "images")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
