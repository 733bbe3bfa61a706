"""What tests see of the inside of an engine: what is behind its public face is named in this file alone.

Chunks and their parameters are given as the engine has them. Of a chunk, tests read where it lives (``home``), what it
holds (``spec``, ``tensors``, ``param``, ``lists``, ``payloads``), and what it is doing (``update``, ``wait``); of a
parameter its place (``chunk``, ``view``, ``parts``). Should these change, views of them go here.
"""

import contextlib

import pytest

from hf_patrickstar.memory.streams import Copy
from hf_patrickstar.model import live_parameter as _live_parameter
from hf_patrickstar.model import lock as _lock
from hf_patrickstar.runtime import activations as _activations
from hf_patrickstar.runtime import steps as _steps
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.groups import Groups
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.schedule.trace import KnownTraces

# Where tests step in: what ``getattr`` and ``monkeypatch.setattr`` ask for first

MOVE_HOME = Chunk, "move_home"
"""Moves the home of a chunk to a tier: ``(chunk, tier)``."""
NOTE_UPDATES = ChunkManager, "chunks_updated"
"""Notes that updates of chunks have begun."""
DO_COLLECTIVES = Groups, "perform"
"""Does collectives: ``(groups, collectives)``, each with its subject and the index of a chunk."""
CORRECT_TRACE = _steps.Steps, "_correct"
"""Corrects what was estimated by what was measured."""
MOST_VISITS = _steps, "MOST_VISITS"
"""How many visits are noted of a forward that meets no backward."""
EAGER_NBYTES = _activations, "_EAGER_NBYTES"
"""The least activation that leaves before anything is known of the step."""
OPERATOR_WRITES = _live_parameter, "_written"
"""Says which parameters an operator writes to; called when torch has looked at the class of a parameter."""


@contextlib.contextmanager
def recorded(is_recorded=True):
    """Inside, no engine estimates its first steps: they are recorded."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_recorded:
            record_first_steps(monkeypatch)
        yield


def record_first_steps(monkeypatch):
    """No engine estimates its first steps: they are recorded."""
    monkeypatch.setattr("hf_patrickstar.engine.make_estimator", lambda *_: None)


def shorten_waits(monkeypatch, seconds):
    """A thread waits so long for another one, and not a minute."""
    monkeypatch.setattr(_lock, "_LIMIT_S", seconds)


# Chunks and parameters


def chunks(engine):
    """All chunks of this process, in order."""
    return engine.chunks


def in_order_of_use(engine):
    """The chunks in the order in which the next forward comes to them."""
    return engine.manager.in_order_of_use


def tensors(engine):
    """All parameters in chunks."""
    return engine.manager.tensors


def find(engine, parameter):
    """What the engine has of a parameter of the model, or ``None``."""
    return engine.manager.find(parameter)


def homes(engine):
    """The tiers where chunks live."""
    return {chunk.home for chunk in chunks(engine)}


def num_under_way(engine):
    """How many chunks are being updated beside what the caller does."""
    updates = [chunk.update for chunk in chunks(engine)]
    return sum(isinstance(update, Copy) and not update.is_done for update in updates)


def is_of_update(otherwise):
    """Whether what the thread of the host does if its work fails belongs to the update of a chunk."""
    return isinstance(getattr(otherwise, "__self__", None), Update)


def reserve_anew(engine):
    """Gives the workspace of updates back, and reserves what is needed now."""
    engine._payloads.reserve_anew(chunks(engine))


# Steps


def traces(engine):
    """What micro-batches do, as recorded, planned or estimated: by key."""
    return engine.traces


def at_rest(engine, trace):
    """A trace with the gradients that stay where nothing moves, though tensors without bytes never rest."""
    manager = engine.manager
    is_moving = manager.device.moves or trace.num_offloaded or not manager.sharing.is_alone
    return trace if is_moving else trace.at_rest(manager.rest._gradient_nbytes())


def step(engine):
    """The micro-batch that runs, or ``None``: its ``visits``, its ``cursor`` in a trace, its ``plan``."""
    return engine.manager.steps.step


def known(engine):
    """What a plan would have left for this run."""
    return KnownTraces(engine.manager.steps.known.key, traces(engine), lookups(engine))


def unwind(engine):
    """Ends what an interrupted forward has left open."""
    engine.manager.unwind()


def estimate_never(engine):
    """The engine estimates no step from here on."""
    engine.manager.steps.estimator = None


def is_timed(engine):
    """Whether the lanes of the next step are timed."""
    return engine.manager.steps.durations.times is not None or engine.resources.streams._times is not None


# Where things are


def lookups(engine):
    """Where rows of embeddings are looked up, by name."""
    return engine.manager.evictor.lookups


def estimated(engine):
    """What a step is estimated to cost."""
    return engine.manager.evictor.estimated


def in_margin(engine):
    """The indices of chunks whose home is in the device margin."""
    return frozenset(engine.manager.evictor.in_margin)


def spilled(engine):
    """The indices of chunks that live on the device because the host has no room for them."""
    return frozenset(engine._decisions.homes.margin)


def chunk_nbytes(engine):
    """The bytes of each chunk with all its lists, by tier."""
    return engine.manager.evictor.nbytes


def leave_margin(engine):
    """What larger inputs do: chunks whose home is in the device margin leave it."""
    engine.manager.evictor.leave_margin()


def evict_unused(engine):
    """What large activations do: every copy that may leave the device leaves it."""
    engine.manager.device.evict_unused()


def make_room(engine, nbytes):
    """Makes room for a chunk of this size on the device."""
    engine.manager.evictor.make_room(nbytes)


def activations(engine):
    """What brings activations away and back."""
    return engine.manager.activations


def gradients(engine):
    """What knows where each gradient is."""
    return engine.manager.gradients


def mirrors(engine):
    """What users hold of values: tensors that are kept equal to parameters."""
    return [mirror.value for some in engine.manager.mirrors.by_tensor.values() for mirror in some]


def waiting_threads(engine):
    """Threads that wait until another one is out of the model."""
    return engine.manager.lock._waiting


def held(engine):
    """Other threads that begin a forward, a backward or a step wait until the block ends."""
    return engine.manager.lock.held("a test")
