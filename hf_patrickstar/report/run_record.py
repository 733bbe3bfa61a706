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
from collections.abc import Iterator, Mapping
from typing import Any

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.report.measured_step import timeline_from_dict, timeline_to_dict
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.schedule.clock import Timeline

logger = logging.getLogger(__name__)

RUN = "run.json"
STEPS = "steps.jsonl"
FORMAT = 1
"""The version of both files."""
_FORMER_FOLDER = "_patrickstar"
"""Where runs of earlier versions have their record, in their output directory."""
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
    """

    def __init__(self, output_dir: str | os.PathLike[str], about: Mapping[str, Any], *, is_resumed: bool) -> None:
        self._output_dir = os.path.realpath(output_dir)
        self._about = dict(about)
        self._written = ""
        self._timeline: dict[str, Any] | None = None
        self._is_on = True
        self._mode = "a" if is_resumed else "w"
        self._before = "\n" if is_resumed else ""  # ends a line that a kill has cut short

    def note_timeline(self, timeline: Timeline) -> None:
        """Takes the lanes of a step that was measured, which are written with the next survey."""
        self._timeline = timeline_to_dict(timeline)

    def note_length(self, length: int) -> None:
        """Takes the length of the longest sequence so far, which is written with the next survey."""
        self._about["length"] = length

    def note_survey(self, survey: Survey) -> None:
        """Writes a survey, if it is another one than the last."""
        values = {
            "format": FORMAT,
            "output_dir": self._output_dir,
            "about": self._about,
            "survey": survey.to_dict(),
        }
        text = json.dumps(values if self._timeline is None else {**values, "timeline": self._timeline})
        if not self._is_on or text == self._written:
            return
        try:
            folder = self._folder()
            partial = folder / f"{RUN}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / RUN)
        except OSError as error:
            self._give_up(error)
        self._written = text

    def note_step(self, values: Mapping[str, Any]) -> None:
        """Appends what was logged.

        Args:
            values: ``step``, and either figures of training or ``eval_loss``. Numbers that are not finite, which JSON
                does not have, become ``None``.
        """
        if not self._is_on:
            return
        line = json.dumps({name: _finite(value) for name, value in values.items()})
        try:
            with open(self._folder() / STEPS, self._mode, encoding="utf-8") as file:
                file.write(f"{self._before}{line}\n")
        except OSError as error:
            self._give_up(error)
        self._mode, self._before = "a", ""

    def _folder(self) -> pathlib.Path:
        folder = record_folder(self._output_dir)
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            _delete_old(folder.parent)
        return folder

    def _give_up(self, error: OSError) -> None:
        self._is_on = False
        logger.warning(
            "patrickstar: '%s' cannot be written (%s): nothing more is recorded for 'hf-patrickstar report'",
            error.filename,
            error.strerror,
        )


def _delete_old(place: pathlib.Path) -> None:
    found = []
    for path in place.iterdir():
        with contextlib.suppress(OSError):  # deleted by another process
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[:-_MOST_RECORDS]:
        shutil.rmtree(path, ignore_errors=True)


def read_run(output_dir: str | os.PathLike[str]) -> Run:
    """Reads the record of a run.

    Args:
        output_dir: The run's output directory.

    Raises:
        ConfigError: If there is no record, or it cannot be read.
    """
    folders = (record_folder(output_dir), pathlib.Path(output_dir) / _FORMER_FOLDER)
    folder = next((folder for folder in folders if (folder / RUN).is_file()), None)
    if folder is None:
        raise ConfigError(
            f"'{output_dir}' has no record of a run: name the output_dir of a run with --patrickstar that has logged a "
            "training loss, and that was not given --patrickstar_report false. Records are in the cache of the machine "
            f"('{folders[0].parent}'): if the run had another one, set HF_ASSETS_CACHE as it was there"
        )
    path = folder / RUN
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version, about, survey = values["format"], dict(values["about"]), Survey.from_dict(values["survey"])
        timeline = None if values.get("timeline") is None else timeline_from_dict(values["timeline"])
        lines = (folder / STEPS).read_text(encoding="utf-8").splitlines() if (folder / STEPS).is_file() else []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"'{path}' is not the record of a run: {type(error).__name__}: {error}; name the output_dir of another run"
        ) from error
    if version != FORMAT:
        raise ConfigError(
            f"'{path}' has format {version!r}, and this version reads {FORMAT}; use the version of hf_patrickstar "
            "that wrote it"
        )
    steps: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    for row in _rows(lines):
        others = evaluations if "eval_loss" in row else steps
        others[:] = [earlier for earlier in others if earlier["step"] < row["step"]]
        if others is steps:
            evaluations[:] = [earlier for earlier in evaluations if earlier["step"] < row["step"]]
        others.append(row)
    return Run(about, survey, tuple(steps), tuple(evaluations), timeline)


def _rows(lines: list[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # an empty line, or one that was cut short
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
