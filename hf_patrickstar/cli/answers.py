"""What ``hf-patrickstar plan`` has printed, so that the same question is answered without importing torch."""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib

from hf_patrickstar import plan_cache

_KIND = "answers"
_NOT_ASKED = ("run", "defaults", "json")
"""Options that change nothing that is printed."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What a plan or a search has come to.

    Attributes:
        texts: What was printed.
        data: What ``--json`` writes.
        status: The exit status.
        traces: The key of the traces that runs follow; ``None`` if there are none.
    """

    texts: list[str] = dataclasses.field(default_factory=list)
    data: str = ""
    status: int = 0
    traces: str | None = None

    def say(self, text: str) -> None:
        """Prints a text at once."""
        print(text, flush=True)
        self.texts.append(text)


def key_of(options: argparse.Namespace) -> str | None:
    """Names a question; ``None`` if its answer depends on more than options and files, or a page is to be written.

    Args:
        options: What was asked; a configuration on the hub is looked up there.
    """
    if options.script or options.html or options.model is None or options.machine == "this":
        return None
    names = [options.model, options.machine, options.peft or "", *(text.partition("=")[2] for text in options.set)]
    try:
        if not os.path.exists(options.model) and ":" not in options.model:
            from huggingface_hub import hf_hub_download

            names.append(hf_hub_download(options.model, "config.json"))
        found = [_read(name) for name in names]
    except Exception:  # what the hub raises may be anything; the plan tells it in a sentence
        return None
    asked = {name: value for name, value in vars(options).items() if name not in _NOT_ASKED}
    return plan_cache.digest([sorted(asked.items()), found])


def find(key: str) -> Answer | None:
    """The answer to a question that was asked before, if the traces for runs are there still."""
    found = plan_cache.read(_KIND, key)
    with contextlib.suppress(ValueError, TypeError):  # a damaged file
        answer = Answer(**json.loads(found or b""))
        if answer.traces is None or plan_cache.has_traces(answer.traces):
            return answer
    return None


def keep(key: str, answer: Answer) -> None:
    """Keeps the answer to a question."""
    plan_cache.write(_KIND, key, json.dumps(dataclasses.asdict(answer)).encode())


def _read(name: str) -> list[bytes]:
    """A file, or the JSON files of a directory."""
    path = pathlib.Path(name)
    if os.path.isfile(name):
        return [path.read_bytes()]
    return [file.read_bytes() for file in sorted(path.glob("*.json"))] if os.path.isdir(name) else []
