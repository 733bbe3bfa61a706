"""Keeps what was planned, so that the same question is answered at once; see ``hf_patrickstar.plan_cache``."""

import logging
import pickle
import zlib
from collections.abc import Callable
from typing import TypeVar

from hf_patrickstar import plan_cache
from hf_patrickstar.planner.subject import Subject
from hf_patrickstar.tracing.garbage import no_collections

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def kept(kind: str, subject: Subject, training: object, is_measured: bool, make: Callable[[], _T]) -> _T:
    """A result that was kept, or else one that is made and kept.

    What a script trains is never kept: nobody knows what it depends on. Nor is what was measured here, which is never
    the same twice.

    Args:
        kind: What is made.
        subject: What it is made of.
        training: How that is trained, written alike by ``repr`` if it is alike.
        is_measured: Whether it depends on measurements.
        make: Makes it.
    """
    if is_measured or type(subject) is not Subject:
        return make()
    key = plan_cache.digest([kind, *_parts_of(subject), training])
    found = plan_cache.read(kind, key)
    with no_collections():  # of some hundred thousand objects, none of which is garbage
        if found is not None:
            try:
                return pickle.loads(zlib.decompress(found))  # type: ignore[no-any-return]
            except Exception as error:  # what a damaged file raises may be anything
                logger.info("patrickstar: a plan that was kept cannot be read, and is made again: %s", error)
    made = make()
    with no_collections():
        plan_cache.write(kind, key, zlib.compress(pickle.dumps(made), 1))
    return made


def _parts_of(subject: Subject) -> list[object]:
    """What a subject is, written alike by ``repr`` if it is alike."""
    config = subject.config
    fields = {name: value for name, value in vars(subject).items() if name != "config"}
    text = config.to_json_string(use_diff=False)
    return [type(config).__qualname__, text, list(plan_cache.implementations(config)), sorted(fields.items())]
