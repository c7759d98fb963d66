"""Chat templates, which are untrusted programs: rendered with limits on time and memory.

Plain templates, those whose every step costs what its input does, are rendered here, as long as they do little; the
others, in another process that is limited in memory and time and can be killed: one for each process, started when the
first template needs it, asked by one thread at a time, and ended with this one. A forked child starts its own. What a
template gets (messages, tools, documents, functions) is transformers': its renderer is called with this compiler.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any, cast

import jinja2
import markupsafe
from jinja2 import Environment, Template, exceptions, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llm.base.locks import renewed_in_children, tell_of_forks
from llm.base.types import JsonObject
from llm.errors import ValidationError

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


# Which templates are plain: a table of what is known to be harmless. What may still add up (loops, text that
# doubles) is limited while a template is rendered.

_PLAIN_CHARACTERS = 1 << 16  # of the template
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
    if len(template) > _PLAIN_CHARACTERS:
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


# The process that renders the others.

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 5.0
MOST_CHARACTERS = 1 << 25
_WALL_SECONDS = 120.0  # on a machine that is so busy that a process gets no time
_MOST_BYTES = 8 * MOST_CHARACTERS
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # of the environment: what an interpreter and dates need
_LIMITS = {"memory": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"}


class TemplateLimit(Exception):
    """A template takes too long or needs too much; the message says what."""


class _Ended(Exception):
    """The process ended before it answered."""


class TemplateProcess:
    def __init__(self) -> None:
        self._lock = renewed_in_children(threading.Lock())
        self._process: subprocess.Popen[bytes] | None = None
        tell_of_forks(self)

    def render(self, template: str, data: JsonObject) -> str:
        """The text of a template.

        Raises:
            TemplateLimit: it goes over a limit, or the process cannot be started.
            TypeError: the data are no JSON.
            Exception: what the template raised.
        """
        return str(self._answer({"template": template, "data": data, "most": MOST_CHARACTERS})["text"])

    def names_read(self, template: str) -> frozenset[str]:
        """The names that a template takes from its arguments. Raises as `render`."""
        return frozenset(self._answer({"template": template})["names"])

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        with self._lock:
            self._kill()

    def after_fork(self) -> None:
        """In a forked child: the process is its parent's, and so are the pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # it is not this process's to wait for
            for pipe in _pipes(process):
                pipe.close()

    def _answer(self, request: JsonObject) -> JsonObject:
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._kill()  # somebody else ended it
                if self._process is None:
                    self._process = _start()
                answer = self._exchange(self._process, data)
            except _Ended:
                raise TemplateLimit(_why_ended(self._kill())) from None
            except BaseException:  # Ctrl-C too: what is still to be read would be taken for the next answer
                self._kill()
                raise
            if answer.get("limit") == "memory":
                self._kill()
        if "limit" in answer:
            raise TemplateLimit(_LIMITS.get(answer["limit"], answer["limit"]))
        if "error" in answer:
            raise _error(str(answer["error"]), str(answer["message"]))
        return answer

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes) -> JsonObject:
        requests, answers = (pipe.fileno() for pipe in _pipes(process))
        deadline = time.monotonic() + _WALL_SECONDS
        waiting = memoryview(len(data).to_bytes(8, "big") + data)
        while waiting:
            _wait(requests, select.POLLOUT, deadline)
            try:
                waiting = waiting[os.write(requests, waiting) :]
            except BrokenPipeError:
                raise _Ended from None
        size = int.from_bytes(_read(answers, 8, deadline), "big")
        if size > _MOST_BYTES:
            raise TemplateLimit(f"it makes more than {MOST_CHARACTERS} characters")
        answer = json.loads(_read(answers, size, deadline))
        return answer if isinstance(answer, dict) else {}

    def _kill(self) -> int | None:
        """End the process, if there is one; its exit status as `subprocess` has it."""
        process, self._process = self._process, None
        if process is None:
            return None
        status = process.poll()
        if status is None:
            try:  # it may be ending itself, and its own reason is the one to tell
                status = process.wait(5 if _is_at_end(_pipes(process)[1].fileno()) else 0)
            except subprocess.TimeoutExpired:
                process.kill()
        for pipe in _pipes(process):
            pipe.close()
        process.wait()
        return status


def _start() -> subprocess.Popen[bytes]:
    if os.name != "posix" or not sys.executable:
        raise TemplateLimit("it is more than plain, and this system cannot limit a process that renders it")
    paths = {str(Path(str(module.__file__)).parent.parent) for module in (jinja2, markupsafe)}
    limits = [str(MEMORY_BYTES), str(CPU_SECONDS)]
    try:
        process = subprocess.Popen(
            # Isolated: no code of the user's folders, of the environment's or of site-packages' .pth files is run.
            [
                sys.executable,
                "-I",
                "-S",
                "-B",
                str(Path(__file__).with_name("template_child.py")),
                *limits,
                *sorted(paths),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            close_fds=True,
        )
    except OSError as error:
        raise TemplateLimit(f"it is more than plain, and no process to render it can be started ({error})") from error
    os.set_blocking(_pipes(process)[0].fileno(), False)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    return process.stdin, process.stdout


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TemplateLimit(f"it takes more than {_WALL_SECONDS:g} seconds")


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        _wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise _Ended
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _is_at_end(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _why_ended(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} seconds"
    return "it ended the process that renders it, by more memory or nesting than that has"


def _error(name: str, message: str) -> Exception:
    """What the template raised: an exception of jinja's or a builtin one."""
    kind = getattr(exceptions, name, getattr(builtins, name, None))
    if name == "TemplateSyntaxError":
        return exceptions.TemplateSyntaxError(message, 1)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(message)
    return exceptions.TemplateRuntimeError(f"{name}: {message}")


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
