"""Directories and files that exist whole or not at all, whatever fails on the way."""

import errno
import os
import signal

import pytest

from hf_patrickstar.checkpoint import storage
from hf_patrickstar.checkpoint.storage import (
    StagedDirectory,
    remove_checkpoint,
    remove_leftovers,
    remove_tree,
    replace_file,
)
from hf_patrickstar.errors import CheckpointError


class Killed(BaseException):
    """The process ends here."""


def write(path, text):
    (path / "sub").mkdir(parents=True, exist_ok=True)
    (path / "file").write_text(text)
    (path / "sub" / "file").write_text(text)


def contents(path):
    """The names of all that is in a directory, hidden or not, and the texts of files."""
    return {
        os.path.relpath(os.path.join(folder, name), path): open(os.path.join(folder, name)).read()
        for folder, _, names in os.walk(path)
        for name in names
    } | {os.path.relpath(folder, path): None for folder, _, _ in os.walk(path) if folder != str(path)}


def tree(name, text):
    return {name: None, f"{name}/sub": None, f"{name}/file": text, f"{name}/sub/file": text}


def commit(final, text):
    staged = StagedDirectory(final)
    staged.begin()
    write(staged.path, text)
    staged.commit()


def fail_rename(monkeypatch, when, error):
    """Lets ``os.rename`` fail for some sources and targets."""
    original = os.rename

    def rename(source, target):
        if when(str(source), str(target)):
            raise error
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)


def test_nothing_is_there_before_the_end(tmp_path):
    staged = StagedDirectory(f"{tmp_path}/run/last/")
    staged.begin()
    write(staged.path, "new")
    assert staged.final == tmp_path / "run" / "last"
    assert not staged.final.exists()
    assert [path.name for path in (tmp_path / "run").glob("[!_]*")] == []
    staged.commit()
    assert contents(tmp_path / "run") == tree("last", "new")


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit("last", "new")
    assert contents(tmp_path) == tree("last", "new")


def test_an_older_one_is_replaced(tmp_path):
    commit(tmp_path / "last", "old")
    for name in ("model-00002-of-00002.safetensors", "optimizer.pt", "random_states_3.pkl", "notes"):
        (tmp_path / "last" / name).touch()
    (tmp_path / "last" / "logs").mkdir()
    (tmp_path / "last" / "logs" / "events").write_text("old")
    commit(tmp_path / "last", "new")
    theirs = {"last/notes": "", "last/logs": None, "last/logs/events": "old"}
    assert contents(tmp_path) == tree("last", "new") | theirs


def test_what_others_put_there_survives_a_kill(tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    (tmp_path / "last" / "notes").touch()
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")
    with monkeypatch.context() as context:
        fail_rename(context, lambda source, target: target.endswith("last/notes"), Killed())
        with pytest.raises(Killed):
            staged.commit()
    staged.recover()
    staged.abandon()
    assert contents(tmp_path) == tree("last", "new") | {"last/notes": ""}


def test_the_current_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "last" / "inside").mkdir(parents=True)
    (tmp_path / "last" / "mine").touch()
    for folder in ("last", "last/inside"):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(CheckpointError, match="is the current directory, or around it and cannot be replaced"):
            StagedDirectory(tmp_path / "last").begin()
    assert (tmp_path / "last" / "mine").exists()


def test_abandoned(tmp_path):
    commit(tmp_path / "last", "old")
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")
    staged.abandon()
    staged.abandon()
    assert contents(tmp_path) == tree("last", "old")


def test_what_an_attempt_left_does_not_get_into_the_next(tmp_path):
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "left")
    (staged.path / "rest").touch()
    commit(tmp_path / "last", "new")
    assert contents(tmp_path) == tree("last", "new")


def test_others_that_are_on_their_way_are_left_alone(tmp_path):
    other = StagedDirectory(tmp_path / "other")
    other.begin()
    write(other.path, "other")
    commit(tmp_path / "last", "new")
    remove_checkpoint(tmp_path / "last")
    other.commit()
    assert contents(tmp_path) == tree("other", "other")


