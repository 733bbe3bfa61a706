"""Tiny models of several architectures, made from configurations, and batches for them."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 96
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    **IDS,
}
"""Of a Llama and what has its settings."""


def gpt2(**changes):
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2, **IDS}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))


def bert_classifier():
    return BertForSequenceClassification(_bert_config())


def bert_mlm():
    return BertForMaskedLM(_bert_config())


def _bert_config():
    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=3,
        pad_token_id=0,
    )


def opt():
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        **IDS,
    )
    return OPTForCausalLM(config)


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def t5():
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    return T5ForConditionalGeneration(config)


def mixtral():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "intermediate_size": 48, **experts}))


MODELS = {
    "gpt2": gpt2,
    "bert": bert_classifier,
    "bert_mlm": bert_mlm,
    "opt": opt,
    "llama": llama,
    "t5": t5,
    "mixtral": mixtral,
}


def make_model(name, seed=0):
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


def make_rows(name, count, seed=1, length=16):
    """A list of examples as a data set gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "bert":
            row["labels"] = torch.randint(0, 3, (), generator=generator)
        elif name == "t5":
            row["labels"] = torch.randint(3, VOCAB, (length // 2,), generator=generator)
        else:
            row["labels"] = ids.clone()
        rows.append(row)
    return rows


def make_batch(name, size=4, seed=1, length=16):
    """A batch of such examples."""
    rows = make_rows(name, size, seed, length)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
