"""Recipes beside the first three: each trains to the same losses and weights with chunks and without."""

import copy
import importlib
import sys

import pytest
import torch
from peft import PeftModel
from PIL import Image
from support.models import make_model
from support.running import CHUNKS, COMMON, SENTENCES, write_rows
from support.texts import completions, make_tokenizer, preferences
from support.trainers import assert_same_weights
from tokenizers.processors import TemplateProcessing
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

from hf_patrickstar import PatrickStarError


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """Checkpoints and data that only these recipes need."""
    folder = tmp_path_factory.mktemp("more")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, eos_token_id=2, **sizes, dropout_rate=0.0)
    ).save_pretrained(folder / "t5")
    ends = copy.deepcopy(tokenizer)
    ends._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    ends.save_pretrained(folder / "t5")  # as T5's tokenizer does, it ends every text
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


@pytest.mark.long
def test_vision(folder, recipe, tmp_path):
    argv = ["--model_name_or_path", folder / "vit", "--dataset_name", folder / "images", "--do_train", "--do_eval"]
    argv += ["--validation_split_percentage", "30"]
    expected, found, stock, chunks = run_both(recipe, "vision", argv, tmp_path)
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    loaded = [AutoModelForImageClassification.from_pretrained(place) for place in (stock, chunks)]
    assert_same_weights(*loaded)
    assert loaded[0].config.id2label == {0: "dark", 1: "light"}


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trl(name, folder, recipe, tmp_path):
    argv = ["--model_name_or_path", folder / "words", "--dataset_name", folder / f"{name}.jsonl", "--bf16", "false"]
    argv += ["--gradient_checkpointing", "false", "--max_length", "16"]
    argv += ["--do_eval", "--dataset_test_split", "train"]
    expected, found, stock, chunks = run_both(recipe, f"trl_{name}", argv, tmp_path)
    assert found["eval_loss"] == expected["eval_loss"]
    assert_same_weights(AutoModelForCausalLM.from_pretrained(stock), AutoModelForCausalLM.from_pretrained(chunks))


@pytest.fixture
def loop(recipe, monkeypatch):
    """Runs a bare loop in this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(name, *argv):
        return importlib.import_module(f"loop_{name}").main([str(word) for word in argv])

    return run


@pytest.mark.parametrize("name", ["accelerate", "pytorch"])
def test_a_loop_trains_alike_and_goes_on(name, loop, tmp_path):
    stock, whole, part = (tmp_path / place for place in ("stock", "whole", "part"))
    expected = loop(name, "--output_dir", stock, "--stock")
    found = loop(name, "--output_dir", whole)
    assert found == expected
    assert len(found) == {"accelerate": 16, "pytorch": 8}[name]
    loop(name, "--output_dir", part, "--steps", 4)
    rest = loop(name, "--output_dir", part, "--resume")
    assert rest == found[len(found) // 2 :]
    for place in (whole, part):
        assert_same_weights(*(AutoModelForCausalLM.from_pretrained(each) for each in (stock, place)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["accelerate", "pytorch"])
def test_wrong_input_of_a_loop_is_one_sentence(name, loop, checkpoints, data, tmp_path):
    common = importlib.import_module("common")
    texts, output = ["--train_file", data / "train.jsonl"], ["--output_dir", tmp_path]
    model = ["--model_name_or_path", checkpoints / "clm"]
    for argv, said in (
        (["--resume"], "--resume: '.*' has no checkpoint-N directory"),
        (texts, "texts need a checkpoint with a tokenizer; add --model_name_or_path"),
        (model, "there is no data; give --dataset_name, or --train_file"),
        ([*model, *texts, "--text_column_name", "x"], "no column 'x'; its columns are 'text'"),
        ([*model, *texts, "--block_size", "64"], "--block_size is 64, and the model takes at most 32"),
        (["--chunk_budget", "1KiB"], "chunk_budget is too small"),
    ):
        with pytest.raises((ValueError, FileNotFoundError, PatrickStarError), match=said) as caught:
            loop(name, *argv, *output)
        assert common.is_expected(caught.value)


CLM = ["--model_name_or_path", "{clm}", "--train_file"]
VIT = ["--model_name_or_path", "{more}/vit", "--do_train", "--dataset_name", "{more}/images"]
T5 = ["--model_name_or_path", "{more}/t5", "--train_file"]
TRL = ["--model_name_or_path", "{more}/words", "--dataset_name"]


@pytest.mark.parametrize(
    ("name", "argv", "said"),
    [
        ("streaming", [*CLM, "{train}"], "say with --max_steps"),
        ("streaming", [*CLM, "{tmp}/rows.csv", "--max_steps", "1"], "its columns are 'body'"),
        (
            "streaming",
            [*CLM, "{tmp}/rows.csv", "--max_steps", "1", "--text_column_name", "body"],
            "block of 32 tokens; lower --block_size",
        ),
        ("lora", [*CLM, "{train}", "--do_train", "--lora_target_modules", "absent"], "--lora_target_modules: Target"),
        ("seq2seq", [*CLM, "{train}", "--do_train"], "is no encoder-decoder"),
        ("vision", [*VIT, "--image_column_name", "x"], "the data has no column 'x'"),
        ("trl_sft", [*TRL, "{tmp}/rows.csv"], "has the columns 'body'; this trainer needs 'messages'; or .*'text'"),
        ("trl_sft", [*TRL, "{more}/sft.jsonl", "--do_eval"], r"no split 'test' \(it has: train\)"),
        ("trl_sft", [*TRL, "{tmp}/broken.jsonl"], "broken.jsonl' cannot be read: .*check that it can be parsed"),
    ],
)
def test_wrong_input_is_one_sentence(name, argv, said, folder, checkpoints, data, recipe, tmp_path):
    (tmp_path / "rows.csv").write_text("body\nthe fox\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    places = {"clm": checkpoints / "clm", "train": data / "train.txt", "tmp": tmp_path, "more": folder}
    output = tmp_path / "out"
    argv = [word.format(**places) for word in argv]
    with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
        recipe(name, *argv, "--output_dir", output, "--use_cpu", "--report_to", "none")
    sys.modules["common"].is_expected(caught.value) or pytest.fail("it would end in a traceback")
    assert not output.exists()


def test_a_stream_goes_on_where_it_was(checkpoints, data, recipe, tmp_path):
    argv = ["--model_name_or_path", checkpoints / "clm", "--train_file", data / "train.txt", "--block_size", "16"]
    argv += [*COMMON, *CHUNKS]
    argv[argv.index("--save_strategy") + 1] = "steps"
    argv += ["--save_steps", "2", "--output_dir"]
    recipe("streaming", *argv, tmp_path / "whole")
    recipe("streaming", *argv, tmp_path / "rest", "--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-2")
    whole, rest = recipe.trainers
    assert rest.state.global_step == 3
    assert_same_weights(whole.model, rest.model)
