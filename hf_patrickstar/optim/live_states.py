"""The states of the user's own optimizer, whose readers wait for an update that is under way."""

import collections
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


class LiveStates(collections.defaultdict[Any, Any]):
    """``optimizer.state`` of a user's optimizer that updates chunks in another thread.

    The state of a parameter is given out, and replaced, after its update has ended. To count keys, or to go through
    them, waits for nothing: what runs in another thread adds none.

    Args:
        default_factory: See ``collections.defaultdict``.
        states: What the optimizer has kept so far.
        before_use: A method, which is held weakly. It is called with a parameter before its state is given out.
    """

    def __init__(
        self,
        default_factory: Callable[[], Any] | None,
        states: Any = (),
        before_use: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(default_factory, states)
        # The optimizer may outlive the engine, whose memory it would keep.
        self._before_use = None if before_use is None else weakref.WeakMethod(before_use)

    def turn_off(self) -> None:
        """Nothing is called any more."""
        self._before_use = None

    def _settle(self, key: Any) -> None:
        before_use = None if self._before_use is None else self._before_use()
        if before_use is not None:
            before_use(key)

    def _settle_all(self) -> None:
        for key in list(self):
            self._settle(key)

    def __iter__(self) -> Iterator[Any]:
        # ``dict(states)`` reads the entries of a dictionary that does not define this around its other methods.
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self._settle(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, state: Any) -> None:
        self._settle(key)
        super().__setitem__(key, state)

    def __delitem__(self, key: Any) -> None:
        self._settle(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """See ``dict``."""
        self._settle(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """See ``dict``."""
        self._settle(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """See ``dict``."""
        self._settle(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """See ``dict``."""
        self._settle_all()
        return super().popitem()

    def clear(self) -> None:
        """See ``dict``."""
        self._settle_all()
        super().clear()

    def update(self, *others: Any, **more: Any) -> None:
        """See ``dict``."""
        for key, state in dict(*others, **more).items():
            self[key] = state

    def values(self) -> Any:
        """See ``dict``."""
        self._settle_all()
        return super().values()

    def items(self) -> Any:
        """See ``dict``."""
        self._settle_all()
        return super().items()

    def copy(self) -> Any:
        """See ``dict``; the copy is an ordinary one."""
        return collections.defaultdict(self.default_factory, self.items())

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        self._settle_all()
        if isinstance(other, LiveStates):
            other._settle_all()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as of any dictionary

    def __repr__(self) -> str:
        return repr(self.copy())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return collections.defaultdict, (self.default_factory,), None, None, iter(self.items())


def peek(optimizer: torch.optim.Optimizer, parameter: Any) -> Any:
    """The state of a parameter as it is, without a wait; ``None`` if there is none.

    Args:
        optimizer: A user's optimizer.
        parameter: A parameter in its groups.
    """
    states = optimizer.state
    return dict.get(states, parameter) if type(states) is LiveStates else states.get(parameter)


def put(optimizer: torch.optim.Optimizer, parameter: Any, state: Any) -> None:
    """Sets the state of a parameter, without a wait; see ``peek``."""
    states = optimizer.state
    if type(states) is LiveStates:
        dict.__setitem__(states, parameter, state)
    else:
        states[parameter] = state


class _Owner:
    """Owns a dictionary as an optimizer does."""

    def __init__(self) -> None:
        self.state: Any = collections.defaultdict(dict)


def _num_references(owner: Any) -> int:
    return sys.getrefcount(owner.state)


def _is_held(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody holds the dictionary of states beside the optimizer."""
    return _num_references(optimizer) > _num_references(_Owner())


def make_live(optimizer: torch.optim.Optimizer, before_use: Callable[[Any], None]) -> LiveStates | None:
    """Gives an optimizer ``LiveStates`` in place of the dictionary that it has.

    Args:
        optimizer: A user's optimizer.
        before_use: See ``LiveStates``.

    Returns:
        What it has now. ``None`` if somebody else holds the dictionary too, who would read it without a wait; then it
        stays.
    """
    is_known = type(optimizer.state) in (collections.defaultdict, LiveStates)  # those of another engine before
    if not is_known or _is_held(optimizer):
        return None
    made = LiveStates(optimizer.state.default_factory, optimizer.state, before_use)
    optimizer.state = made
    return made


def make_ordinary(optimizer: torch.optim.Optimizer) -> None:
    """Undoes ``make_live``; a dictionary that somebody holds stays, and calls nothing any more."""
    states = optimizer.state
    assert isinstance(states, LiveStates)
    states.turn_off()
    del states
    if not _is_held(optimizer):
        optimizer.state = optimizer.state.copy()  # type: ignore[attr-defined]


def without_states(optimizer: torch.optim.Optimizer) -> Any:
    """Another optimizer with the same attributes, and with an empty dictionary of states of the kind that it has.

    ``copy.copy`` would read all states.

    Args:
        optimizer: A user's optimizer.
    """
    found = object.__new__(type(optimizer))
    kind: Any = collections.defaultdict if type(optimizer.state) is LiveStates else type(optimizer.state)
    is_default = issubclass(kind, collections.defaultdict)
    states = kind(optimizer.state.default_factory) if is_default else kind()  # type: ignore[attr-defined]
    found.__dict__.update(optimizer.__dict__, state=states)
    return found
