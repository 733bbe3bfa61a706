"""The laws that keep the parts of the package apart, checked over the parsed source of every module."""

import ast
import dataclasses
import functools
import graphlib
import pathlib
import re

import pytest

import hf_patrickstar

PACKAGE = "hf_patrickstar"
ROOT = pathlib.Path(hf_patrickstar.__file__).parent

_LEVELS = (
    *("errors units version config counts machine common", "layout", "schedule", "memory", "dist", "model", "runtime"),
    *("optim", "checkpoint report", "setup", "tracing membership", "engine", "integrations", "planner", "cli"),
    "__main__",
)
LEVELS = {part: level for level, parts in enumerate(_LEVELS) for part in parts.split()}

MAX_FLOORS_OF_RUNTIME = 10
"""Modules of the runtime on the longest way from one to another by imports."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One module: its dotted name and what it says."""

    name: str
    text: str
    is_package: bool = False

    @functools.cached_property
    def tree(self):
        return ast.parse(self.text)

    @property
    def part(self):
        """The top-level folder or module that it belongs to; empty for the package's own ``__init__``."""
        return part_of(self.name)


@dataclasses.dataclass(frozen=True)
class Import:
    target: str
    line: int
    in_function: bool
    for_types: bool = False


def part_of(name):
    return name.split(".")[1] if "." in name else ""


def read_package():
    sources = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        sources.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return sources


SOURCES = read_package()


# Reading trees


@functools.cache
def imports_of(source):
    """Every import, wherever it stands, as absolute dotted targets; ``from a import b`` has the target ``a.b``."""
    found = []

    def walk(node, *where):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, child.lineno, *where) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = _absolute(source, child)
                found.extend(Import(f"{base}.{alias.name}", child.lineno, *where) for alias in child.names)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for_types = isinstance(child, ast.If) and dotted(child.test) == "TYPE_CHECKING"
            walk(child, where[0] or inside, where[1] or for_types)

    walk(source.tree, False, False)
    return found


def _absolute(source, node):
    if not node.level:
        return node.module
    anchor = source.name.split(".")
    drop = node.level - source.is_package
    anchor = anchor[: len(anchor) - drop]
    return ".".join([*anchor, node.module] if node.module else anchor)


def dotted(node):
    """``a.b.c`` of an attribute chain, or an empty string if it does not start at a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@functools.cache
def names_used(source):
    """Dotted names and bare attributes, with their lines: ``torch.empty``, ``.register_hook``, imported names."""
    nodes = list(ast.walk(source.tree))
    attributes = [(dotted(node) or f"?.{node.attr}", node.lineno) for node in nodes if isinstance(node, ast.Attribute)]
    names = [(node.id, node.lineno) for node in nodes if isinstance(node, ast.Name)]
    return [*attributes, *names, *((item.target, item.line) for item in imports_of(source))]


def is_inside(target, module):
    return target == module or target.startswith(module + ".")


def report(source, line, what):
    return f"{source.name}:{line}: {what}"


# Rules over one module


def imports_only_lower_parts(source):
    """A module imports its own folder and lower levels."""
    bad = []
    if source.name == PACKAGE:
        return bad
    if source.part not in LEVELS:
        return [report(source, 1, f"'{source.part}' has no place in the import law")]
    for item in imports_of(source):
        if not is_inside(item.target, PACKAGE):
            continue
        part = part_of(item.target)
        if part not in LEVELS:
            bad.append(report(source, item.line, f"imports {item.target}: name the module that owns it"))
        elif part != source.part:
            is_base = LEVELS[source.part] == LEVELS[part] == 0
            if LEVELS[part] >= LEVELS[source.part] and not is_base:
                bad.append(report(source, item.line, f"'{source.part}' must not import '{part}'"))
    return bad


_UNDER = r"{}(\..*)?".format
FORBIDDEN = {
    "no import hides in a string, except the lazy public names of the package": (
        *(r"(importlib\.)?import_module|__import__", lambda source: source.name == PACKAGE),
    ),
    "layout, schedule and machines are pure, without torch": (
        *(_UNDER("torch"), lambda source: source.part not in ("layout", "schedule", "machine")),
    ),
    "only memory allocates payloads that are filled later, and names streams and accelerators": (
        r"torch\.empty(_like|_strided|_permuted)?|torch\.(Stream|Event|get_device_module)|torch\.(accelerator|cuda)\..*",
        lambda source: source.part == "memory",
    ),
    "only dist knows torch.distributed": (
        *(_UNDER(r"torch\.distributed") + r"|dist\..*", lambda source: source.part == "dist"),
    ),
    "only one module registers hooks": (
        *(r"(.*\.)?register_(\w+_)?hook", lambda source: source.name == f"{PACKAGE}.runtime.hooks"),
    ),
    "only one module has hooks of saved tensors": (
        *(r"(.*\.)?saved_tensors_hooks", lambda source: source.name == f"{PACKAGE}.runtime.autograd"),
    ),
}
"""Names that a module must not use, as a pattern, and which modules may."""


def uses_no_forbidden_name(source):
    """Some names are for the modules that own them."""
    return [
        report(source, line, f"uses {name}: {law}")
        for law, (pattern, may_use) in FORBIDDEN.items()
        if not may_use(source)
        for name, line in names_used(source)
        if re.fullmatch(pattern, name)
    ]


def leaves_hugging_face_to_integrations(source):
    """Only the upper three layers import transformers or accelerate; checkpoint may, inside functions."""
    if source.part in ("integrations", "planner", "cli"):
        return []
    return [
        report(source, item.line, f"imports {item.target}")
        for item in imports_of(source)
        if any(is_inside(item.target, name) for name in ("transformers", "accelerate"))
        and not (source.part == "checkpoint" and item.in_function)
    ]


def leaves_pinning_to_memory(source):
    """Only memory pins."""
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and source.part != "memory"]
    return [
        report(source, node.lineno, "pins memory")
        for node in calls
        if any(keyword.arg == "pin_memory" for keyword in node.keywords)
        or (isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory")
    ]


_MAKER = re.compile(r"torch\.(empty|zeros|ones|full|tensor|arange|eye|rand|randn|randint)")


def names_the_device_of_new_tensors(source):
    """A new tensor says where it is: a user's ``torch.set_default_device`` is for the user's tensors."""
    made = [
        node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and _MAKER.fullmatch(dotted(node.func))
    ]
    return [
        report(source, node.lineno, f"{dotted(node.func)} without a device")
        for node in made
        if not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


_BYTE_FACTORS = {1024**power for power in range(1, 5)}


def leaves_byte_factors_to_units(source):
    """Only ``units.py`` knows 1024, however it is written."""
    if source.name == f"{PACKAGE}.units":
        return []
    return [
        report(source, node.lineno, f"writes {ast.unparse(node)}")
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.Constant, ast.BinOp)) and _constant(node) in _BYTE_FACTORS
    ]


def _constant(node):
    """The value of a number, or of ``a ** b`` and ``a << b`` of numbers."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, (int, float)) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        left, right = _constant(node.left), _constant(node.right)
        if isinstance(left, int) and isinstance(right, int) and 0 <= right < 64:
            return left**right if isinstance(node.op, ast.Pow) else left << right
    return None


