"""Finds the places where the package waits for copies, and takes them away one at a time.

A site is a call that waits, that remembers what to wait for or that keeps memory alive, an argument that names the
copies to come after, or one that says who keeps memory alive. A mutation replaces the code of the one function that the
site is in, and nothing else.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import pathlib
import types
from collections import Counter
from typing import NamedTuple

import hf_patrickstar

_CALLS = frozenset(
    {
        *("wait", "join", "wait_stream", "wait_event", "synchronize", "wait_for_reader", "wait_for_update"),
        *("wait_for_host_work", "wait_for_copy"),
        *("release_in_flight", "hold_at_most", "_hold", "note", "_let_go", "_join_coming"),
    }
)
_ARGUMENT = "under_way"
_KEYWORD = "holds"
_PROBE = "_mutations_probe"


class Site(NamedTuple):
    """One place where the package waits.

    Attributes:
        module: The path of the module in the package.
        function: The qualified name of the outermost function.
        text: What is there.
        number: Its number among those of the same text in the function.
        place: The line and the column.
    """

    module: str
    function: str
    text: str
    number: int
    place: tuple[int, int]

    @property
    def key(self):
        """What identifies it, whatever comes before the function in the module."""
        return f"{self.module} {self.function}: {self.text}" + (f" #{self.number}" if self.number else "")


@functools.cache
def find_sites(module, *classes):
    """The sites of a module.

    Args:
        module: The path of the module in the package.
        *classes: Only the sites in these classes; all by default.
    """
    found, numbers = [], Counter()

    def look(node, names, *, is_inside=False):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_inside:
            names, is_inside = [*names, node.name], isinstance(node, ast.FunctionDef)
        text = _text_of(node)
        if text is not None and (not classes or names[0] in classes):
            function = ".".join(names)
            number = numbers[function, text]
            numbers[function, text] += 1
            found.append(Site(module, function, text, number, (node.lineno, node.col_offset)))
        for child in ast.iter_child_nodes(node):
            look(child, names, is_inside=is_inside)

    look(_tree_of(module), [])
    return tuple(found)


_active = []


def is_active():
    """Whether a site is gone now."""
    return bool(_active)


@contextlib.contextmanager
def without(site):
    """Inside the block the site is gone: of a call that remembers a copy its argument is left, of others nothing."""
    with _rewritten([site], _remove):
        _active.append(site)
        try:
            yield
        finally:
            _active.pop()


@contextlib.contextmanager
def noting(sites):
    """Gives a set, to which every site adds itself that is reached inside the block."""
    reached = set()
    functions = {(site.module, site.function) for site in sites}
    with contextlib.ExitStack() as stack:
        for module, function in functions:
            chosen = [site for site in sites if (site.module, site.function) == (module, function)]
            stack.enter_context(_rewritten(chosen, _probe, reached.add))
        yield reached


def _tree_of(module):
    return ast.parse((pathlib.Path(hf_patrickstar.__file__).parent / module).read_text(encoding="utf-8"))


def _text_of(node):
    """The text of a site; ``None`` for what is no site."""
    if isinstance(node, ast.Attribute) and node.attr == _ARGUMENT and isinstance(node.ctx, ast.Load):
        return ast.unparse(node)
    if isinstance(node, ast.keyword) and node.arg == _KEYWORD:
        return ast.unparse(node)
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS
    if not is_call or isinstance(node.func.value, ast.Constant):  # a text joins others
        return None
    return f"{ast.unparse(node.func)}({'...' if node.args else ''})"


def _remove(node, site):
    if isinstance(node, ast.Attribute):
        return ast.Tuple([], ast.Load())
    if isinstance(node, ast.keyword):
        return ast.keyword(_KEYWORD, ast.Constant(not getattr(node.value, "value", True)))
    return node.args[0] if node.func.attr == "note" else ast.Constant(None)


def _probe(node, site):
    call = ast.Call(ast.Name(_PROBE, ast.Load()), [ast.Constant(site.key)], [])
    value = node.value if isinstance(node, ast.keyword) else node
    probed = ast.Subscript(ast.Tuple([call, value], ast.Load()), ast.Constant(1), ast.Load())
    return ast.keyword(node.arg, probed) if isinstance(node, ast.keyword) else probed


class _Rewriter(ast.NodeTransformer):
    def __init__(self, sites, rewrite):
        self._sites = {(site.place, site.text): site for site in sites}
        self._rewrite = rewrite

    def generic_visit(self, node):
        super().generic_visit(node)
        return node

    def visit(self, node):
        site = self._sites.get(((getattr(node, "lineno", 0), getattr(node, "col_offset", 0)), _text_of(node)))
        node = super().visit(node)
        return node if site is None else ast.copy_location(self._rewrite(node, site), node)


@contextlib.contextmanager
def _rewritten(sites, rewrite, probe=None):
    """Gives the function of some sites, which is one, other code inside the block."""
    path, name = sites[0].module, sites[0].function
    module = importlib.import_module("hf_patrickstar." + path.removesuffix(".py").replace("/", "."))
    tree = ast.fix_missing_locations(_Rewriter(sites, rewrite).visit(_tree_of(path)))
    code = _find_code(compile(tree, module.__file__, "exec", dont_inherit=True), name)
    function = _find_function(module, name)
    before = function.__code__
    assert code != before, f"{path} {name} is as it was"
    if probe is not None:
        setattr(module, _PROBE, probe)
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _find_code(code, name):
    """The code object of a function in the code of its module."""
    todo = [code]
    for item in todo:
        if item.co_qualname == name:
            return item
        todo += [constant for constant in item.co_consts if isinstance(constant, types.CodeType)]
    raise LookupError(name)


def _find_function(module, name):
    """The live function of a qualified name, below properties and decorators."""
    owner = module
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part)
    owner = owner.fget if isinstance(owner, property) else getattr(owner, "__func__", owner)
    return inspect.unwrap(owner)
