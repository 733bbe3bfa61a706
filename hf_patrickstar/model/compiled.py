"""Parts of a model that are compiled: the engine's hooks run around them, and dynamo sees nothing of the engine.

[Note: compiled parts]
Dynamo traces the Python code of what is compiled, hooks of modules included, and notes what each tensor is like that it
finds; what the engine does to parameters meanwhile is what its guards would fail on. So a compiled module computes as
one: all parameters inside of it have their values before its compiled call begins and until that has ended, and the
modules inside have no hooks. The graph is then the one of the model without the engine.

Other code that is compiled, a function that calls a module for example, meets the hooks. Dynamo skips this package: a
graph ends where a hook begins, the hook runs as it is written, and the next graph begins after it. Of a parameter that
has no value dynamo notes the placeholder, since its guards look at that.

A recomputation must run the graphs of its forward, since checkpointing compares what they keep. Frozen parameters are
aliases there, and what guards look at is the same as in the forward: class, attributes, and which of them are one.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

NAMES_OF_CALLS = ("_compiled_call_impl", "forward")
"""The attributes of a module that change when it is compiled."""


def hide_from_dynamo() -> None:
    """Lets dynamo skip this package, from now on."""
    # Whatever optimizer of torch there is has imported it, which takes as long as importing torch.
    from torch._dynamo import trace_rules

    if not trace_rules.check_file(__file__).skipped:
        trace_rules.add(__package__.partition(".")[0])


def ends_graphs(function: Any) -> Any:
    """Decorates what dynamo meets first of this package: with ``fullgraph=True`` its error tells what to do."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = (
        "the engine gives a parameter its value while the module that has it computes, and a graph ends where that "
        "begins; compile the module whose forward calls this function (module.compile()), or leave fullgraph=True out"
    )
    return function


@ends_graphs
def is_dynamo_tracing() -> bool:
    """Whether dynamo is at work on this thread and asks what the tensor is like; see [Note: compiled parts]."""
    return torch._guards.TracingContext.try_get() is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled as a whole: by ``module.compile()``, ``torch.compile(module)`` or by its forward."""
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_inline")


def may_be_traced(module: torch.nn.Module) -> bool:
    """Whether guards may look at the parameters of a module: it is compiled, or functions are that it may call."""
    from torch._dynamo import convert_frame

    return is_compiled(module) or convert_frame.FRAME_COUNTER > 0


def calls_of(module: torch.nn.Module) -> list[Any]:
    """What of a module changes when it is compiled."""
    return [module.__dict__.get(name) for name in NAMES_OF_CALLS]


def stand_in(parameter: torch.Tensor, value: torch.Tensor, cls: type) -> torch.Tensor:
    """Makes a frozen parameter that a graph takes as it takes another one.

    Args:
        parameter: The parameter that it stands in for.
        value: Its value.
        cls: The class of ``parameter`` while it has its value: graphs are only for parameters of one class.
    """
    made: Any = torch.Tensor._make_subclass(cls, value)
    made.__dict__.update((name, found) for name, found in parameter.__dict__.items() if name != "_live")
    return made


class CompiledCall:
    """Calls what ``module.compile()`` has made, with hooks around it, as long as it is not removed.

    Hooks of torch's would be traced, since they are a part of what was compiled.

    Args:
        module: The module.
        before: The hook before the call; see ``register_forward_pre_hook`` with ``with_kwargs``.
        after: The hook after the call, even if it raises; see ``register_forward_hook``.

    Attributes:
        id: Differs from those of torch's hooks.
    """

    id = -1

    def __init__(self, module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._call: Any = module._compiled_call_impl
        self._before, self._after = before, after
        module.__dict__["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled forward of the module, between what runs before and after it."""
        module = self._module()
        try:
            args, kwargs = self._before(module, args, kwargs) or (args, kwargs)
            output = self._call(*args, **kwargs)
        except Exception:  # as in torch: a forward that was interrupted is unwound later
            self._after(module, args, None)
            raise
        changed = self._after(module, args, output)
        return output if changed is None else changed

    def remove(self) -> None:
        """Puts the call back, if it was not compiled anew meanwhile."""
        if (module := self._module()) is not None and module._compiled_call_impl is self:
            module.__dict__["_compiled_call_impl"] = self._call
