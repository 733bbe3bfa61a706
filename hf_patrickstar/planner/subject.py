"""What is planned: a model that is only a configuration, and the shapes of its batches."""

import ast
import copy
import dataclasses
import difflib
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.adapters import check_quantization, config_of, quantize, with_adapters
from hf_patrickstar.planner.optimizers import MakeOptimizer, find_optimizer
from hf_patrickstar.tracing.fake import as_fake

TASKS: Mapping[str, Any] = {
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
"""The classes of models by what they are trained for."""

_LENGTH = 4096
"""Tokens of a sequence where nobody says how many, at most."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_SIZES = (
    *("num_hidden_layers", "num_decoder_layers", "decoder_layers", "hidden_size", "num_attention_heads", "vocab_size"),
    *_POSITIONS,
)
"""What a model without has nothing to train."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its batches, as shapes.

    Attributes:
        name: What the model was called.
        task: What it is trained for; a key of ``TASKS``.
        config: Its configuration.
        batch_size: Sequences, or images, of a micro-batch on each process.
        length: Tokens of a sequence; for images, what one counts as.
        checkpointing: Whether activations are computed again in backward.
        adapters: Fields of a configuration of PEFT, of adapters that are trained over a frozen model, or ``None``.
        bits: In how many bits bitsandbytes packs the frozen model, 4 or 8, or ``None``.
        has_padding: Whether some tokens of a micro-batch are padding; see [Note: masks without values].
        is_packed: Whether a row of a micro-batch may be several sequences.
    """

    name: str
    task: str
    config: PretrainedConfig
    batch_size: int
    length: int
    checkpointing: bool
    adapters: Mapping[str, Any] | None = None
    bits: int | None = None
    has_padding: bool = False
    is_packed: bool = False
    _made: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, parts: object, make: Callable[[], _T]) -> _T:
        """What was made of this subject before, or else is made now: plans for other budgets need the same.

        Args:
            parts: What it depends on beside the subject, written alike by ``repr`` if it is alike.
            make: Makes it.
        """
        key = repr(parts)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def make_model(self) -> torch.nn.Module:
        """Makes the model with random weights; called under fake tensors, where they take no memory."""
        config = copy.deepcopy(self.config)
        make = TASKS[self.task][type(config)]
        model: Any
        if self.adapters is None:
            model = make(config)
        else:  # PEFT moves modules, which torch does for the meta device and not for fake tensors
            with unset_fake_temporarily(), torch.device("meta"):
                base = make(config)
            if self.bits is not None:
                quantize(base, self.bits)
            model = as_fake(with_adapters(base, self.adapters))
        model.train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    def make_inputs(self) -> dict[str, torch.Tensor]:
        """Makes a micro-batch as data collators of transformers do; of tokens with the mask that tokenizers give."""
        if self.task == "image-classification":
            size = self.config.image_size
            sides = (size, size) if isinstance(size, int) else tuple(size)
            pixels = torch.zeros((self.batch_size, self.config.num_channels, *sides), device="cpu")
            return {"pixel_values": pixels, "labels": torch.zeros(self.batch_size, dtype=torch.long, device="cpu")}
        tokens = torch.zeros((self.batch_size, self.length), dtype=torch.long, device="cpu")
        labels = tokens[:, 0] if self.task == "sequence-classification" else tokens
        takes_mask = "attention_mask" in inspect.signature(TASKS[self.task][type(self.config)].forward).parameters
        mask = {"attention_mask": torch.ones_like(tokens)} if takes_mask else {}
        return {"input_ids": tokens, **mask, "labels": labels.clone()}

    def compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Computes the loss of a micro-batch with the model; called under fake tensors."""
        return model(**inputs).loss

    def find_optimizer(self, name: str) -> MakeOptimizer | None:
        """What makes the optimizer; see ``find_optimizer``."""
        return find_optimizer(name)

    @property
    def can_have_adapters(self) -> bool:
        """Whether the model could be frozen, with adapters trained over it; a script adds adapters itself."""
        return self.adapters is None and self.task.endswith("-lm")

    @property
    def num_layers(self) -> int:
        """Layers of the model, of its encoder if it has two parts; 0 if its configuration does not say."""
        layers = getattr(self.config, "num_hidden_layers", 0)
        return layers if isinstance(layers, int) else 0

    def with_layers(self, num_layers: int) -> "Subject":
        """The same model with another number of layers; heads, hidden and vocabulary sizes are kept.

        Args:
            num_layers: Layers; of encoder and decoder each, if the model has both.
        """
        config = copy.deepcopy(self.config)
        before = self.num_layers
        for key, value in vars(config).items():  # what configurations say of each layer goes on as it begins
            if isinstance(value, list) and len(value) == before and before > 1 and key.startswith("layer"):
                setattr(config, key, [value[place % before] for place in range(num_layers)])
        for key in ("num_hidden_layers", "num_decoder_layers", "decoder_layers"):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, num_layers)
        return dataclasses.replace(self, config=config)

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch, or what else it is counted in."""
        return self.batch_size * (self.length if self.unit == "tokens" else 1)

    @property
    def unit(self) -> str:
        """What a batch is counted in: tokens or images."""
        return "images" if self.task == "image-classification" else "tokens"


def find_subject(
    model: str | PretrainedConfig,
    *,
    task: str | None = None,
    batch_size: int = 1,
    length: int | None = None,
    checkpointing: bool = False,
    adapters: Mapping[str, Any] | None = None,
    bits: int | None = None,
) -> Subject:
    """Finds a model by what a person writes.

    Args:
        model: A model id of the hub, a directory, a JSON file, ``TYPE:KEY=VALUE,...`` (a model type of transformers
            with some settings), or a configuration.
        task: A key of ``TASKS``; by default what the configuration was saved for, or is usual for the type.
        batch_size: See ``Subject``.
        length: Tokens of a sequence; by default as many as the model has positions, at most 4096.
        checkpointing: See ``Subject``.
        adapters: See ``Subject``.
        bits: See ``Subject``.

    Raises:
        ConfigError: If there is no such model, PEFT does not understand the adapters, or a number makes no
            sense for it.
    """
    name = model if isinstance(model, str) else model.model_type
    config = _find_config(model) if isinstance(model, str) else copy.deepcopy(model)
    _check_sizes(name, config)
    found = _find_task(config, task)
    positions = most_tokens(config)
    length = min(positions or _LENGTH, _LENGTH) if length is None else length
    for what, number in (("batch size", batch_size), ("sequence length", length)):
        if number < 1:
            raise ConfigError(f"{what}: must be at least 1, got {number}")
    if positions is not None and length > positions and found != "image-classification":
        raise ConfigError(
            f"sequence length {length}: '{name}' has {positions} positions; give at most that many (--seq-len)"
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training keeps no keys and values for generation
    if found == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # which token it is changes no shape
    if adapters is not None:
        config_of(adapters)  # before anything takes time
    check_quantization(bits, adapters is not None)
    return Subject(name, found, config, batch_size, length, checkpointing, adapters, bits)


def _check_sizes(name: str, config: PretrainedConfig) -> None:
    for key in _SIZES:
        size, own = getattr(config, key, None), config.attribute_map.get(key, key)
        is_none = size == 0 or key not in _POSITIONS  # -1 positions are no limit
        if isinstance(size, int) and size < 1 and is_none:
            raise ConfigError(f"model '{name}': {own} is {size}; it must be at least 1")


def _find_config(text: str) -> PretrainedConfig:
    if not text.strip():
        raise ConfigError(
            "the name of the model is empty; give a model id, a directory, a config.json, or TYPE:KEY=VALUE,..."
        )
    kind, colon, settings = text.partition(":")
    if os.path.exists(text):  # a pathlib.Path raises where a text is too long for a name
        return _from_hub(
            text,
            "the file or directory cannot be read as a configuration of transformers; give one that has a config.json",
        )
    if colon:
        return _from_type(kind, settings)
    if pathlib.Path(text).suffix == ".json":  # nobody calls a model so
        raise ConfigError(f"model '{text}': there is no such file; give the path of a config.json")
    return _from_hub(
        text,
        "it is no file or directory here, and the hub did not give a configuration of this name. Give a "
        "directory, a config.json, or TYPE:KEY=VALUE,... (gpt2:n_layer=48,n_embd=1600), which need no network",
    )


def _from_hub(text: str, problem: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(text)
    except Exception as error:  # what transformers raises about a value depends on the type of the model
        raise ConfigError(f"model '{text}': {problem} ({_said(error)})") from error


def _from_type(kind: str, settings: str) -> PretrainedConfig:
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; near are {', '.join(near)}" if near else "; write TYPE as the 'model_type' of a config.json"
        raise ConfigError(f"model '{kind}:': '{kind}' is not a model type of transformers{hint}")
    default = CONFIG_MAPPING[kind]()
    known = {*default.to_dict(), *default.attribute_map}
    values = {}
    for part in filter(None, settings.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"model '{kind}': '{part}' is no setting; write KEY=VALUE")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            advice = f"; near are {', '.join(near)}" if near else "; write KEY as in a config.json of this type"
            raise ConfigError(f"model '{kind}': its configuration has no '{key}'{advice}")
        values[key] = _parsed(value)
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # what transformers raises about a value depends on the type of the model
        raise ConfigError(f"model '{kind}': {_said(error)}; change the settings after '{kind}:'") from error


def _said(error: Exception) -> str:
    """What transformers says of a configuration, in a line; its checks of values name the check first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_check = isinstance(error, StrictDataclassError) and len(lines) > 1
    return lines[1 if is_check else 0].strip().rstrip(".")


