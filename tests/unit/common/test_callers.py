"""Which line of the user's a call comes from."""

import gc
import os
import runpy
import signal
import sys
import threading

import pytest
import torch

from hf_patrickstar.common import callers
from hf_patrickstar.common.callers import find_caller, frames_of_threads


def in_library(name, text, **scope):
    """A function of some library."""
    exec(f"def function(*_):\n    {text}", scope | {"__name__": name}, scope)
    return scope["function"]


def line_of(found):
    """The number of the line, and the rest."""
    path, _, rest = found.partition(":")
    number, _, rest = rest.partition(" ")
    assert path == __file__
    return int(number), rest


def test_the_innermost_line_of_the_user_the_function_and_what_it_says():
    number = test_the_innermost_line_of_the_user_the_function_and_what_it_says.__code__.co_firstlineno
    here = "test_the_innermost_line_of_the_user_the_function_and_what_it_says"
    found = [find_caller()]
    assert line_of(found[0]) == (number + 3, f"in {here}: found = [find_caller()]")
    sorted([2, 1], key=lambda _: found.append(find_caller()) or 0)
    assert line_of(found[1])[1].startswith("in <lambda>: sorted(")


@pytest.mark.parametrize("name", ["hf_patrickstar.engine", "numpy.x"])
def test_libraries_between_are_passed_over(name):
    found = []
    module = torch.nn.Identity()
    module.register_forward_hook(in_library(name, "found.append(find_caller())", found=found, find_caller=find_caller))
    module(torch.ones(1))
    assert line_of(found[0])[1] == "in test_libraries_between_are_passed_over: module(torch.ones(1))"


@pytest.mark.parametrize("name", ["transformers_of_mine", "my.torch"])
def test_scripts_and_modules_of_users(tmp_path, name):
    path = tmp_path / "script.py"
    path.write_text("from hf_patrickstar.common.callers import find_caller\n\nfound = find_caller()\n")
    found = runpy.run_path(str(path), run_name=name)["found"]
    assert found == f"{path}:3 in <module>: found = find_caller()"


def test_code_without_a_file_or_without_a_user():
    scope, found = {"__name__": "__main__", "find_caller": find_caller}, []
    exec(compile("found = find_caller()", "<made>", "exec"), scope)  # Python 3.13 knows lines of <string>: those of -c
    assert scope["found"] == "<made>:1 in <module>"
    function = in_library("torch.autograd", "found.append(find_caller())", found=found, find_caller=find_caller)
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
    assert found == [""]


def numbers_of_threads():
    with frames_of_threads() as frames:
        return set(frames)


def test_collections_begin_again_when_the_last_has_looked(monkeypatch):
    """A handler of a signal may look during a look, and so may another thread."""
    look, found, this = sys._current_frames, [], threading.get_ident()

    def interrupted():
        monkeypatch.setattr(sys, "_current_frames", look)
        found.append((this in numbers_of_threads(), gc.isenabled()))
        return look()

    monkeypatch.setattr(sys, "_current_frames", interrupted)
    assert this in numbers_of_threads()
    assert (found, gc.isenabled()) == ([(True, False)], True)
    begun, leave = threading.Event(), threading.Event()

    def look_long():
        with frames_of_threads():
            begun.set()
            leave.wait(5)

    with frames_of_threads():
        thread = threading.Thread(target=look_long)
        thread.start()
        assert begun.wait(5)
    assert not gc.isenabled(), "the other thread still looks"
    leave.set()
    thread.join(5)
    assert gc.isenabled()


def test_a_process_that_is_forked_while_a_thread_looks_collects_and_may_look():
    begun, leave = threading.Event(), threading.Event()

    def look():
        with frames_of_threads(), callers._looks._lock:
            begun.set()
            leave.wait(10)

    thread = threading.Thread(target=look)
    thread.start()
    assert begun.wait(5)
    child = os.fork()
    if not child:
        signal.alarm(5)  # instead of waiting for ever
        os._exit(0 if gc.isenabled() and threading.get_ident() in numbers_of_threads() and gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join(5)
    assert os.waitstatus_to_exitcode(status) == 0
    assert gc.isenabled()
