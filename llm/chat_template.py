"""Chat templates, which are untrusted programs: rendered in a sandbox with limits on time and size.

Owns the limits. What a template gets (messages, tools, documents, functions) is transformers': its renderer is called
with a compiler that adds the limits.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llm.base.errors import ValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS = 5.0
# Most characters of a text or items of a list; most bits of a number.
_MOST_ITEMS = 1 << 25
_MOST_MADE = 1 << 30
_MOST_BITS = 4096
_TEMPLATE_CHARS = 1 << 20
# Filters and string methods whose result may be longer than their input.
_GROWING = frozenset("center ljust rjust zfill expandtabs replace translate indent batch slice wordwrap".split())
_PRECISE = ("tojson", "round")
_MOST_DIGITS = 100
_FORMATS = ("format", "format_map")
_WIDE = re.compile(r"\d{6,}|%[^a-zA-Z]*\*|:[^}]*\{")


def render(
    hf: PreTrainedTokenizerBase, messages: Sequence[object], template: str | None, options: dict[str, object]
) -> str:
    """`hf.apply_chat_template` with limits.

    Raises:
        ValidationError: the template takes too long or produces too much. Other exceptions of the template pass.
    """
    try:
        return str(
            _guarded(cast(FunctionType, type(hf).apply_chat_template))(
                hf, messages, chat_template=template, tokenize=False, **options
            )
        )
    except _LimitError as error:
        raise ValidationError(
            f"the chat template is not rendered: {error}; pass another as chat_template=.",
            parameter="chat_template",
        ) from error


@functools.lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """The names that a template takes from its arguments, wherever it reads them."""
    return frozenset(find_undeclared_variables(_compile(template).environment.parse(template)))


@functools.cache
def _guarded(apply: FunctionType) -> Callable[..., object]:
    """transformers' method with `_compile` in place of its compiler."""
    from transformers.utils import chat_template_utils

    renderer = _with_globals(
        cast(FunctionType, chat_template_utils.render_jinja_template), _compile_jinja_template=_compile
    )
    return _with_globals(apply, render_jinja_template=renderer)


def _with_globals(function: FunctionType, **names: object) -> Callable[..., object]:
    """The function with some of its global names replaced; raises KeyError if it does not use them."""
    for name in names:
        if name not in function.__globals__:
            raise KeyError(name)
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, None, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    from transformers.utils import chat_template_utils

    if len(template) > _TEMPLATE_CHARS:
        raise _LimitError(f"it has {len(template)} characters; at most {_TEMPLATE_CHARS} are read")
    return _Environment(chat_template_utils._compile_jinja_template("").environment).from_string(template)


class _LimitError(SecurityError):
    """A template takes too long or produces too much."""


class _Template(Template):
    def render(self, *args: object, **kwargs: object) -> str:
        environment = cast("_Environment", self.environment)
        environment.start()
        return super().render(*args, **kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment; loops and calls check the time, and sizes are checked before results are made."""

    intercepted_binops = frozenset(("**", "*", "+", "%"))
    template_class = _Template

    def __init__(self, like: Environment) -> None:
        extensions = [type(extension) for extension in like.extensions.values()]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        own = self.globals["range"]  # the sandbox's
        self.globals = {name: value for name, value in like.globals.items() if name != "lipsum"} | {"range": own}
        filters = {name: self._limited(name, function) for name, function in like.filters.items()}
        self.filters = filters | {"_counted": self._counted, "_concat": lambda parts: self.concat(map(str, parts))}
        self.start()

    def start(self) -> None:
        self._deadline, self._made = time.monotonic() + _SECONDS, 0

    def concat(self, parts: Iterable[str]) -> str:
        return "".join(self._spent(parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator in ("*", "**"):
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if numbers and _bits(left) * (right if operator == "**" else 1) + _bits(right) > _MOST_BITS:
                raise _LimitError("it computes a number of too many digits")
            if not numbers:
                self._spend(_size(left) * max(_size(right), 0))
        elif operator == "+" and not isinstance(left, int | float):
            self._spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        """Parameters are named as in jinja, so that a template's keyword arguments may have any name."""
        __self._check_time()
        function = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            __self._check_growth(name, owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        return _Concats().visit(tree)

    def _check_growth(self, name: str, value: object, arguments: list[object]) -> None:
        """Called before a string method or a filter: check that its result is not too large."""
        if name in _FORMATS and isinstance(value, str):
            _check_format(value)
        elif name == "join":
            parts = next((item for item in (value, *arguments) if isinstance(item, list | tuple)), ())
            separators = [_size(item) for item in (value, *arguments) if isinstance(item, str)]
            self._spend(sum(map(_size, parts)) + len(parts) * max(separators, default=0))
        elif name in _GROWING:
            self._spend((_size(value) + 1) * max(map(_size, arguments), default=0))
        elif name in _PRECISE and any(_size(item) > _MOST_DIGITS for item in arguments if isinstance(item, int)):
            raise _LimitError(f"{name} is asked for too much")

    def _limited(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja passes its own argument before the value

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: object) -> object:
            self._check_time()
            if name == "join" and len(args) > first and not isinstance(args[first], str):
                args = (*args[:first], list(self._counted(args[first])), *args[first + 1 :])
            if len(args) > first:
                self._check_growth(name, args[first], [*args[first + 1 :], *kwargs.values()])
            return function(*args, **kwargs)

        return limited

    def _counted(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._check_time()
            yield item

    def _spent(self, parts: Iterable[str]) -> Iterator[str]:
        for part in parts:
            self._spend(len(part))
            yield part

    def _spend(self, size: int) -> None:
        self._made += size
        if size > _MOST_ITEMS or self._made > _MOST_MADE:
            raise _LimitError(f"it makes more than {_MOST_ITEMS} characters or items")

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _LimitError(f"it takes more than {_SECONDS:g} seconds")


class _Concats(NodeTransformer):
    """Rewrites `a ~ b` as a filter over [a, b], which is checked for size."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)  # in place
        parts = nodes.List(list(node.nodes), lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno, environment=node.environment)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise _LimitError("it writes a value in a width that is too large, or not fixed")


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _size(value: object) -> int:
    """The length of a text or list; a number itself."""
    if isinstance(value, str | list | tuple | dict):
        return len(value)
    return abs(value) if isinstance(value, int) else 64
