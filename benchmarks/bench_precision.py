"""Compares 16-bit training with the stock Trainer's, on twenty tiny architectures.

Both trainers get ``--bf16``, the same weights and the same batches. The stock Trainer keeps fp32 parameters and
computes under autocast; ours keeps 16-bit parameters beside fp32 masters. Printed per architecture: the largest and the
median relative difference of losses and of gradient norms, and how many losses of ours a 16-bit number could hold.

    python benchmarks/bench_precision.py [--steps 10] [--only gpt2 t5] [--settings '{"autocast": false}']
"""

import json
import statistics
import tempfile

from common import finish, parser  # before torch

# isort: split
import torch
import transformers
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

VOCAB, LENGTH, SIZE, PIXELS = 128, 16, 32, 32
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 2 * SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **IDS,
}
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 2 * SIZE,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
    "pad_token_id": 0,
}
VISION = {
    "image_size": PIXELS,
    "patch_size": 8,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 2 * SIZE,
}


IMAGE = {"image_size": PIXELS, "num_labels": 3}
SPEECH = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0}
TEXT = {key: value for key, value in ENCODER.items() if "dropout" not in key and key != "num_labels"}
PAIRED = {
    "vocab_size": VOCAB,
    "d_model": SIZE,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 2 * SIZE,
    "decoder_ffn_dim": 2 * SIZE,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    **IDS,
}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": SIZE, "n_layer": 2, "n_head": 2, **IDS}
OPT = {"vocab_size": VOCAB, "hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, **IDS}
T5 = {"vocab_size": VOCAB, "d_model": SIZE, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, **IDS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": SIZE, "shared_expert_intermediate_size": SIZE}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}
CONVOLUTIONS = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
WAVE = {
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "layerdrop": 0.0,
}
SWIN = {"patch_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
CONVNEXT = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
CLIP = {"text_config": {**TEXT, **IDS}, "vision_config": VISION, "projection_dim": SIZE}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, **QUIET, "loss_type": "ForCausalLM"}, "causal"),
    "llama": ("LlamaForCausalLM", DECODER, "causal"),
    "qwen2": ("Qwen2ForCausalLM", DECODER, "causal"),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 16}, "causal"),
    "opt": ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": SIZE, "dropout": 0.0}, "causal"),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}, "causal"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "num_experts": 4}, "causal"),
    "bert": ("BertForSequenceClassification", ENCODER, "classes"),
    "bert_mlm": ("BertForMaskedLM", ENCODER, "causal"),
    "roberta": ("RobertaForMaskedLM", ENCODER, "causal"),
    "electra": ("ElectraForSequenceClassification", {**ENCODER, "embedding_size": SIZE}, "classes"),
    "albert": ("AlbertForSequenceClassification", {**ENCODER, "embedding_size": SIZE}, "classes"),
    "t5": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0, "decoder_start_token_id": 0}, "pair"),
    "bart": ("BartForConditionalGeneration", {**PAIRED, "max_position_embeddings": 64}, "pair"),
    "whisper": ("WhisperForConditionalGeneration", {**PAIRED, **WHISPER}, "speech"),
    "wav2vec2": ("Wav2Vec2ForCTC", {**WAVE, **SPEECH, **CONVOLUTIONS, "vocab_size": 16, "final_dropout": 0.0}, "wave"),
    "vit": ("ViTForImageClassification", {**VISION, "num_labels": 3}, "image"),
    "swin": ("SwinForImageClassification", {**IMAGE, **SWIN, "drop_path_rate": 0.0}, "image"),
    "convnext": ("ConvNextForImageClassification", {**IMAGE, **CONVNEXT}, "image"),
    "resnet": ("ResNetForImageClassification", {**RESNET, "num_labels": 3}, "image"),
    "clip": ("CLIPModel", CLIP, "captioned"),
}
"""A class of transformers, its configuration, and what its rows are."""


def make_model(name: str) -> torch.nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    kind = getattr(transformers, MODELS[name][0])
    return kind(kind.config_class(**MODELS[name][1]))


