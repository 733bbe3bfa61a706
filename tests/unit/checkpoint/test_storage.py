"""Directories and files that exist whole or not at all, whatever fails on the way."""

import errno
import os
import signal
from pathlib import Path

import pytest

from hf_patrickstar.checkpoint import storage
from hf_patrickstar.checkpoint.storage import NewFile, StagedDirectory, remove_checkpoint, remove_leftovers
from hf_patrickstar.errors import CheckpointError

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(BaseException):
    """The process ends here."""


def write(path, text):
    (path / "sub").mkdir(parents=True, exist_ok=True)
    (path / "file").write_text(text)
    (path / "sub" / "file").write_text(text)


def contents(path):
    """The names of all that is in a directory, hidden or not, and the texts of files."""
    found = {}
    for folder, _, names in os.walk(path):
        found[os.path.relpath(folder, path)] = None
        found |= {os.path.relpath(f"{folder}/{name}", path): Path(folder, name).read_text() for name in names}
    found.pop(".", None)
    return found


def tree(name, text):
    return {name: None, f"{name}/sub": None, f"{name}/file": text, f"{name}/sub/file": text}


def stage(final, text="new"):
    staged = StagedDirectory(final)
    staged.begin()
    write(staged.path, text)
    return staged


def commit(final, text="new"):
    stage(final, text).commit()


def failing(monkeypatch, name, when, error):
    """Lets a function of ``os`` fail for some arguments."""
    original = getattr(os, name)

    def call(*args):
        if when(*map(str, args)):
            raise error
        return original(*args)

    monkeypatch.setattr(os, name, call)


def test_nothing_is_there_before_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    staged = stage("run/last/")
    assert staged.final == tmp_path / "run" / "last"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["_partial"]
    staged.commit()
    assert contents(tmp_path / "run") == tree("last", "new")


def test_an_older_one_is_replaced_and_files_of_others_stay(tmp_path):
    commit(tmp_path / "last", "old")
    for name in ("model-00002-of-00002.safetensors", "optimizer.pt", "random_states_3.pkl", "notes"):
        (tmp_path / "last" / name).touch()
    write(tmp_path / "last" / "logs", "theirs")
    commit(tmp_path / "last")
    assert contents(tmp_path) == tree("last", "new") | {"last/notes": ""} | {
        f"last/{name}": text for name, text in tree("logs", "theirs").items()
    }


def test_what_others_put_there_survives_a_kill(tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    (tmp_path / "last" / "notes").touch()
    staged = stage(tmp_path / "last")
    with monkeypatch.context() as context:
        failing(context, "rename", lambda source, target: target.endswith("last/notes"), Killed())
        with pytest.raises(Killed):
            staged.commit()
    staged.recover()
    staged.abandon()
    assert contents(tmp_path) == tree("last", "new") | {"last/notes": ""}


def test_the_current_directory_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "last", "mine")
    for folder in ("last", "last/sub"):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(CheckpointError, match="is the current directory, or around it and cannot be replaced"):
            StagedDirectory(tmp_path / "last").begin()
    assert contents(tmp_path) == tree("last", "mine")