def _parsed(value: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError):
        return value


def _find_task(config: PretrainedConfig, task: str | None) -> str:
    if task is not None:
        if task not in TASKS:
            raise ConfigError(f"task '{task}' is not known; known are {', '.join(TASKS)}")
        if type(config) not in TASKS[task]:
            raise ConfigError(
                f"task '{task}': transformers has no such model of type '{config.model_type}'; leave --task out to "
                "plan what it has"
            )
        return task
    able = [name for name, classes in TASKS.items() if type(config) in classes]
    saved = [getattr(transformers, name, None) for name in config.architectures or ()]
    for name in able:
        if TASKS[name][type(config)] in saved:
            return name
    if not able:
        raise ConfigError(
            f"model type '{config.model_type}': transformers has no class of it that is trained with a loss for "
            f"{', '.join(TASKS)}; plan a script that trains it, after --"
        )
    reads_both_ways = "masked-lm" in able and not getattr(config, "is_decoder", False) and not config.is_encoder_decoder
    return "masked-lm" if reads_both_ways else able[0]


def most_tokens(config: PretrainedConfig) -> int | None:
    """The longest sequence that a model has positions for; ``None`` if its configuration does not say."""
    found = [getattr(config, key, None) for key in _POSITIONS]
    return next((number for number in found if number is not None and number > 0), None)
