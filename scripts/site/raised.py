"""Finds the errors that the package raises, and the text of each with its placeholders, in the parsed source."""

import ast
import builtins
import contextlib
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2] / "hf_patrickstar"
_MOST_TEXTS = 4
"""An expression with more texts than these is shown as a placeholder."""
_DEEPEST = 4
_BUILT_IN = {name for name in dir(builtins) if name.endswith("Error")} - {"AssertionError", "NotImplementedError"}
_WORDS_OF_CALLS = {"len": "number of {}", "sum": "sum of {}", "table": "the table of what takes memory"}
_SAME = {
    "str",
    "repr",
    "max",
    "min",
    "list",
    "tuple",
    "sorted",
    "map",
    "set",
    "int",
    "Path",
    "format_need",
    "format_nbytes",
}
"""Functions whose value is about the same as their argument."""
_PASSED_ON = {"judge"}
"""Functions that return the text that they get, or another one like it."""
_CLEARER = {
    "strerror": "reason",
    "class name": "class",
    "limit s": "limit",
    "places": "place",
    "describe others": "what the others do",
}
_MADE_UP = re.compile(r"^(self|cls|_+)$")

Texts = list[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error that is made somewhere in the package.

    Attributes:
        kind: The name of its class.
        module: The file, relative to the package.
        text: The message; what is only known at run time is in angle brackets.
    """

    kind: str
    module: str
    text: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an expression stands, which says what its names mean."""

    module: str
    tree: ast.Module
    function: Function | None = None
    values: Mapping[str, Texts] = dataclasses.field(default_factory=dict)
    depth: int = 0


class Package:
    """The parsed source of the package."""

    def __init__(self, root: pathlib.Path = ROOT) -> None:
        self.trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in root.rglob("*.py")}
        self.classes = self._read_classes()
        self._numbers = _numbers(self.trees.values())
        self._functions: dict[str, list[tuple[str, Function]]] = {}
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    self._functions.setdefault(node.name, []).append((module, node))

    def _read_classes(self) -> dict[str, str]:
        """The error classes of the package, each with its docstring: those of ``errors.py`` first."""
        known: dict[str, str] = {}
        modules = sorted(self.trees, key=lambda module: (module != "errors.py", module))
        for module in modules:
            for node in self.trees[module].body:
                bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
                if isinstance(node, ast.ClassDef) and (bases & known.keys() or node.name == "PatrickStarError"):
                    known[node.name] = ast.get_docstring(node) or ""
        return known

    def find_raised(self) -> list[Raised]:
        """Every error, in the order of files and lines; what has the same class, file and text is in it once."""
        found: dict[Raised, None] = {}
        for module, tree in sorted(self.trees.items()):
            for call, function, kinds in self._find_calls(tree):
                place = Place(module, tree, function)
                for text in self.texts(call.args[0], place) if call.args else [""]:
                    for kind in kinds:
                        found[Raised(kind, module, " ".join(text.split()))] = None
        return list(found)

    def _find_calls(self, tree: ast.Module) -> Iterator[tuple[ast.Call, Function | None, Texts]]:
        """The calls that make an error, each with the function that it is in and the classes that it may have."""

        def walk(node: ast.AST, function: Function | None) -> Iterator[tuple[ast.Call, Function | None, Texts]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                    kinds = self._kinds(child.func.id, child.func.id if function is None else function)
                    if kinds:
                        yield child, function, kinds
                yield from walk(child, child if isinstance(child, Function) else function)

        yield from walk(tree, None)

    def _kinds(self, name: str, function: Function | str) -> Texts:
        """The error classes that a called name may be: itself, or those that a local name was assigned."""
        if name in self.classes or name in _BUILT_IN:
            return [name]
        if isinstance(function, str):
            return []
        assigned = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign) and _names(node, name)]
        names = [node.id for value in assigned for node in ast.walk(value) if isinstance(node, ast.Name)]
        return [found for found in names if found in self.classes]

    # Texts of expressions

    def texts(self, node: ast.expr, place: Place) -> Texts:
        """What an expression may be as text; a placeholder if it is no text that the source has."""
        return self._known_texts(node, place) or [_placeholder(node)]

    def _known_texts(self, node: ast.expr, place: Place) -> Texts:
        """What an expression may be as text; nothing where the source does not say."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return _joined([self._texts_of_part(part, place) for part in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not _is_number(node.right):
            sides = [self._known_texts(side, place) for side in (node.left, node.right)]
            return _joined([side or [_placeholder(node)] for side in sides]) if any(sides) else []
        if isinstance(node, ast.IfExp) and ast.unparse(node.test).endswith(("== 1", "is_one")):
            return self._known_texts(node.body, place)  # the singular stands for the plural
        if isinstance(node, ast.IfExp):
            return _few(self._known_texts(node.body, place) + self._known_texts(node.orelse, place))
        if place.depth > _DEEPEST:
            return []
        if isinstance(node, ast.Name):
            return self._texts_of_name(node.id, place)
        if isinstance(node, ast.Subscript):
            found = _literal(node, place.tree)
            return found if len(found) == 1 else _entries(node, place.tree)
        if isinstance(node, ast.Call):
            return self._texts_of_call(node, place)
        if isinstance(node, ast.Attribute):
            return self._texts_of_attribute(node, place)
        return []

    def _texts_of_part(self, part: ast.expr, place: Place) -> Texts:
        value = part.value if isinstance(part, ast.FormattedValue) else part
        if isinstance(value, ast.Name) and value.id in self._numbers:
            return [self._numbers[value.id]]
        return self.texts(value, place)

    def _texts_of_name(self, name: str, place: Place) -> Texts:
        if name in place.values:
            return place.values[name]
        # Inside of ``text = f"... {text}"`` the name is what it was before.
        before = dict(place.values) | {name: [_placeholder(ast.Name(name))]}
        deeper = dataclasses.replace(place, depth=place.depth + 1, values=before)
        found: Texts = []
        for scope in (place.function, place.tree):
            body = ast.walk(scope) if isinstance(scope, Function) else scope.body if scope else []
            for node in body:
                if isinstance(node, ast.Assign) and _names(node, name):
                    found += self._known_texts(node.value, deeper)
                elif isinstance(node, ast.AugAssign) and _names(node, name):
                    more = self._known_texts(node.value, deeper)
                    found += [before + after for before in found for after in more]
            if found:
                return _few(found)
        return self._handed_over(name, place)

    def _handed_over(self, name: str, place: Place) -> Texts:
        """The texts that calls in the same module hand to a parameter of the function."""
        function = place.function
        names = [argument.arg for argument in function.args.args] if function else []
        if function is None or name not in names or name in ("self", "cls") or place.depth:
            return []
        index = names.index(name) - (names[0] in ("self", "cls"))
        texts: Texts = []
        for caller in (node for node in ast.walk(place.tree) if isinstance(node, Function)):
            for node in ast.walk(caller):
                called = node.func if isinstance(node, ast.Call) else None
                is_it = getattr(called, "attr", None) == function.name or getattr(called, "id", None) == function.name
                if isinstance(node, ast.Call) and is_it and len(node.args) > index:
                    inner = Place(place.module, place.tree, caller, depth=1)
                    texts += [text for text in self._known_texts(node.args[index], inner) if " " in text]
        return _few(list(dict.fromkeys(texts)))

    def _texts_of_call(self, node: ast.Call, place: Place) -> Texts:
        """The texts that a function of the package returns, with what this call hands to it."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "join" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
            return self._texts_of_join(node.args[0], str(node.func.value.value), place)
        if name in _SAME or name in _WORDS_OF_CALLS:
            return []
        if name in _PASSED_ON:
            return self.texts(node.args[0], place)
        found = self._find_function(name, place.module)
        if not found:
            return []
        module, function = found
        names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        values = {key: self.texts(value, place) for key, value in zip(names, node.args, strict=False)}
        values |= {item.arg: self.texts(item.value, place) for item in node.keywords if item.arg}
        return self._returned(module, function, values, place.depth)

    def _texts_of_join(self, parts: ast.expr, joint: str, place: Place) -> Texts:
        """The text of ``joint.join(parts)``: what a constant or a local list holds, or one part of a comprehension."""
        literal = _literal(parts, place.tree)
        if literal:
            return [joint.join(literal)]
        if isinstance(parts, (ast.GeneratorExp, ast.ListComp)) and isinstance(parts.elt, ast.JoinedStr):
            return self._known_texts(parts.elt, place)
        names = {found.id for found in ast.walk(parts) if isinstance(found, ast.Name)}
        for assign in ast.walk(place.function or place.tree):
            if not isinstance(assign, ast.Assign) or not any(_names(assign, name) for name in names):
                continue
            value = assign.value.body if isinstance(assign.value, ast.IfExp) else assign.value
            if isinstance(value, ast.List) and value.elts:
                texts = [self.texts(part, place) for part in value.elts]
                return _joined(list(itertools.chain.from_iterable((text, [joint]) for text in texts))[:-1])
            if isinstance(value, ast.ListComp):
                return self.texts(value.elt, place)
        return []

    def _texts_of_attribute(self, node: ast.Attribute, place: Place) -> Texts:
        """A property that returns text, or text that ``self`` keeps."""
        found = self._find_function(node.attr, place.module)
        if found and any(ast.unparse(decorator) == "property" for decorator in found[1].decorator_list):
            return self._returned(*found, {}, place.depth)
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            return []
        texts: Texts = []
        for function in (node for node in ast.walk(place.tree) if isinstance(node, Function)):
            for assign in ast.walk(function):
                if isinstance(assign, ast.Assign) and ast.unparse(assign.targets[0]) == f"self.{node.attr}":
                    inner = Place(place.module, place.tree, function, depth=place.depth + 1)
                    texts += [] if isinstance(assign.value, ast.Constant) else self._known_texts(assign.value, inner)
        return _few(texts)

    def _returned(self, module: str, function: Function, values: Mapping[str, Texts], depth: int) -> Texts:
        place = Place(module, self.trees[module], function, values, depth + 1)
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        texts = [self._known_texts(value, place) for value in returns]
        return _few(list(itertools.chain.from_iterable(texts))) if all(texts) else []

    def _find_function(self, name: str, module: str) -> tuple[str, Function] | None:
        """The function of this name that returns text: of the same module, or the only one of the package."""
        found = [item for item in self._functions.get(name, []) if _returns_text(item[1])]
        own = [item for item in found if item[0] == module]
        found = own or found
        return found[0] if len(found) == 1 else None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _returns_text(function: Function) -> bool:
    return function.returns is not None and ast.unparse(function.returns) == "str"