def make_rows(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    """The same data at every call."""
    generator = torch.Generator().manual_seed(1)

    def tokens() -> torch.Tensor:
        return torch.randint(3, VOCAB, (LENGTH,), generator=generator)

    def make_row() -> dict[str, torch.Tensor]:
        kind, ids = MODELS[name][2], tokens()
        label = torch.randint(0, 3, (), generator=generator)
        pixels = torch.randn(3, PIXELS, PIXELS, generator=generator)
        if kind == "image":
            return {"pixel_values": pixels, "labels": label}
        if kind == "captioned":
            ids[-1] = IDS["eos_token_id"]
            return {"input_ids": ids, "pixel_values": pixels}
        if kind == "speech":
            return {"input_features": torch.randn(8, 64, generator=generator), "labels": ids}
        if kind == "wave":
            return {"input_values": torch.randn(1600, generator=generator), "labels": 3 + ids[:4] % 13}
        return {"input_ids": ids, "labels": {"causal": ids.clone(), "classes": label, "pair": tokens()}[kind]}

    return [make_row() for _ in range(count)]


class Recorded:
    """Keeps losses as they were computed, and gradient norms, unrounded."""

    def __init__(self, *args, **kwargs):
        self.losses, self.norms = [], []
        super().__init__(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        """As the Trainer's."""
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def log(self, logs, *args, **kwargs):
        """As the Trainer's."""
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))
        super().log(logs, *args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """As the Trainer's; CLIP computes a loss if it is told to."""
        if "pixel_values" in inputs and "input_ids" in inputs:
            inputs = {**inputs, "return_loss": True}
        return super().compute_loss(model, inputs, *args, **kwargs)


class StockTrainer(Recorded, Trainer):
    """The stock Trainer."""


class OurTrainer(Recorded, PatrickStarTrainer):
    """Ours."""


def train(name, steps, is_ours, settings, device):
    """Losses and gradient norms of every step."""
    model, rows = make_model(name), make_rows(name, 4 * steps)
    kind = PatrickStarTrainingArguments if is_ours else TrainingArguments
    more = {"patrickstar": True, "patrickstar_config": settings} if is_ours else {}
    with tempfile.TemporaryDirectory() as directory:
        arguments = kind(
            output_dir=directory,
            per_device_train_batch_size=4,
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
            bf16=True,
            seed=7,
            **more,
        )
        trainer = (OurTrainer if is_ours else StockTrainer)(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)  # the table is what is to be read
        trainer.train()
    return trainer.losses, trainer.norms


def compare(name, options):
    """One row of the table."""
    settings = {"device_budget": "auto", **json.loads(options.settings)}
    stock = train(name, options.steps, False, None, options.device)
    ours = train(name, options.steps, True, settings, options.device)
    differences = [
        [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True)]
        for left, right in zip(stock, ours, strict=True)
    ]
    narrow = sum(torch.tensor(loss).bfloat16().item() == torch.tensor(loss).item() for loss in ours[0])
    return {
        "model": name,
        "largest_loss": max(differences[0]),
        "median_loss": statistics.median(differences[0]),
        "largest_norm": max(differences[1]),
        "median_norm": statistics.median(differences[1]),
        "num_16_bit_losses": narrow,
        "last_loss": [stock[0][-1], ours[0][-1]],
    }


def main():
    """Prints the table."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--settings", default="{}", help="settings of PatrickStar, as JSON")
    options = options.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    rows = []
    titles = ("loss: largest", "median", "norm: largest", "median", "16-bit losses")
    print(f"{'model':12s}" + "".join(f"{title:>15s}" for title in titles))
    for name in options.only:
        row = compare(name, options)
        rows.append(row)
        figures = (row[key] for key in ("largest_loss", "median_loss", "largest_norm", "median_norm"))
        narrow = f"{row['num_16_bit_losses']}/{options.steps}"
        print(f"{name:12s}" + "".join(f"{figure:15.1e}" for figure in figures) + f"{narrow:>15s}", flush=True)
    largest = max(max(row["largest_loss"], row["largest_norm"]) for row in rows)
    median = statistics.median(max(row["median_loss"], row["median_norm"]) for row in rows)
    print(f"{len(rows)} architectures, {options.steps} steps: largest difference {largest:.1e}, median {median:.1e}")
    finish("precision", options, {"settings": json.loads(options.settings), "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