KILLS = {
    "before the older one is renamed": (lambda source, target: "_replaced" in target, "old"),
    "between the two renames": (lambda source, target: target.endswith("/last") and "_partial" in source, "old"),
}


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, os.strerror(errno.EIO))], ids=["kill", "error"])
@pytest.mark.parametrize(("when", "expected"), KILLS.values(), ids=KILLS)
def test_a_commit_that_fails_or_is_killed_leaves_the_older_one(when, expected, error, tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    staged = stage(tmp_path / "last")
    with monkeypatch.context() as context:
        failing(context, "rename", when, error)
        with pytest.raises(Killed if isinstance(error, Killed) else CheckpointError):
            staged.commit()
    if isinstance(error, Killed):
        StagedDirectory(tmp_path / "last").recover()
    assert (tmp_path / "last" / "file").read_text() == expected
    staged.abandon()
    assert contents(tmp_path) == tree("last", expected)


@pytest.mark.parametrize("where", ["_replaced", "_removed"])
def test_a_kill_before_something_is_deleted(where, tmp_path, monkeypatch):
    """A checkpoint that was replaced, or rotated away, is out of sight; the next save deletes it."""
    commit(tmp_path / "last", "old")
    staged = stage(tmp_path / "last") if where == "_replaced" else None
    with monkeypatch.context() as context:
        delete = storage._remove_tree

        def kill(path):
            if path.exists() and any(path.glob("**/file")):
                raise Killed
            delete(path)

        context.setattr(storage, "_remove_tree", kill)
        with pytest.raises(Killed):
            staged.commit() if staged else remove_checkpoint(tmp_path / "last")
    assert (tmp_path / where).exists()
    assert (tmp_path / "last").exists() == bool(staged)
    commit(tmp_path / "last", "newer")
    assert contents(tmp_path) == tree("last", "newer")


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, original = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    staged = stage(tmp_path / "last")
    (staged.path / "link").symlink_to("nowhere")
    monkeypatch.setattr(os, "fsync", note)
    failing(monkeypatch, "rename", lambda *_: synced.append("rename"), None)
    before = len(os.listdir("/proc/self/fd"))
    staged.commit()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the directory is not locked any more"
    parts = {str(staged.path / name) for name in (".", "file", "sub", "sub/file")}
    assert set(synced[: synced.index("rename")]) == parts
    assert synced[-1] == str(tmp_path)


def test_leftovers_go_and_what_is_being_written_stays(tmp_path):
    """Whoever writes it, in this process or another; of a process that is gone only its directory is there."""
    begun = [stage(tmp_path / name) for name in ("mine", "killed", "theirs")]
    mine, killed, theirs = begun
    pid = os.fork()
    if not pid:  # holds the lock as long as it lives
        signal.pause()
    del begun, killed, theirs  # with their locks
    (tmp_path / "_partial" / "checkpoint-3").mkdir()  # of before there was a mark
    (tmp_path / "_partial" / "others").mkdir()
    write(tmp_path / "_removed" / "old", "old")
    remove_leftovers(tmp_path)
    assert not (tmp_path / "_removed").exists()
    assert sorted(os.listdir(tmp_path / "_partial")) == ["killed", "mine", "others", "theirs"], "the child has these"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    StagedDirectory(tmp_path / "new").begin()
    assert sorted(os.listdir(tmp_path / "_partial")) == ["mine", "new", "others"]
    (tmp_path / "_partial" / "others").rmdir()
    remove_leftovers(tmp_path)
    mine.commit()
    assert contents(tmp_path) == tree("mine", "new")
    remove_leftovers(tmp_path / "nowhere")


def test_files_and_links_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="_partial/last' cannot be written: Not a directory"):
        StagedDirectory(tmp_path / "file" / "last").begin()
    (tmp_path / "_partial").mkdir()
    (tmp_path / "_partial" / "last").touch()
    write(tmp_path / "target", "theirs")
    (tmp_path / "last").symlink_to("target")
    for text in ("new", "newer"):
        commit(tmp_path / "last", text)
        assert contents(tmp_path) == {"file": "", **tree("last", text), **tree("target", "theirs")}


def test_only_the_first_process_completes_a_directory(tmp_path):
    staged = stage(tmp_path / "last")
    assert [staged.commit(), staged.commit()] == [True, False]
    assert contents(tmp_path) == tree("last", "new")


# Files


@pytest.mark.parametrize("error", [NO_ROOM, RuntimeError("no room")])
def test_a_file_that_cannot_be_written(error, tmp_path):
    (tmp_path / "file").write_text("old")
    failing = pytest.raises(CheckpointError, match=f"file' cannot be written: .*{error.args[-1]}")
    with failing, NewFile.opened(tmp_path / "file", 8) as file:
        file.write(b"half")
        raise error
    assert contents(tmp_path) == {"file": "old"}