_CONSTANT_NAME = re.compile(r"_?[A-Z][A-Z0-9_]*|__\w+__")
_MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
_MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"),
    *("sort", "reverse", "appendleft", "popleft"),
}


def has_no_state_at_module_level(source):
    """No mutable module-level value but constants, no constant that is changed, and no ``global``."""
    bad, mutable = [], set()
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not _is_mutable(node.value):
            continue
        for target in targets:
            name = ast.unparse(target)
            mutable.add(name)
            if not _CONSTANT_NAME.fullmatch(name):
                bad.append(report(source, node.lineno, f"'{name}' is mutable at module level"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            bad.append(report(source, node.lineno, "global statement"))
        changed = _changed_name(node)
        if changed in mutable:
            bad.append(report(source, node.lineno, f"changes '{changed}'"))
    return bad


def _is_mutable(value):
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, ast.Call):
        return (dotted(value.func) or "").rpartition(".")[2] in _MUTABLE_CALLS
    return isinstance(value, literals)


def _changed_name(node):
    """The name whose value a node changes in place, if it is plain to see."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return dotted(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return dotted(node.func.value)
    return None


RULES = (
    imports_only_lower_parts,
    uses_no_forbidden_name,
    leaves_hugging_face_to_integrations,
    leaves_pinning_to_memory,
    names_the_device_of_new_tensors,
    leaves_byte_factors_to_units,
    has_no_state_at_module_level,
)


# A rule over all modules


def find_cycle(sources):
    """A cycle of imports at module level, as a list of names that ends where it starts, or an empty list."""
    known = {source.name for source in sources}
    graph = {source.name: set() for source in sources}
    for source in sources:
        for item in imports_of(source):
            if not (item.in_function or item.for_types):
                graph[source.name] |= {item.target, item.target.rpartition(".")[0]} & known - {source.name, PACKAGE}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


# What is counted over all modules


def floors(sources):
    """How many modules are on the longest way by imports among these, and where it begins."""
    graph = {
        source.name: {item.target.rpartition(".")[0] for item in imports_of(source) if not item.for_types}
        for source in sources
    }

    @functools.cache
    def height(name):
        return 1 + max((height(target) for target in graph[name] & graph.keys() - {name}), default=0)

    return max((height(name), name) for name in graph)


# The package obeys


def test_the_whole_package_is_read():
    names = {source.name for source in SOURCES}
    assert {PACKAGE, f"{PACKAGE}.units", f"{PACKAGE}.runtime.hooks", f"{PACKAGE}.memory.pool"} <= names
    assert len(names) == len(list(ROOT.rglob("*.py")))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_obeys(rule):
    bad = [line for source in SOURCES for line in rule(source)]
    assert not bad, f"{rule.__doc__}\n" + "\n".join(bad)


def test_no_import_cycles():
    assert find_cycle(SOURCES) == []


def test_the_runtime_has_few_floors():
    count, name = floors([source for source in SOURCES if source.part == "runtime"])
    assert count <= MAX_FLOORS_OF_RUNTIME, name


def test_public_names_resolve_and_are_documented():
    assert sorted(hf_patrickstar.__all__) == list(hf_patrickstar.__all__)
    for name in hf_patrickstar.__all__:
        value = getattr(hf_patrickstar, name)
        if name == "__version__":
            assert re.match(r"\d+\.\d+", value)
            continue
        doc = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
        assert doc, f"{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"


def test_public_names_are_no_surprise():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hf_patrickstar.no_such_name


# Every rule fires on what it forbids, and only on that

OF_RULES = [
    (
        imports_only_lower_parts,
        "layout.packing",
        "from hf_patrickstar.memory.tiers import Tier",
        "from .specs import A",
    ),
    (imports_only_lower_parts, "runtime.chunk", "import hf_patrickstar", "import hf_patrickstar.memory.pool"),
    (
        imports_only_lower_parts,
        "units",
        "from hf_patrickstar.layout.packing import align",
        "import hf_patrickstar.errors",
    ),
    (imports_only_lower_parts, "schedule.move_plan", "def f():\n    from hf_patrickstar.runtime import chunk", "x = 1"),
    (uses_no_forbidden_name, "layout.specs", "m = __import__('torch')", "import torchlike"),
    (
        uses_no_forbidden_name,
        "schedule.move_plan",
        "def f():\n    from torch.nn import Module",
        "m = importlib.metadata.version",
    ),
    (uses_no_forbidden_name, "engine", "import torch\ns = torch.Stream()", "import torch\nx = torch.zeros(3)"),
    (uses_no_forbidden_name, "runtime.chunk", "import torch\nx = torch.empty(3)", "x = 1"),
    (uses_no_forbidden_name, "runtime.manager", "import torch.distributed as dist", "import hf_patrickstar.dist.order"),
    (uses_no_forbidden_name, "engine", "m.register_forward_hook(f)", "m.register_module(f)"),
    (uses_no_forbidden_name, "runtime.hooks", "torch.autograd.graph.saved_tensors_hooks", "m.register_forward_hook(f)"),
    (leaves_hugging_face_to_integrations, "engine", "def f():\n    import transformers", "x = 1"),
    (leaves_hugging_face_to_integrations, "checkpoint.a", "import transformers", "def f():\n    import transformers"),
    (leaves_pinning_to_memory, "engine", "x = y.pin_memory()", "x = config.pin_memory"),
    (names_the_device_of_new_tensors, "engine", "x = torch.zeros(3, dtype=y)", "x = torch.zeros(3, device=d)"),
    (leaves_byte_factors_to_units, "engine", "x = y / 2**30", "x = 1 << y.bit_length(), 512, 2**8, '1024'"),
    (leaves_byte_factors_to_units, "engine", "x = 1 << 20", "x = 2**5"),
    (has_no_state_at_module_level, "engine", "cache = {}", "_NAMES = {'a': 1}\ndef f():\n    return _NAMES['a']"),
    (has_no_state_at_module_level, "engine", "_CACHE = {}\ndef f(key):\n    _CACHE[key] = 1", "__all__ = ['f']"),
    (has_no_state_at_module_level, "engine", "COUNT = 0\ndef f():\n    global COUNT\n    COUNT += 1", "COUNT = 0"),
]


def _source(name, text):
    return Source(f"{PACKAGE}.{name}", text)


@pytest.mark.parametrize(("rule", "name", "bad", "good"), OF_RULES)
def test_a_rule_fires_and_stays_quiet(rule, name, bad, good):
    assert rule(_source(name, bad))
    assert rule(_source(name, good)) == []
    assert {case[0] for case in OF_RULES} == set(RULES)


def test_a_module_needs_a_place_and_cycles_are_found():
    assert imports_only_lower_parts(_source("stray", "x = 1"))
    first = _source("layout.a", "from hf_patrickstar.layout.b import x")
    second = _source("layout.b", "import hf_patrickstar.layout.c")
    third = _source("layout.c", "from . import a")
    late = _source("layout.c", "def f():\n    from . import a")
    assert {name.rpartition(".")[2] for name in find_cycle([first, second, third])} == set("abc")
    assert find_cycle([first, second, late]) == []
    assert floors([first, second, late]) == (2, f"{PACKAGE}.layout.a")
