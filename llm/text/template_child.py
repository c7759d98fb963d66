"""The program that renders chat templates in a process of their own; `chat_template.py` starts it.

A template gets the names that transformers gives chat templates. Imports jinja2 and nothing of this
package, and is run as a file, so that it starts in a moment.

A request and an answer are a length in 8 bytes and JSON. The process ends with its standard input.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

_MOST_TEMPLATES = 8
Value = Any  # what templates compute with, and jinja's own objects


def limit(memory_bytes: int) -> None:
    """No more memory than that, and no files, processes and core dumps."""
    for name, most in (("AS", memory_bytes), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0)):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            try:
                resource.setrlimit(kind, (least, least))
            except (ValueError, OSError):
                if sys.platform != "darwin":  # it has no limit of memory: there the limit of time bounds both
                    raise


@functools.cache
def environment() -> Value:
    """transformers' environment of chat templates, without lorem ipsum."""
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(jinja2.ext.Extension):
        """{% generation %}: around what an assistant said; it changes no text."""

        tags = {"generation"}  # noqa: RUF012  jinja's form

        def parse(self, parser: Value) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Value) -> str:
            return str(caller())

    class Dict:
        def __call__(self, *args: Value, **kwargs: Value) -> dict[Value, Value]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Value) -> dict[Value, Value]:
            return dict.fromkeys(*args)

    class PublicNamespace(Namespace):
        def __init__(*args: Value, **kwargs: Value) -> None:  # `self` may be a name of the template's
            own, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                check_name(name)
            Namespace.__init__(own, values)

        def __setitem__(self, name: str, value: Value) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with an underscore, got {name!r}")

    def tojson(
        value: Value,
        ensure_ascii: bool = False,
        indent: Value = None,
        separators: Value = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    del made.globals["lipsum"]
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": PublicNamespace,
    }
    return made


@functools.lru_cache(maxsize=_MOST_TEMPLATES)
def compiled(template: str) -> Value:
    return environment().from_string(template)


def answered(request: dict[str, Value]) -> dict[str, Value]:
    """The text of a template with these data, or the names that it reads."""
    try:
        if "data" not in request:
            from jinja2.meta import find_undeclared_variables

            return {"names": sorted(find_undeclared_variables(environment().parse(request["template"])))}
        text = compiled(request["template"]).render(**request["data"])
        if len(text) > request["most"]:
            return {"limit": f"it makes more than {request['most']} characters"}
        return {"text": text}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # a template can raise anything
        return {"error": type(error).__name__, "message": str(error)[:1000]}


def read(stream: BinaryIO, size: int) -> bytes:
    """`size` bytes; ends the process where the stream ends."""
    data = stream.read(size)
    if len(data) < size:
        os._exit(0)
    return data


def main(memory_bytes: int, cpu_seconds: float, *paths: str) -> None:
    sys.path[:0] = paths
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    environment()
    limit(memory_bytes)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        request = json.loads(read(requests, int.from_bytes(read(requests, 8), "big")))
        # The kernel ends the process when the time is over, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = answered(request)
        try:
            data = json.dumps(answer).encode()
        except MemoryError:
            answer, data = {"limit": "memory"}, b'{"limit": "memory"}'
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(data).to_bytes(8, "big") + data)
        answers.flush()
        if answer.get("limit") == "memory":
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
