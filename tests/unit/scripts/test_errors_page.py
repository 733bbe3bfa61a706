"""The search of ``docs/errors.md`` has every error of the package, and every message for a user says what to do."""

import json
import pathlib
import re

import pytest

import hf_patrickstar

ROOT = pathlib.Path(hf_patrickstar.__file__).parent

WITHOUT_REMEDY = {
    # They repeat the message of another error, which has the remedy.
    "rank <rank> cannot load the checkpoint: <text>",
    "<problem>; what it printed is in <log>",
    "'<path>' cannot be written: <value>",
    "checkpoint '<final>' was not written: <text> on rank <rank>. Earlier ones are as they were",
    "checkpoint '<final>' cannot be written: <text>. Earlier ones are as they were",
    "checkpoint '<final>' was not completed: <text>. Earlier ones are as they were",
    # What helps depends on the run; it is found, and follows, when somebody reads them.
    "<place> has too little memory: <bytes> more needed for '<owner>', <value> left of <bytes of needs>. <the table of "
    "what takes memory>",
    "<place> has too little memory for what a module computes: <need> of <bytes of limit> are needed there (<kind> "
    "<size>). Chunks <index of other> are in use: it computes with <names>, a recomputed segment keeps all of its "
    "parameters, and saved-tensors hooks that a module puts on itself keep those that they return as they are.",
    "<setting> is too small for the gradients of group <index of chunk>: <need> of <bytes of limit> are needed there "
    "(<kind> <size>).",
    "host_budget and device_budget are together too small for the model data: <on host> (<kind> <bytes>), for which "
    "the host has <host bytes>; the device, where a step needs <on device>, has <device bytes>, too little for "
    "the rest",
    "host_budget and device_budget are together too small for the model data: <on host> (<kind> <bytes>), for which "
    "the host has <host bytes>; the device, where a step needs <on device>, has <device bytes>, too little for "
    "the rest, and the disk <disk bytes>",
    "<device>: out of memory. The micro-batch failed. Parameters and gradients are as before it. The device itself has "
    "no more, which no setting changes: <failure>",
    "<device>: out of memory. The micro-batch failed. Parameters are as before it. Parts of it had been added to "
    "earlier micro-batches', so all gradients of this step are dropped. The device itself has no more, which no "
    "setting changes: <failure>",
    # They check what the package itself hands over; a user meets none of them.
    "<what>: needs scratch space of <numels> elements and <numels> of fp32",
    "a buffer of shape <shape of buffer> is not <world size> equal slices one after the other",
    # The first step is recorded then, and a log says it: there is nothing to do.
    "parameter '<spec>' is not managed",
    "no output of the model has a gradient",
    "recording a micro-batch with tensors without bytes took longer than 60.0 s",
    "the model does what a trace has no word for: it reads a parameter through .data or detach(), evaluates inside of "
    "its forward, or changes an embedding that is looked up on the CPU",
    "the model asks for the value of a tensor (line <f lineno> of <co filename>), which tensors without bytes do not "
    "have",
    "the model calls the collective '<name>', which nobody answers while its operators are recorded with tensors "
    "without bytes",
    "the model calls operator '<func>', whose result depends on values that tensors without bytes do not have (<type "
    "of error>: <error>)",
}


@pytest.fixture(scope="module")
def page(script):
    return script("site/errors_page.py")


@pytest.fixture(scope="module")
def package(page):
    return page.Package()


@pytest.fixture(scope="module")
def messages(page, package):
    found = page.read_messages(package)
    assert len(found) > 200
    return found


def test_the_page_quotes_messages_that_exist(page, messages):
    text = page.PAGE.read_text()
    quoted = dict(re.findall(r'^- "`(.*?)`" \(`(\w+)`\):', text, re.MULTILINE))
    assert len(quoted) == 5
    for part, kind in quoted.items():
        assert any(part in message.raised.text and message.raised.kind == kind for message in messages), part


def test_the_site_can_search_every_message(page, package, messages):
    """The data is a script, since a browser reads no other file from a page that lies on a disk."""
    start, end = "window.errorMessages = ", ";\n"
    data = page.write_data(package)
    assert data.startswith(start)
    rows = json.loads(data.removeprefix(start).removesuffix(end))
    assert len(rows) == len(messages)
    message = "patrickstar_config: unknown key '<key>'", "Did you mean '<near>'? Known: <field>."
    assert ["ConfigError", *message] in rows
    searched = page.with_search(page.PAGE.read_text())
    assert f'<script src="{page.DATA}"></script>' in searched


def test_every_message_of_the_package_says_what_to_do(package, messages):
    own = [message for message in messages if message.raised.kind in package.classes]
    assert len(own) > 200
    assert {message.raised.text for message in own if not message.remedy} == WITHOUT_REMEDY


CAUGHT = {
    "AssertionError": "says that the package is wrong",
    "IrregularError": "then a model runs with all of its blocks",
    "TimeoutError": "then operators are timed alone",
}
"""Errors that no user meets."""


def test_every_error_that_is_raised_is_found(package):
    found = {(raised.kind, raised.module) for raised in package.find_raised()}
    for path in ROOT.rglob("*.py"):
        for kind in re.findall(r"raise (\w+Error)\(\s*f?\"", path.read_text()):
            assert kind in CAUGHT or (kind, path.relative_to(ROOT).as_posix()) in found


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("raise ConfigError(f'{tensor.spec.name} has {len(rows)} rows')", ["<tensor> has <number of rows> rows"]),
        (
            "def f():\n    text = 'one'\n    if x:\n        text += ' more'\n    raise ConfigError(text)",
            ["one", "one more"],
        ),
        ("def f(why):\n    raise ConfigError(g(why))\ndef g(what) -> str:\n    return f'no {what}'", ["no <why>"]),
    ],
)
def test_messages_are_read_from_the_source(page, tmp_path, source, texts):
    base = 'class PatrickStarError(Exception):\n    """Base."""\n'
    (tmp_path / "errors.py").write_text(f'{base}class ConfigError(PatrickStarError):\n    """Bad."""\n')
    (tmp_path / "module.py").write_text(source)
    assert [raised.text for raised in page.Package(tmp_path).find_raised()] == texts