def test_a_kill_between_the_two_renames(tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")
    with monkeypatch.context() as context:
        fail_rename(context, lambda source, _: source == str(staged.path), Killed())
        with pytest.raises(Killed):
            staged.commit()
    assert not staged.final.exists()
    StagedDirectory(tmp_path / "last").recover()
    assert (tmp_path / "last" / "file").read_text() == "old"
    StagedDirectory(tmp_path / "last").begin()
    assert (tmp_path / "last" / "file").read_text() == "old"
    StagedDirectory(tmp_path / "last").abandon()
    assert contents(tmp_path) == tree("last", "old")


def test_a_kill_after_both_renames(tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")

    def kill(path):
        if path == tmp_path / "_replaced" / "last" and path.exists():
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(storage, "remove_tree", kill)
        with pytest.raises(Killed):
            staged.commit()
    assert (tmp_path / "_replaced").exists()
    staged = StagedDirectory(tmp_path / "last")
    staged.recover()
    staged.abandon()
    assert contents(tmp_path) == tree("last", "new")


RENAMES = {
    "the older one": lambda source, target: source.endswith("run/last"),
    "the new one": lambda source, target: target.endswith("run/last") and "_partial" in source,
}


@pytest.mark.parametrize("when", RENAMES.values(), ids=RENAMES)
def test_a_commit_that_fails_leaves_the_older_one(when, tmp_path, monkeypatch):
    final = tmp_path / "run" / "last"
    commit(final, "old")
    staged = StagedDirectory(final)
    staged.begin()
    write(staged.path, "new")
    with monkeypatch.context() as context:
        fail_rename(context, when, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(CheckpointError, match="run/last' cannot be written: Input/output error"):
            staged.commit()
    assert (final / "file").read_text() == "old"
    staged.abandon()
    assert contents(tmp_path / "run") == tree("last", "old")


def test_a_disk_that_does_not_take_it(tmp_path, monkeypatch):
    commit(tmp_path / "last", "old")
    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match="last' cannot be written: No space left on device"):
            staged.commit()
    staged.abandon()
    assert contents(tmp_path) == tree("last", "old")


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, original = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    staged = StagedDirectory(tmp_path / "last")
    staged.begin()
    write(staged.path, "new")
    (staged.path / "link").symlink_to("nowhere")
    monkeypatch.setattr(os, "fsync", note)
    fail_rename(monkeypatch, lambda source, target: synced.append("rename"), None)
    before = len(os.listdir("/proc/self/fd"))
    staged.commit()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the directory is not locked any more"
    parts = {str(staged.path / name) for name in ("", "file", "sub", "sub/file")}
    parts = {path.rstrip("/") for path in parts}
    assert set(synced[: synced.index("rename")]) == parts
    assert synced[-1] == str(tmp_path)


def test_leftovers_go_and_what_is_being_written_stays(tmp_path):
    """Whoever writes it, in this process or another; of a process that is gone only its directory is there."""
    begun = [StagedDirectory(tmp_path / name) for name in ("mine", "killed", "theirs")]
    for staged in begun:
        staged.begin()
        write(staged.path, "half")
    mine, killed, theirs = begun
    pid = os.fork()
    if not pid:  # holds the lock as long as it lives
        signal.pause()
    del begun, staged, killed, theirs  # with their locks
    (tmp_path / "_partial" / "checkpoint-3").mkdir()  # of before there was a mark
    (tmp_path / "_partial" / "others").mkdir()
    (tmp_path / "_removed" / "old").mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path / "_partial")) == ["killed", "mine", "others", "theirs"], (
        "the child has all of them"
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    StagedDirectory(tmp_path / "new").begin()
    assert sorted(os.listdir(tmp_path / "_partial")) == ["mine", "new", "others"]
    (tmp_path / "_partial" / "others").rmdir()
    remove_leftovers(tmp_path)
    mine.commit()
    assert contents(tmp_path) == tree("mine", "half")
    remove_leftovers(tmp_path / "nowhere")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="_partial/last' cannot be written: Not a directory"):
        StagedDirectory(tmp_path / "file" / "last").begin()
    (tmp_path / "_partial").mkdir()
    (tmp_path / "_partial" / "last").touch()
    commit(tmp_path / "last", "new")
    assert contents(tmp_path) == {"file": "", **tree("last", "new")}


def test_a_link_is_replaced_and_what_it_leads_to_is_not_touched(tmp_path):
    write(tmp_path / "target", "theirs")
    (tmp_path / "last").symlink_to("target")
    for text in ("new", "newer"):
        commit(tmp_path / "last", text)
        assert contents(tmp_path) == {**tree("last", text), **tree("target", "theirs")}


def test_remove_checkpoint(tmp_path):
    commit(tmp_path / "last", "old")
    commit(tmp_path / "other", "other")
    remove_checkpoint(tmp_path / "last")
    remove_checkpoint(tmp_path / "last")
    assert contents(tmp_path) == tree("other", "other")


def test_the_next_save_removes_what_a_kill_left_of_a_removal(tmp_path, monkeypatch):
    commit(tmp_path / "old", "old")

    def kill(_):
        raise Killed

    rename = os.rename
    with monkeypatch.context() as patch:
        # The kill comes after the directory got out of sight, before it is deleted.
        patch.setattr(
            storage.os, "rename", lambda *paths: (rename(*paths), patch.setattr(storage, "remove_tree", kill))
        )
        with pytest.raises(Killed):
            remove_checkpoint(tmp_path / "old")
    assert contents(tmp_path) != {}
    assert not (tmp_path / "old").exists()
    commit(tmp_path / "new", "new")
    assert contents(tmp_path) == tree("new", "new")


def test_remove_tree_of_anything(tmp_path):
    write(tmp_path / "a", "text")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").touch()
    for name in ("link", "file", "gone"):
        remove_tree(tmp_path / name)
    assert contents(tmp_path) == tree("a", "text")


@pytest.mark.parametrize("is_relative", [True, False])
def test_replace_file(is_relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = (tmp_path if not is_relative else type(tmp_path)()) / "file"
    replace_file(path, lambda temporary: temporary.write_text("old"))
    seen = []

    def write_new(temporary):
        temporary.write_text("new")
        seen.append(path.read_text())

    replace_file(path, write_new)
    assert seen == ["old"]
    assert contents(tmp_path) == {"file": "new"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no room")])
def test_replace_file_that_fails(error, tmp_path):
    (tmp_path / "file").write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises(CheckpointError, match=f"file' cannot be written: .*{error.args[-1]}"):
        replace_file(tmp_path / "file", fail)
    assert contents(tmp_path) == {"file": "old"}


def test_replace_file_that_cannot_be_named(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(CheckpointError, match=r"file' cannot be written: .*Is a directory"):
        replace_file(tmp_path / "file", lambda temporary: temporary.write_text("new"))
    assert contents(tmp_path) == {"file": None}
