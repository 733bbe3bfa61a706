"""Other threads for tests: they raise what they raised."""

import contextlib
import threading

import torch


def in_threads(*functions):
    """Calls each function in a thread of its own, waits for all, and raises what the first of them raised."""
    errors = []

    def work(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def beside(function, *args):
    """Calls a function in a thread again and again while the block runs; raises what it raised."""
    has_ended, has_begun, errors = threading.Event(), threading.Event(), []

    def work():
        try:
            while not has_ended.is_set():
                function(*args)
                has_begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            has_begun.set()

    thread = threading.Thread(target=work, name="reader", daemon=True)
    thread.start()
    assert has_begun.wait(30)
    try:
        yield
    finally:
        has_ended.set()
        thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@torch.no_grad()
def read_parameters(model):
    for parameter in model.parameters():
        assert not parameter.norm().isnan()
        assert not parameter.data.isnan().any()


@torch.no_grad()
def read_state(model):
    assert not any(value.isnan().any() for value in model.state_dict().values())
