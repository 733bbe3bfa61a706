"""Tiny texts, and a tokenizer for them, for the trainers of TRL."""

import torch
from datasets import Dataset
from support.models import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


def make_tokenizer():
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def words(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return " " + " ".join(f"w{i}" for i in torch.randint(4, VOCAB, (count,), generator=generator).tolist())


def preferences(count=12):
    return Dataset.from_list(
        [{"prompt": words(i, 4), "chosen": words(100 + i, 5), "rejected": words(200 + i, 6)} for i in range(count)]
    )


def completions(count=12):
    return Dataset.from_list([{"prompt": words(i, 4), "completion": words(50 + i, 6)} for i in range(count)])


def prompts(count=8):
    return Dataset.from_list([{"prompt": words(i, 4)} for i in range(count)])


def count_sevens(completions, **kwargs):
    """A reward that differs from text to text."""
    return [float(sum(int(word[1:]) % 7 for word in text.split() if word[0] == "w")) for text in completions]
