"""Tiny checkpoints and data, and a way to run a recipe in this process."""

import importlib
import json
import sys

import pytest
import torch
from support.models import bert_classifier, bert_mlm, gpt2
from support.running import LABELS, ROOT, SENTENCES, write_rows
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(ROOT / "recipes"))


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, so it knows every text; the size is what the models of ``tests/support/models.py`` do not have."""
    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SENTENCES, vocab_size=300, min_frequency=1, special_tokens=special, show_progress=False)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=32, **names)


@pytest.fixture(scope="session")
def checkpoints(tokenizer, tmp_path_factory):
    """Directory with one checkpoint per recipe: ``clm``, ``classification`` and ``mlm``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, make in (("clm", gpt2), ("classification", bert_classifier), ("mlm", bert_mlm)):
        torch.manual_seed(0)
        model = make()
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # As GPT-2 has it: nothing to pad with but the end-of-text token.
    tokens = json.loads((folder / "clm" / "tokenizer_config.json").read_text())
    tokens.pop("pad_token")
    (folder / "clm" / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Directory with data for every recipe."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.txt").write_text("\n".join(SENTENCES[:40]), encoding="utf-8")
    (folder / "validation.txt").write_text("\n".join(SENTENCES[40:]), encoding="utf-8")
    rows = [{"text": text, "label": LABELS[i % 3], "score": i / 10} for i, text in enumerate(SENTENCES)]
    write_rows(folder / "train.jsonl", rows[:40])
    write_rows(folder / "validation.jsonl", rows[40:])
    lines = ["sentence1,sentence2,label"] + [f"{text},{text[::-1]},{i % 2 + 4}" for i, text in enumerate(SENTENCES)]
    (folder / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """Runs a recipe in this process, offline and with its caches in ``tmp_path``; ``trainers`` are what it made."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # As in the processes of start_recipe: sums depend, in their last bits, on how many threads share them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name, *argv):
        module = importlib.import_module(name if name.startswith("trl_") else f"finetune_{name}")
        original = module.Trainer

        class Recorded(original):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                run.trainers.append(self)

        monkeypatch.setattr(module, "Trainer", Recorded)
        try:
            return module.main([str(word) for word in argv])
        finally:
            monkeypatch.setattr(module, "Trainer", original)

    run.trainers = []
    yield run
    torch.set_num_threads(threads)
