"""Recipes beside the first three: each trains to the same losses and weights with chunks and without."""

import importlib
import json
import sys

import pytest
import torch
from models import make_model
from peft import PeftModel
from PIL import Image
from running import CHUNKS, COMMON, SENTENCES, write_rows
from texts import completions, make_tokenizer, preferences
from trainers import assert_same_weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """Checkpoints and data that only these recipes need."""
    folder = tmp_path_factory.mktemp("more")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, eos_token_id=2, **sizes, dropout_rate=0.0)
    ).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    rows = [{"source": text, "target": " ".join(text.split()[:3])} for text in SENTENCES]
    write_rows(folder / "pairs.jsonl", rows)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=2)).save_pretrained(
        folder / "vit"
    )
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    for number in range(12):
        place = folder / "images" / ("dark" if number % 2 else "light")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), ((number * 40) % 256, 9 * number, 200)).save(place / f"{number}.png")
    make_model("gpt2").save_pretrained(folder / "words")
    make_tokenizer().save_pretrained(folder / "words")
    completions().to_json(folder / "sft.jsonl")
    preferences().to_json(folder / "dpo.jsonl")
    return folder


def run_both(recipe, name, argv, tmp_path):
    """Runs a recipe without and with chunks; returns metrics and the output directories."""
    stock, chunks = tmp_path / "stock", tmp_path / "chunks"
    expected = recipe(name, *argv, *COMMON, "--output_dir", stock)
    found = recipe(name, *argv, *COMMON, "--output_dir", chunks, *CHUNKS)
    assert found["train_loss"] == expected["train_loss"]
    assert recipe.trainers[-1].patrickstar_stats()["steps"] == 3
    return expected, found, stock, chunks


def test_seq2seq_generates(folder, recipe, tmp_path):
    argv = ["--model_name_or_path", folder / "t5", "--train_file", folder / "pairs.jsonl", "--do_train", "--do_eval"]
    argv += ["--predict_with_generate", "--max_target_length", "8", "--max_eval_samples", "4"]
    expected, found, stock, chunks = run_both(recipe, "seq2seq", argv, tmp_path)
    for key in ("eval_loss", "eval_exact_match", "eval_token_f1"):
        assert found[key] == expected[key]
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained(stock), AutoModelForSeq2SeqLM.from_pretrained(chunks))


def test_overlap_counts_words_once(recipe):
    sys.modules.pop("finetune_seq2seq", None)
    module = importlib.import_module("finetune_seq2seq")
    assert module.overlap(["a", "a", "b"], ["a", "b", "c"]) == pytest.approx(2 / 3)
    assert module.overlap([], []) == 1.0
    assert module.overlap(["a"], []) == 0.0


def test_lora_saves_and_merges(folder, checkpoints, data, recipe, tmp_path):
    argv = ["--model_name_or_path", checkpoints / "clm", "--train_file", data / "train.txt", "--do_train"]
    argv += ["--block_size", "16", "--lora_r", "4", "--merge_to", tmp_path / "merged"]
    _, _, stock, chunks = run_both(recipe, "lora", argv, tmp_path)
    adapted = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoints / "clm"), place)
        for place in (stock, chunks)
    ]
    assert_same_weights(*adapted)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_weights(adapted[1].merge_and_unload(), merged)


def test_vision(folder, recipe, tmp_path):
    argv = ["--model_name_or_path", folder / "vit", "--dataset_name", folder / "images", "--do_train", "--do_eval"]
    argv += ["--validation_split_percentage", "30"]
    expected, found, stock, chunks = run_both(recipe, "vision", argv, tmp_path)
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    loaded = [AutoModelForImageClassification.from_pretrained(place) for place in (stock, chunks)]
    assert_same_weights(*loaded)
    assert loaded[0].config.id2label == {0: "dark", 1: "light"}


def test_streaming(checkpoints, data, recipe, tmp_path):
    argv = ["--model_name_or_path", checkpoints / "clm", "--train_file", data / "train.txt", "--block_size", "16"]
    _, _, stock, chunks = run_both(recipe, "streaming", argv, tmp_path)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(stock), AutoModelForCausalLM.from_pretrained(chunks))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trl(name, folder, recipe, tmp_path):
    module = importlib.import_module(f"trl_{name}")
    argv = ["--model_name_or_path", folder / "words", "--dataset_name", folder / f"{name}.jsonl", "--bf16", "false"]
    argv += ["--gradient_checkpointing", "false", "--max_length", "16", *COMMON]
    for output, more in (("stock", []), ("chunks", CHUNKS)):
        trainer = module.main([str(word) for word in [*argv, "--output_dir", tmp_path / output, *more]])
    assert trainer.patrickstar_stats()["steps"] == 3
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / output) for output in ("stock", "chunks")]
    assert_same_weights(*loaded)


@pytest.mark.parametrize("name", ["accelerate", "pytorch"])
def test_loops(name, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    module = importlib.import_module(f"loop_{name}")
    expected = module.main(["--output_dir", str(tmp_path / "stock"), "--stock"])
    found = module.main(["--output_dir", str(tmp_path / "chunks")])
    assert found == expected
    assert len(found) >= 8
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / output) for output in ("stock", "chunks")]
    assert_same_weights(*loaded)


def test_a_loop_of_pytorch_goes_on(tmp_path):
    module = importlib.import_module("loop_pytorch")
    whole = module.main(["--output_dir", str(tmp_path / "one"), "--steps", "4"])
    again = module.main(["--output_dir", str(tmp_path / "one"), "--steps", "4", "--resume"])
    assert again[0] < whole[0]  # the same batches, with weights that have seen them
    with pytest.raises(SystemExit):
        module.main(["--output_dir", str(tmp_path), "--resume", "--stock"])


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("streaming", ["--model_name_or_path", "{clm}", "--train_file", "{train}"], "say with --max_steps"),
        (
            "lora",
            ["--model_name_or_path", "{clm}", "--train_file", "{train}", "--do_train", "--lora_r", "0"],
            "--lora_r",
        ),
        (
            "seq2seq",
            ["--model_name_or_path", "{clm}", "--train_file", "{train}", "--do_train"],
            "is no encoder-decoder",
        ),
    ],
)
def test_wrong_options_are_one_sentence(name, argv, said, checkpoints, data, recipe, tmp_path):
    places = {"clm": checkpoints / "clm", "train": data / "train.txt"}
    with pytest.raises(ValueError, match=said):
        recipe(name, *[word.format(**places) for word in argv], "--output_dir", tmp_path, "--use_cpu")


def test_wrong_data_for_trl_is_one_sentence(folder, tmp_path):
    module = importlib.import_module("trl_sft")
    argv = ["--model_name_or_path", str(folder / "words"), "--dataset_name", "./missing.jsonl", "--output_dir"]
    with pytest.raises(FileNotFoundError, match=r"there is no '\./missing\.jsonl'"):
        module.main([*argv, str(tmp_path), "--use_cpu"])
    (tmp_path / "empty.jsonl").write_text("")
    argv[3] = str(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        module.main([*argv, str(tmp_path), "--use_cpu"])
    write_rows(tmp_path / "rows.jsonl", [json.loads('{"text": "w5 w6"}')])
    argv[3] = str(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="has no split 'validation' \\(it has: train\\)"):
        module.main([*argv, str(tmp_path), "--use_cpu", "--dataset_train_split", "validation"])
