"""Functions of other libraries that are replaced while weights are saved or read: the complete list.

transformers, PEFT and Accelerate decide which tensor is in which file, and then call safetensors by the functions
below. Inside a ``with`` block each of these is replaced by a function that accepts deferred tensors; nothing else of
these libraries is changed. The replacement holds for the whole process, other threads included.

``tests/unit/checkpoint/test_patches.py`` fails, and names the entry, when a library no longer has a function there.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """A function that a module of another library calls by a name of its own.

    Attributes:
        module: The module.
        name: The name there.
        library: The library's name for ``importlib.metadata``.
        checked: The oldest and the newest version of the library that have it.
    """

    module: str
    name: str
    library: str
    checked: tuple[str, str]


SAVE_FILE = (
    Patch("safetensors.torch", "save_file", "safetensors", ("0.6", "0.8")),
    Patch("transformers.modeling_utils", "safe_save_file", "transformers", ("5.17", "5.23")),
    Patch("peft.peft_model", "safe_save_file", "peft", ("0.17", "0.21")),
    Patch("accelerate.utils.other", "safe_save_file", "accelerate", ("1.12", "1.15")),
)
"""``safetensors.torch.save_file``, replaced while a model is saved (``streamed_writing``)."""

SAFE_OPEN = (Patch("transformers.modeling_utils", "safe_open", "transformers", ("5.17", "5.23")),)
"""``safetensors.safe_open``, replaced inside of ``deferred_weights``."""

LOAD_STATE_DICT = (Patch("transformers.modeling_utils", "load_state_dict", "transformers", ("5.17", "5.23")),)
"""transformers' function that reads one file of weights, replaced inside of ``deferred_weights``."""


@contextlib.contextmanager
def replaced(patches: Sequence[Patch], replacement: Any) -> Iterator[None]:
    """Replaces a function inside of a block, wherever its modules are imported; afterwards all is as it was.

    Args:
        patches: Where the function is. A module that is not imported, or does not have the name, is skipped; a library
            that gets a deferred tensor all the same fails with an error, since the tensor has no bytes.
        replacement: What is called instead.
    """
    places = [
        (sys.modules[patch.module], patch.name)
        for patch in patches
        if hasattr(sys.modules.get(patch.module), patch.name)
    ]
    originals = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
