"""Which line of the user's code a call of the engine comes from."""

import linecache
import sys
import types

_LIBRARIES = frozenset(
    {"accelerate", "datasets", "hf_patrickstar", "huggingface_hub", "numpy", "peft", "safetensors", "torch", "tqdm"}
    | {"transformers", "trl"}
)


def find_caller() -> str:
    """The innermost line of this thread that belongs to neither a library of Hugging Face, nor torch, nor Python.

    Returns:
        For example ``/home/me/train.py:12 in main: weights = model.state_dict()``; empty if there is none, as in the
        threads in which autograd works for an accelerator.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    code, scope = frame.f_code, frame.f_globals
    line = linecache.getline(code.co_filename, frame.f_lineno, scope).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}{': ' if line else ''}{line}"


def _is_library(frame: types.FrameType) -> bool:
    # By the names of modules: those of scripts and notebooks are "__main__", wherever their files are.
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return name in _LIBRARIES or name in sys.stdlib_module_names
