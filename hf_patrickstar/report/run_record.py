"""What a run leaves for a report: small files, written by one process.

[Note: the record of a run]
The record is a directory in the user's cache, named after the path of the run's output directory: scripts count what is
in an output directory, or begin only in an empty one. ``run.json`` has what the run is and the latest survey of the
engine; it is replaced as a whole, by a rename, when the survey has changed. ``steps.jsonl`` has a line for each log,
which is appended by one write; a line that a kill has cut short is the last one, and is left out when the file is read.
A run that is resumed goes on with the file: a line of training makes all earlier lines of the same step and of later
ones void. A new record deletes the oldest where there are too many.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.schedule.clock import Lane, Span, Timeline, Wait

logger = logging.getLogger(__name__)

RUN = "run.json"
STEPS = "steps.jsonl"
FORMAT = 2
"""The version of both files."""
_MOST_RECORDS = 100


def record_folder(output_dir: str | os.PathLike[str]) -> pathlib.Path:
    """The directory of a run's record, which need not exist; see [Note: the record of a run].

    Args:
        output_dir: The run's output directory.

    Raises:
        OSError: If the cache cannot be made.
    """
    from huggingface_hub import cached_assets_path

    name = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()
    return cached_assets_path("hf_patrickstar", namespace="runs", subfolder="1") / name


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a run has recorded.

    Attributes:
        about: What the run is: ``model``, ``device``, ``num_parameters``, ``batch_size``, ``num_micro_batches``,
            ``world_size``, ``precision``, ``settings``, ``version``, ``checkpointing``; where batches have tokens,
            ``length``, that of the longest sequence so far.
        survey: The latest survey of the engine.
        steps: What was logged with each training loss, the earliest first; each has a ``step``.
        evaluations: ``step`` and ``eval_loss`` of each evaluation.
        timeline: The lanes of a step that was measured; ``None`` if none was.
    """

    about: Mapping[str, Any]
    survey: Survey
    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    timeline: Timeline | None = None


class RunRecorder:
    """Writes the record of a run; see [Note: the record of a run].

    A file that cannot be written ends the record with a warning, and never the training.

    Args:
        output_dir: The run's output directory.
        about: What the run is; see ``Run``.
        is_resumed: Whether the run goes on where an earlier one in the same directory has ended.

    Attributes:
        timeline: The lanes of a step that was measured, which are written with the next survey; ``None`` for none.
        length: The length of the longest sequence so far, which is written with the next survey; 0 for none.
    """

    def __init__(self, output_dir: str | os.PathLike[str], about: Mapping[str, Any], *, is_resumed: bool) -> None:
        self._output_dir = os.path.realpath(output_dir)
        self._about = dict(about)
        self._written = ""
        self.timeline: Timeline | None = None
        self.length = 0
        self._is_on = True
        self._mode = "a" if is_resumed else "w"
        self._before = "\n" if is_resumed else ""  # ends a line that a kill has cut short

    def note_survey(self, survey: Survey) -> None:
        """Writes a survey, if it is another one than the last."""
        timeline = None if self.timeline is None else dataclasses.asdict(self.timeline)
        about = self._about | ({"length": self.length} if self.length else {})
        values = {"format": FORMAT, "output_dir": self._output_dir, "about": about, "survey": survey.to_dict()}
        text = json.dumps({**values, "timeline": timeline})
        if text != self._written:
            self._written = text
            self._write(f"{RUN}.partial", "w", text)

    def note_step(self, values: Mapping[str, Any]) -> None:
        """Appends what was logged.

        Args:
            values: ``step``, and either figures of training or ``eval_loss``. Numbers that are not finite, which JSON
                does not have, become ``None``.
        """
        lost = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        row = {**values, **dict.fromkeys(lost)}
        self._write(STEPS, self._mode, f"{self._before}{json.dumps(row)}\n")
        self._mode, self._before = "a", ""

    def _write(self, name: str, mode: str, text: str) -> None:
        if not self._is_on:
            return
        try:
            folder = record_folder(self._output_dir)
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                _delete_old(folder.parent)
            with open(folder / name, mode, encoding="utf-8") as file:
                file.write(text)
            if name != STEPS:
                os.replace(folder / name, folder / RUN)
        except OSError as error:
            self._is_on = False
            why = f"'{error.filename}' cannot be written ({error.strerror})"
            logger.warning("patrickstar: %s: nothing more is recorded for 'hf-patrickstar report'", why)


def _delete_old(place: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # another process deletes them, too
        for path in sorted(place.iterdir(), key=os.path.getmtime)[:-_MOST_RECORDS]:
            shutil.rmtree(path, ignore_errors=True)


def read_run(output_dir: str | os.PathLike[str]) -> Run:
    """Reads the record of a run.

    Args:
        output_dir: The run's output directory.

    Raises:
        ConfigError: If there is no record, or it cannot be read.
    """
    folder = record_folder(output_dir)
    path = folder / RUN
    if not path.is_file():
        raise ConfigError(
            f"'{output_dir}' has no record of a run in '{folder.parent}'; name the output_dir of a run with "
            "--patrickstar that has logged a loss, or set HF_ASSETS_CACHE as in that run"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, and this version of hf_patrickstar reads {FORMAT}")
        timeline = None if values["timeline"] is None else _read_timeline(values["timeline"])
        about, survey = dict(values["about"]), Survey.from_dict(values["survey"])
        lines = (folder / STEPS).read_text(encoding="utf-8").splitlines() if (folder / STEPS).is_file() else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"'{path}' cannot be read: {type(error).__name__}: {error}; name the output_dir of another run"
        ) from error
    steps, evaluations = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for line in lines:
        with contextlib.suppress(ValueError):  # an empty line, or one that was cut short
            row = json.loads(line)
            for rows in (evaluations,) if "eval_loss" in row else (steps, evaluations):
                rows[:] = [earlier for earlier in rows if earlier["step"] < row["step"]]
            (evaluations if "eval_loss" in row else steps).append(row)
    return Run(about, survey, tuple(steps), tuple(evaluations), timeline)


def _read_timeline(values: Mapping[str, Any]) -> Timeline:
    spans = tuple(Span(Lane(lane), *others) for lane, *others in values["spans"])
    waits = tuple(Wait(**{**wait, "lane": Lane(wait["lane"])}) for wait in values["waits"])
    return Timeline(**{**values, "spans": spans, "waits": waits})
