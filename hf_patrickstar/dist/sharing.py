"""Gives all ranks what one rank has at home: values, gradients, norms, states. All processes call these together."""

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError, CollectiveError
from hf_patrickstar.layout.specs import TensorSpec

Parts: TypeAlias = Sequence[tuple[int, int]]
"""The elements of a flat tensor that each rank has, as (start, stop)."""


class Held(NamedTuple):
    """What one rank has of a parameter, or of something that goes with it.

    Attributes:
        spec: The parameter.
        parts: The elements that each rank has.
        source: The tensor that this rank has at home, or a function that returns its elements from the first to one
            after the last, flat, on the host; not used on a rank that has no elements.
        dtype: The type to read it in, the same on all ranks that read.
        number: The number that identifies it in messages; by default the parameter's index.
        shape: Its shape, where it is a state, which need not have that of the parameter.
    """

    spec: TensorSpec
    parts: Parts
    source: torch.Tensor | Callable[[int, int], torch.Tensor] | None
    dtype: torch.dtype
    number: int | None = None
    shape: tuple[int, ...] = ()


class Sharing:
    """Gives all ranks copies, on the host, of what one rank has at home.

    Args:
        collectives: Sends the copies, and makes sure that all ranks ask for the same.

    Attributes:
        is_alone: Whether there is only one process.
        rank: This process.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.is_alone, self.rank = collectives.world_size == 1, collectives.rank
        self._collectives = collectives

    def enter(self, what: str) -> None:
        """Begins a call that all processes must make together; one that waits alone gives up, see ``dist/order.py``.

        Args:
            what: What the call does, as a verb phrase, for warnings and errors.
        """
        self._collectives.exchange(None, what, subject=f"enters: {what}", is_prompt=True)

    def meet(self, what: str) -> None:
        """Waits until all processes have come.

        Args:
            what: What a process does here, as a verb phrase, for warnings and errors.
        """
        self._collectives.exchange(None, what, subject="meets")

    def tensor(self, held: Held, name: str) -> torch.Tensor:
        """A copy of what the owners of a parameter have, in the parameter's shape.

        Args:
            held: The parameter, and what this rank has of it.
            name: What is read of the parameter, for errors.
        """
        numel = held.spec.numel
        (value,) = self.parts(held, name, 0, numel, max(numel, 1))
        source = held.source
        if isinstance(source, torch.Tensor) and value.untyped_storage()._cdata == source.untyped_storage()._cdata:
            value = value.clone()
        return value.view(held.spec.shape).data  # no view, which would keep its base alive as well

    def parts(
        self, held: Held, name: str, start: int, stop: int, piece_numel: int, *, is_prompt: bool = True
    ) -> Generator[torch.Tensor, None, None]:
        """Reads what the owners of a parameter have, in pieces. To skip the rest, close the generator.

        Args:
            held: The parameter, and what this rank has of it.
            name: What is read of the parameter, for errors.
            start: The first element of the flattened parameter.
            stop: One after the last element.
            piece_numel: Elements of a piece.
            is_prompt: Whether the other processes may not come; see ``dist/order.py``.

        Yields:
            Flat tensors on the host, which may alias the source; one empty tensor if there are no elements.
        """
        what = _reading(held, name)
        asked = (held.spec.index if held.number is None else held.number, start, stop, piece_numel, held.dtype)
        _, readers = self._ask(asked, what, is_prompt=is_prompt)
        yield from self._pieces(held, start, stop, piece_numel, what, readers)

    @contextlib.contextmanager
    def led(self, held_of: Callable[[int], Held], *, is_reader: bool) -> Iterator[None]:
        """Lets some processes read inside the block; the others serve these reads first, and then run the block.

        All processes must enter the block together.

        Args:
            held_of: Gives what this rank has of the parameter of a number that readers ask for.
            is_reader: Whether this process reads; all readers must read the same, in the same order.

        Raises:
            CheckpointError: On a process that does not read, if a reader failed.
            CollectiveError: If a process is gone, or does something else.
        """
        if not is_reader:
            self._serve(held_of)
        done = "has saved the model"  # this process reads nothing more
        try:
            yield
        except BaseException:
            if is_reader:
                with contextlib.suppress(CollectiveError):
                    self._ask((True,), done)
            raise
        if is_reader:
            self._ask((False,), done)

    def _serve(self, held_of: Callable[[int], Held]) -> None:
        """Takes part in the reads of other processes, until these end."""
        while True:
            asked, readers = self._ask(None, "follows the processes that save the model")
            if len(asked) == 1:
                (has_failed,) = asked
                if has_failed:
                    raise CheckpointError("the process that saves the model failed; its own error says why")
                return
            number, start, stop, piece_numel, dtype = asked
            held = held_of(number)._replace(dtype=dtype)
            for _ in self._pieces(held, start, stop, piece_numel, _reading(held, "the value"), readers):
                pass

    def _ask(
        self, asked: tuple[Any, ...] | None, what: str, *, is_prompt: bool = False
    ) -> tuple[tuple[Any, ...], list[int]]:
        """Finds out what is read next.

        Args:
            asked: What this rank reads, ``(has_failed,)`` if it reads nothing more, or ``None`` if it follows others.
            what: What this rank is about to do, as a verb phrase, for warnings and errors.
            is_prompt: See ``parts``.

        Returns:
            What the ranks ask for that do not follow, and these ranks.

        Raises:
            CollectiveError: If the readers do different things, or no process reads.
        """
        found = self._collectives.exchange(asked, what, subject="reads", is_prompt=is_prompt)
        readers = [rank for rank, item in enumerate(found) if item is not None]
        if len({found[rank] for rank in readers}) != 1:
            raise self._collectives.disagreement(what)
        return found[readers[0]], readers

    def _pieces(
        self, held: Held, start: int, stop: int, piece_numel: int, what: str, readers: list[int]
    ) -> Generator[torch.Tensor, None, None]:
        """Yields one piece after the other; the next piece is sent while the caller uses the one before."""

        def begin_piece(begin: int) -> tuple[torch.Tensor, Sequence[Callable[[], None]]]:
            return self._begin_piece(held, begin, min(begin + piece_numel, stop), what, readers)

        begins = iter(range(start, max(stop, start + 1), piece_numel))
        on_their_way = [begin_piece(next(begins))]
        try:
            while on_their_way:
                on_their_way += [begin_piece(begin) for begin in itertools.islice(begins, 1)]
                yield _arrived(*on_their_way.pop(0))
        except GeneratorExit:  # this caller stops, but the other ranks send all pieces
            for piece in itertools.chain(on_their_way, map(begin_piece, begins)):
                _arrived(*piece)
            raise

    def _begin_piece(
        self, held: Held, start: int, stop: int, what: str, readers: list[int]
    ) -> tuple[torch.Tensor, Sequence[Callable[[], None]]]:
        """Starts to send a piece; returns it, and functions that wait until it is complete."""
        _, parts, source, dtype, *_ = held
        first, last = parts[self.rank]
        if readers == [self.rank] and first <= start and stop <= last and source is not None:
            return _elements(source, start - first, stop - first).to(device="cpu", dtype=dtype), ()
        value = torch.zeros(stop - start, dtype=dtype, device="cpu")
        waits = []
        for rank, (first, last) in enumerate(parts):
            low, high = max(first, start), min(last, stop)
            is_sent = readers != [rank]  # only its owner reads it
            if low >= high or not (is_sent or rank == self.rank):
                continue
            piece = value[low - start : high - start]
            if rank == self.rank:
                assert source is not None
                piece.copy_(_elements(source, low - first, high - first))
            if is_sent:
                waits.append(self._collectives.begin_broadcast(piece, rank, what))
        return value, waits

    def scalars(self, found: Mapping[int, torch.Tensor], num: int) -> torch.Tensor:
        """Combines scalars of all ranks into one vector, the same on all ranks.

        Args:
            found: The scalars of this rank, by their places in the vector.
            num: The number of scalars of all ranks.

        Returns:
            The vector, in fp32, on the host.
        """
        what = f"computes the norm of {num} gradients"
        self._collectives.exchange(None, what, is_prompt=True)
        vector = torch.zeros(num, dtype=torch.float32, device="cpu")
        places: dict[torch.device, list[int]] = {}
        for place, scalar in found.items():
            places.setdefault(scalar.device, []).append(place)
        for some in places.values():  # one copy per device, and one wait for it
            vector[some] = torch.stack([found[place].float() for place in some]).cpu()
        self._collectives.all_reduce(vector, what)
        return vector

    def outline_states(
        self, own: Mapping[int, Mapping[str, Any]], place_of: Callable[[int], tuple[TensorSpec, Parts]]
    ) -> dict[int, dict[str, Any]]:
        """Lists the optimizer states of all ranks, so that ``parts`` can read them.

        Args:
            own: The states of this rank, by tensor index.
            place_of: Gives the parameter of an index, and the elements of it that each rank has.

        Returns:
            The states by index, the same on all ranks: what this rank has of a tensor, which one rank has or several
            have parts of, numbered; anything else as it is.
        """
        outlines = {index: {key: _outline(value) for key, value in state.items()} for index, state in own.items()}
        states: dict[int, dict[str, Any]] = {}
        numbers = itertools.count()
        for rank, found in enumerate(self._collectives.exchange(outlines, _READING_STATES)):
            for index, state in found.items():
                spec, parts = place_of(index)
                for key, (shape, value) in state.items():
                    if shape is not None:
                        place = parts, spec.shape
                        is_split = sum(stop > start for start, stop in parts) > 1
                        if not (is_split and shape == (parts[rank][1] - parts[rank][0],)):
                            numels = [math.prod(shape) if other == rank else 0 for other in range(len(parts))]
                            place = [(0, numel) for numel in numels], shape
                        value = Held(spec, place[0], own.get(index, {}).get(key), value, next(numbers), place[1])
                    states.setdefault(index, {})[key] = value
        return dict(sorted(states.items()))

    def states(
        self, own: Mapping[int, Mapping[str, Any]], place_of: Callable[[int], tuple[TensorSpec, Parts]]
    ) -> dict[int, dict[str, Any]]:
        """The optimizer states of all ranks together.

        Args:
            own: The states of this rank, by tensor index.
            place_of: Gives the parameter of an index, and the elements of it that each rank has.
        """
        if self.is_alone:
            return {index: dict(state) for index, state in own.items()}
        self.enter(_READING_STATES)
        states = self.outline_states(own, place_of)
        for state in states.values():
            for key, item in state.items():
                if isinstance(item, Held):
                    numel, everyone = math.prod(item.shape), list(range(self._collectives.world_size))
                    (value,) = self._pieces(item, 0, numel, max(numel, 1), _READING_STATES, everyone)
                    state[key] = value.view(item.shape)
        return states


_READING_STATES = "reads the optimizer's state"


def _elements(source: torch.Tensor | Callable[[int, int], torch.Tensor], start: int, stop: int) -> torch.Tensor:
    return source.reshape(-1)[start:stop] if isinstance(source, torch.Tensor) else source(start, stop)


def _reading(held: Held, name: str) -> str:
    return f"reads {name} of parameter '{held.spec.name}' as {held.dtype}"


def _arrived(value: torch.Tensor, waits: Sequence[Callable[[], None]]) -> torch.Tensor:
    for wait in waits:
        wait()
    return value


def _outline(value: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Shape and type of a tensor that is worth a broadcast of its own; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() and not is_traceable_wrapper_subclass(value):
        return tuple(value.shape), value.dtype
    return None, value