def _names(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _numbers(trees: Iterable[ast.Module]) -> dict[str, str]:
    """The numbers that modules give names in capitals, as far as a name has one number everywhere."""
    found: dict[str, set[str]] = {}
    for node in itertools.chain.from_iterable(tree.body for tree in trees):
        target, value = _single_assignment(node)
        if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
            found.setdefault(target, set()).add(str(value.value))
    return {name: numbers.pop() for name, numbers in found.items() if len(numbers) == 1 and name.isupper()}


def _literal(node: ast.expr, tree: ast.Module) -> Texts:
    """The texts of a constant tuple, list or dictionary of a module, or of a slice of it."""
    name = node.value if isinstance(node, ast.Subscript) else node
    for found in tree.body:
        target, value = _single_assignment(found)
        if value is not None and isinstance(name, ast.Name) and name.id == target:
            expression = ast.unparse(node).replace(name.id, ast.unparse(value), 1)
            with contextlib.suppress(ValueError, TypeError, NameError, SyntaxError, IndexError):
                # Only literals and slices of them: there is no name that the expression could call.
                values = eval(expression, {"__builtins__": {}})
                return [values] if isinstance(values, str) else [item for item in values if isinstance(item, str)]
    return []


def _entries(node: ast.Subscript, tree: ast.Module) -> Texts:
    """The texts in a constant dictionary of a module that has two, of which one is chosen at run time."""
    for found in tree.body:
        target, value = _single_assignment(found)
        if isinstance(value, ast.Dict) and isinstance(node.value, ast.Name) and node.value.id == target:
            texts = [item.value for item in value.values if isinstance(item, ast.Constant)]
            return [text for text in texts if isinstance(text, str)] if len(texts) == 2 else []
    return []


def _single_assignment(node: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name and the value of ``name = value``."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return "", None


def _joined(parts: list[Texts]) -> Texts:
    """The parts in a row: the first text of each, then the second of each, since they vary together."""
    if not all(parts):
        return []
    most = max(map(len, parts), default=0)
    return ["".join(part[min(index, len(part) - 1)] for part in parts) for index in range(most)]


def _few(texts: Texts) -> Texts:
    texts = list(dict.fromkeys(texts))
    return texts if len(texts) <= _MOST_TEXTS else []


# Placeholders


def _placeholder(node: ast.expr) -> str:
    words = _words(node).replace("_", " ").strip().replace("nbytes", "bytes")
    words = words.lower() if words.isupper() else re.sub(r"^num ", "number of ", words)
    return f"<{_CLEARER.get(words, words) or 'value'}>"


def _words(node: ast.expr) -> str:
    """What an expression is about, in a word or two."""
    if isinstance(node, ast.Call):
        return _words_of_call(node)
    if isinstance(node, ast.Attribute):
        if node.attr == "__name__":
            return f"type of {_words(_inner(node.value))}"
        if node.attr in ("name", "spec", "path", "value", "nbytes", "shape", "index") and not _is_self(node.value):
            return _name_of_owner(node)
        return node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else _words(node.value)
    if isinstance(node, ast.BoolOp):
        return _words(node.values[0])
    if isinstance(node, ast.IfExp):
        return _words(node.body)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return _words(node.elt if isinstance(node.elt, ast.Attribute) else node.generators[0].iter)
    if isinstance(node, ast.BinOp):
        return _words(node.left)
    if isinstance(node, ast.Tuple):
        return " and ".join(_words(item) for item in node.elts)
    return node.id if isinstance(node, ast.Name) else "value"


def _words_of_call(node: ast.Call) -> str:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = node.args[-1] if node.args else None
    if name in _WORDS_OF_CALLS:
        return _WORDS_OF_CALLS[name].format(_words(first) if first is not None else "")
    if name == "getattr" and len(node.args) > 1:
        return "value" if isinstance(node.args[1], ast.Name) else _words(node.args[1])
    if (name in _SAME or name == "join") and first is not None:
        return _words(first)
    if name == "type" and first is not None:
        return f"type of {_words(first)}"
    if isinstance(node.func, ast.Attribute) and name in ("splitlines", "strip", "decode", "numel", "read_text"):
        return _words(node.func.value) if name != "numel" else f"number of elements of {_words(node.func.value)}"
    return name


def _name_of_owner(node: ast.Attribute) -> str:
    """``tensor.spec.name`` is the name of the tensor; ``module.name`` is that of the module."""
    owner: ast.expr = node.value
    while isinstance(owner, ast.Attribute) and owner.attr == "spec":
        owner = owner.value
    words = _words(owner)
    return words if node.attr in ("name", "path", "value", "spec") else f"{node.attr} of {words}"


def _inner(node: ast.expr) -> ast.expr:
    """What ``type(x)`` is asked of."""
    is_type = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"
    return node.args[0] if is_type and isinstance(node, ast.Call) else node


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and bool(_MADE_UP.match(node.id))
