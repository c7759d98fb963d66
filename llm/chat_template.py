"""Chat templates, which are untrusted programs: rendered with limits on time and memory.

Plain templates are rendered here, as long as they do little; the others, in a process that can be killed. What a
template gets (messages, tools, documents, functions) is transformers': its renderer is called with this compiler.
"""

from __future__ import annotations

import functools
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

from llm.errors import ValidationError
from llm.template_plain import is_plain
from llm.template_process import PROCESS, TemplateLimit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a plain template may do here; one that does more is rendered in the other process, from the beginning.
_SECONDS = 1.0
_MOST_MADE = 1 << 24  # characters and items
_TEMPLATE_CHARS = 1 << 20
_CONSTANT = frozenset("length count first last default d get items".split())  # do not look at each item


def render(
    hf: PreTrainedTokenizerBase, messages: Sequence[object], template: str | None, options: dict[str, object]
) -> str:
    """`hf.apply_chat_template` with limits.

    Raises:
        ValidationError: the template takes too long or needs too much. Other exceptions of the template pass.
    """
    try:
        return str(
            _guarded(cast(FunctionType, type(hf).apply_chat_template))(
                hf, messages, chat_template=template, tokenize=False, **options
            )
        )
    except TemplateLimit as error:
        raise _refused(error) from error


@functools.lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """The names that a template takes from its arguments, wherever it reads them; raises as `render`."""
    if is_plain(_theirs(), template):
        return frozenset(find_undeclared_variables(_theirs().parse(template)))
    try:
        return PROCESS.names_read(template)
    except TemplateLimit as error:
        raise _refused(error) from error


def _refused(error: TemplateLimit) -> ValidationError:
    return ValidationError(
        f"the chat template is not rendered: {error}; pass another as chat_template=.", parameter="chat_template"
    )


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
def _compile(template: str) -> _Rendering:
    if len(template) > _TEMPLATE_CHARS:
        raise TemplateLimit(f"it has {len(template)} characters; at most {_TEMPLATE_CHARS} are read")
    plain = _Environment(_theirs()).from_string(template) if is_plain(_theirs(), template) else None
    return _Rendering(template, plain)


def _theirs() -> Environment:
    """transformers' environment of chat templates."""
    from transformers.utils import chat_template_utils

    environment: Environment = chat_template_utils._compile_jinja_template("").environment
    return environment


class _Rendering:
    """A template in place of jinja's, which renders it here or in the other process.

    Attributes:
        plain: compiled; None: it is not plain.
    """

    def __init__(self, template: str, plain: Template | None) -> None:
        self._template = template
        self.plain = plain

    def render(self, **data: object) -> str:
        if self.plain is not None:
            try:
                cast(_Environment, self.plain.environment).start()
                return self.plain.render(**data)
            except _MoreThanPlain:
                pass
        return PROCESS.render(self._template, data)


class _MoreThanPlain(SecurityError):
    """A plain template does more than it may do here."""


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment; loops and calls check the time, and sizes are checked before results are made."""

    intercepted_binops = frozenset(("+", "%"))

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
        if operator == "%" and not isinstance(left, int | float):  # of a text it is a format
            raise _MoreThanPlain
        if operator == "+" and not isinstance(left, int | float):
            self._spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:
        """Parameters are named as in jinja, so that a template's keyword arguments may have any name."""
        __self._check_time()
        function = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | list | tuple | dict):
            __self._check_growth(name, owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        return _Concats().visit(tree)

    def _check_growth(self, name: str, value: object, arguments: list[object]) -> None:
        """Called before a method or a filter: count what it makes."""
        if name == "join":
            parts = next((item for item in (value, *arguments) if isinstance(item, list | tuple)), ())
            separators = [_size(item) for item in (value, *arguments) if isinstance(item, str)]
            self._spend(sum(map(_size, parts)) + len(parts) * max(separators, default=0))
        elif name in _CONSTANT:
            return
        elif name in ("replace", "indent"):
            self._spend((_size(value) + 1) * max(map(_size, arguments), default=1))
        else:
            self._spend(_size(value))

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
        if self._made > _MOST_MADE:
            raise _MoreThanPlain

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _MoreThanPlain


class _Concats(NodeTransformer):
    """Rewrites `a ~ b` as a filter over [a, b], which is checked for size."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)  # in place
        parts = nodes.List(list(node.nodes), lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno, environment=node.environment)


def _size(value: object) -> int:
    """The length of a text, a list or an object; of anything else, what it may be as a text."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 64
