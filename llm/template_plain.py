"""Which chat templates may be rendered in this process: those whose every step costs what its input does.

Owns the table of plain constructs. It lists what is known to be harmless; everything else is left to another process,
see `template_process.py`. What may still add up (loops, text that doubles) is limited while a template is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError

_MOST_CHARACTERS = 1 << 16  # of the template
_MOST_NODES = 20_000
_MOST_DEPTH = 60
_LONGEST_TEXT = 64  # of a text that is put in for another
_WIDEST = 16  # of an indentation
_NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr),
    *(nodes.Getitem, nodes.Slice, nodes.For, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.CondExpr, nodes.Compare),
    *(nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Mod, nodes.Concat),
    *(nodes.Test, nodes.Filter, nodes.Call, nodes.Keyword, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Macro, nodes.Continue, nodes.Break, nodes.ExprStmt, nodes.With),
)
# What `{% generation %}` is compiled to: transformers' tag around what an assistant said.
_GENERATION = (nodes.CallBlock, nodes.ExtensionAttribute, nodes.ContextReference, nodes.EvalContextModifier)
# Filters and methods whose result is about as long as their input, or a part of it.
_FILTERS = frozenset(
    "trim string upper lower capitalize title length count first last list items safe abs default d int float reverse "
    "sort dictsort unique join attr escape e select reject selectattr rejectattr map".split()
)
_MAPPED = frozenset("trim string upper lower capitalize title length tojson int float first last items".split())
_METHODS = frozenset(
    "strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith upper lower title capitalize "
    "find rfind index count isdigit isalpha isalnum isspace removeprefix removesuffix items keys values get".split()
)
_DATE = re.compile(r"(?:[^%]|%-?[a-zA-Z%])*")


def is_plain(environment: Environment, template: str) -> bool:
    """True if the template has plain constructs alone; a template with an error has not."""
    if len(template) > _MOST_CHARACTERS:
        return False
    try:
        tree = environment.parse(template)
    except (TemplateSyntaxError, RecursionError, ValueError):
        return False
    found = list(_walk(tree))
    if len(found) > _MOST_NODES or any(depth > _MOST_DEPTH for _, depth in found):
        return False
    macros = {node.name for node, _ in found if isinstance(node, nodes.Macro)}
    check = _Check(macros, _nested(tree))
    return all(check.is_plain(node) for node, _ in found)


def _walk(tree: nodes.Node) -> Iterator[tuple[nodes.Node, int]]:
    """Every node with its depth; without recursion, which a template could exhaust."""
    waiting = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in node.iter_child_nodes()]


class _Check:
    """
    Attributes:
        macros: the names of the template's own.
        nested: names whose values may hold lists and objects that the template made.
    """

    def __init__(self, macros: set[str], nested: set[str]) -> None:
        self._macros = macros
        self._nested = nested

    def is_plain(self, node: nodes.Node) -> bool:
        own: Callable[[nodes.Node], bool] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        return isinstance(node, _NODES + _GENERATION) and (own is None or own(node))

    def _for(self, node: nodes.For) -> bool:
        return not node.recursive

    def _mod(self, node: nodes.Mod) -> bool:
        """By a number; whether it is a format is seen when it is rendered."""
        return isinstance(node.right, nodes.Const) and isinstance(node.right.value, int)

    def _callblock(self, node: nodes.CallBlock) -> bool:
        call = node.call
        return isinstance(call, nodes.Call) and isinstance(call.node, nodes.ExtensionAttribute)

    def _list(self, node: nodes.List | nodes.Tuple) -> bool:
        return not any(_names(item) & self._nested for item in node.items)

    _tuple = _list

    def _dict(self, node: nodes.Dict) -> bool:
        return not any(_names(pair) & self._nested for pair in node.items)

    def _filter(self, node: nodes.Filter) -> bool:
        given = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            return False
        if node.name in ("tojson", "indent"):
            return all(_is_small(value, _WIDEST) for value in given)
        if node.name == "replace":
            return all(isinstance(value, nodes.Const) and _is_short(value) for value in given)
        if node.name in ("map", "select", "reject") and node.args:
            first = node.args[0]
            return isinstance(first, nodes.Const) and (node.name != "map" or first.value in _MAPPED)
        return node.name in _FILTERS

    def _call(self, node: nodes.Call) -> bool:
        called = node.node
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            return False
        if isinstance(called, nodes.ExtensionAttribute):
            return True
        if isinstance(called, nodes.Name):
            if called.name == "strftime_now":
                return _is_date(node.args) and not node.kwargs
            return called.name in ("raise_exception", "namespace", "range") or called.name in self._macros
        if not isinstance(called, nodes.Getattr):
            return False
        if called.attr == "replace":
            return all(isinstance(value, nodes.Const) and _is_short(value) for value in node.args)
        return called.attr in _METHODS


def _nested(tree: nodes.Template) -> set[str]:
    """The names whose values may hold lists and objects that the template made of values."""
    pairs: list[tuple[set[str], set[str], bool]] = []  # (names set, names read, makes one)
    arguments: set[str] = set()
    for macro in tree.find_all(nodes.Macro):
        arguments |= {argument.name for argument in macro.args}
    kinds: tuple[type[nodes.Node], ...] = (nodes.Assign, nodes.For, nodes.Call)
    for node in tree.find_all(kinds):
        if isinstance(node, nodes.Assign):
            pairs.append((_names(node.target), _names(node.node), _makes(node.node)))
        elif isinstance(node, nodes.For):
            pairs.append((_names(node.target), _names(node.iter), _makes(node.iter)))
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            values: Iterable[nodes.Node] = [*node.args, *(pair.value for pair in node.kwargs)]
            for value in values:
                pairs.append((arguments, _names(value), _makes(value)))
    found: set[str] = set()
    while True:
        more = {name for names, read, makes in pairs if makes or read & found for name in names}
        if more <= found:
            return found
        found |= more


def _makes(node: nodes.Node) -> bool:
    """True if the value may hold a list or an object that is made here of values that are no constants."""
    if isinstance(node, nodes.Filter) and node.name in ("tojson", "join", "length", "count", "string", "first", "last"):
        return False
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and _names(node):
        return True
    return any(_makes(child) for child in node.iter_child_nodes())


def _names(node: nodes.Node) -> set[str]:
    own = {node.name} if isinstance(node, nodes.Name | nodes.NSRef) else set()
    return own.union(*(_names(child) for child in node.iter_child_nodes()))


def _is_small(node: nodes.Node, most: int) -> bool:
    """A constant: a truth value, nothing, or a number up to `most`."""
    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    return value is None or isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= most)


def _is_short(node: nodes.Const) -> bool:
    return len(str(node.value)) <= _LONGEST_TEXT


def _is_date(given: list[nodes.Expr]) -> bool:
    """One constant, a short format without widths."""
    value = given[0].value if len(given) == 1 and isinstance(given[0], nodes.Const) else None
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and _DATE.fullmatch(value) is not None
