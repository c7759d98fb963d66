"""`python -m llm serve MODEL`, and `with llm.serve(port=0) as url:` in a thread: the one place that listens on a port.

uvicorn speaks HTTP. SIGTERM and Ctrl-C let what runs finish, and end then; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.base import system
from llm.base.checks import check_integer, refuse
from llm.base.command_line import add_engine_flags, add_lora_modules, engine_arguments, lora_modules_of
from llm.base.optional import optional_package
from llm.base.text import show
from llm.base.types import Commands, JsonObject
from llm.errors import LLMError, ValidationError
from llm.tools.serve.options import add_options, check_options

if TYPE_CHECKING:
    from llm.llm import LLM
    from llm.tools.serve.app import Endpoint, Limits

HOST, PORT = "127.0.0.1", 8000
_DRAIN_SECONDS = 120
_KEY_LETTERS = re.compile(r"[!-~]+")
_KEY = "with an API key (--api-key, api_key=), or with insecure to let everybody in who can reach it"


@contextmanager
def serve(
    model: LLM | str | Path | None = None,
    *,
    host: str = HOST,
    port: int = PORT,
    api_key: str | Sequence[str] | None = None,
    insecure: bool = False,
    served_model_name: str | Sequence[str] | None = None,
    lora_modules: Mapping[str, str | Path] | None = None,
    max_waiting: int = 1024,
    max_body_bytes: int = 32 << 20,
    timeout: float | None = None,
    **arguments: Any,
) -> Iterator[str]:
    """Serve a model over OpenAI's protocol from a thread, until the `with` block ends; gives the URL.

        with llm.serve(port=0) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    Answers are those of `LLM`, bit for bit. `python -m llm serve` does the same from a command line.

    Args:
        model: an `LLM`, which stays open, or the `model` of a new one; None: the embedded model.
        host: addresses other than this machine's own are refused without `api_key` or `insecure`.
        port: 0: any free one.
        api_key: one or several; requests must have one of them.
        served_model_name: what requests call the model; the first is in answers. None: as `model`.
        lora_modules: adapters by name, which requests name as their model.
        max_waiting: requests beyond `max_num_seqs`; more are answered 429.
        max_body_bytes: of a request.
        timeout: seconds of an answer; None: as long as it takes.
        arguments: those of `LLM`.

    Raises:
        ValidationError: an argument is wrong, or the port is taken.
        MissingPackageError: starlette or uvicorn is not installed.
    """
    from llm.llm import EMBEDDED_MODEL, LLM

    if isinstance(model, LLM) and arguments:
        refuse("model", model, f"a name with arguments of LLM ({', '.join(arguments)})")
    keys = _keys_of((api_key,) if isinstance(api_key, str) else tuple(api_key or ()))
    limits = _limits(max_body_bytes, max_waiting, timeout)
    listener = _listen(host, port, bool(keys), insecure)
    try:
        if lora_modules and not isinstance(model, LLM):
            arguments.setdefault("enable_lora", True)
        llm = model if isinstance(model, LLM) else LLM(EMBEDDED_MODEL if model is None else model, **arguments)
        try:
            names = _names(served_model_name, llm)
            with _running(_endpoint(llm, host, names, lora_modules, keys, limits), listener):
                yield url_of(listener)
        finally:
            if llm is not model:
                llm.close()
    finally:
        listener.close()


def _limits(max_body_bytes: int, max_waiting: int, timeout: float | None) -> Limits:
    """Raises `ValidationError` for a limit that is none, `MissingPackageError` where nothing can serve."""
    optional_package("uvicorn", "serve")
    optional_package("starlette", "serve")
    from llm.tools.serve.app import Limits

    return Limits(max_body_bytes, max_waiting, seconds=timeout)


def _keys_of(given: Sequence[str]) -> tuple[str, ...]:
    """Raises `ValidationError` for a key that no header can have; an empty one would let everybody in."""
    for key in given:
        if not isinstance(key, str) or not _KEY_LETTERS.fullmatch(key):
            raise ValidationError("api_key must have letters, digits and signs of ASCII alone.", parameter="api_key")
    return tuple(given)


def _endpoint(
    llm: LLM,
    host: str,
    names: tuple[str, ...],
    modules: Mapping[str, str | Path] | None,
    keys: tuple[str, ...],
    limits: Limits,
) -> Endpoint:
    from llm.async_llm import AsyncLLM
    from llm.tools.serve.app import Endpoint

    # Without a key, a name is all that tells a page of this machine from one of another site.
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if _is_own(host) and not keys else None
    given = {name: str(path) for name, path in (modules or {}).items()}
    return Endpoint(AsyncLLM(llm), names, given, limits, keys, hosts)


def _names(given: str | Sequence[str] | None, llm: LLM) -> tuple[str, ...]:
    if given is None:
        from llm.config.engine import EMBEDDED_MODEL

        model = str(llm.config.model_config.model)
        return ("tiny", model) if model == str(EMBEDDED_MODEL) else (model,)
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        refuse("served_model_name", given, "a name or several")
    return names


def _is_own(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int, has_key: bool, insecure: bool) -> socket.socket:
    """Raises `ValidationError` for an address that is not this machine's own without a key, or one that is taken."""
    check_integer("port", port, 0, 65535)
    if not isinstance(host, str):
        refuse("host", host, "a text")
    if not _is_own(host):
        if not has_key and not insecure:
            refuse("host", host, f"an address of this machine alone, such as 127.0.0.1; or go on {_KEY}")
        print(f"warning: {host} can be reached from other machines.", file=sys.stderr)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        message = f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another port."
        raise ValidationError(message, parameter="port", value=port) from error


def _listen_at(path: str) -> socket.socket:
    """A Unix socket, which who may open the file may use. Raises `ValidationError` where it cannot be made."""
    listener = None
    try:
        listener = system.unix_socket()
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or error
        message = f"--uds {show(path)} cannot be listened on ({reason}); choose a path where nothing is."
        raise ValidationError(message, parameter="uds", value=path) from error
    return listener


def url_of(listener: socket.socket, has_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextmanager
def _running(endpoint: Endpoint, listener: socket.socket) -> Iterator[None]:
    """The server in a thread."""
    from llm.tools.serve.uvicorn_server import server_of

    server = server_of(endpoint.app(), "", _DRAIN_SECONDS, {})
    thread = threading.Thread(target=server.run, args=([listener],), name="llm-serve", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise LLMError("the server has ended before it began.")
            thread.join(0.005)
        yield
    finally:
        server.should_exit = True
        thread.join()


# The command.


def add_command(commands: Commands) -> None:
    """Add `serve` to the command line's subcommands."""
    command = commands.add_parser(
        "serve",
        help="answer OpenAI's protocol on a port",
        description="Serve a model over OpenAI's protocol, as `vllm serve`: /v1/chat/completions, /v1/completions, "
        "/v1/embeddings, /score, /rerank, /classify, /v1/models, /tokenize, /health, /metrics.",
        epilog="Needs pip install 'offline-llm[serve]'. SIGTERM and Ctrl-C let what runs finish, and end then.",
    )
    command.set_defaults(run=_serve)
    command.add_argument("model", nargs="?", help="model folder or hub name (default: the embedded model)")
    _add(command, "--model", dest="named_model", help=argparse.SUPPRESS)
    _add(command, "--host", default=HOST, help="the address to listen on (default: %(default)s)")
    _add(command, "--port", type=int, default=PORT, metavar="N", help="0: any free one (default: %(default)s)")
    several: dict[str, Any] = {"action": "append", "nargs": "+", "default": []}
    _add(command, "--api-key", metavar="KEY", help="requests must have it, or one of several", **several)
    _add(command, "--insecure", action="store_true", help="other machines may connect without a key")
    _add(command, "--served-model-name", metavar="NAME", help="what requests call the model, one or several", **several)
    _add(command, "--root-path", default="", metavar="PATH", help="where a proxy has mounted it")
    _add(command, "--timeout", type=float, metavar="SECONDS", help="of an answer (default: as long as it takes)")
    about = "requests beyond --max-num-seqs; more are answered 429 (default: %(default)s)"
    _add(command, "--max-waiting", "--max-num-queued-reqs", type=int, default=1024, metavar="N", help=about)
    _add(command, "--max-body-bytes", type=int, default=32 << 20, metavar="N", help="of a request")
    about = "of what runs at SIGTERM (default: %(default)s)"
    _add(command, "--shutdown-timeout", type=int, default=_DRAIN_SECONDS, metavar="SECONDS", help=about)
    about = "how the model writes tool calls (default: as its chat template says)"
    _add(command, "--tool-call-parser", default="auto", metavar="FORM", help=about)
    _add(command, "--enable-log-requests", action="store_true", help="log bodies, prompts included")
    _add(command, "--enable-force-include-usage", action="store_true", help="tell the usage in every stream")
    about = "JSON, for the chat template, where requests do not say otherwise"
    _add(command, "--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help=about)
    _add_transport(command)
    for name in ("enable-log-requests", "enable-force-include-usage", "allow-credentials"):
        _add(command, f"--no-{name}", dest=name.replace("-", "_"), action="store_false", help=argparse.SUPPRESS)
    add_options(command)
    add_lora_modules(command)
    add_engine_flags(command)


def _add_transport(command: argparse.ArgumentParser) -> None:
    """TLS, pages of other sites, and a socket in the file system."""
    _add(command, "--uds", metavar="PATH", help="listen on a Unix socket, and on no port")
    _add(command, "--ssl-keyfile", metavar="FILE", help="the key of --ssl-certfile")
    _add(command, "--ssl-certfile", metavar="FILE", help="speak HTTPS with this certificate")
    _add(command, "--ssl-ca-certs", metavar="FILE", help="who signs the certificates of clients")
    about = "of clients: 0, none is asked for; 1, one may be sent; 2, one must be sent (default: 0)"
    _add(command, "--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0, help=about)
    _add(command, "--ssl-ciphers", metavar="NAMES", help="of TLS 1.2")
    about = 'the pages of which sites may read answers: "*", a URL, or JSON of several (default: none)'
    _add(command, "--allowed-origins", type=_listed, default=(), metavar="URLS", help=about)
    about = "the same of their methods and headers (default: all)"
    _add(command, "--allowed-methods", type=_listed, default=("*",), metavar="NAMES", help=about)
    _add(command, "--allowed-headers", type=_listed, default=("*",), metavar="NAMES", help=argparse.SUPPRESS)
    _add(command, "--allow-credentials", action="store_true", help="they may send cookies")


def _json_object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"it must be a JSON object, got {show(text)}")
    return found


def _listed(text: str) -> tuple[str, ...]:
    """A name, or JSON of several."""
    try:
        found = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        found = []
    if not found or not all(isinstance(name, str) and name for name in found):
        raise argparse.ArgumentTypeError(f"it must be a name, or a JSON list of names, got {show(text)}")
    return tuple(found)


def _add(command: argparse.ArgumentParser, *options: str, **more: Any) -> None:
    """An option, with dashes or underscores in its name."""
    spelled = [f"--{option[2:].replace('-', '_')}" for option in options]
    command.add_argument(*dict.fromkeys([*options, *spelled]), **more)


def _model_of(args: argparse.Namespace) -> str | None:
    """The model that a command line names. Raises `ValidationError` where one may be among the values of an option."""
    if args.model is not None and args.named_model is not None:
        refuse("--model", args.named_model, "left out where the model is named without it")
    if args.model is None and args.named_model is None:
        for option, given in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
            if any(len(values) > 1 for values in given):
                raise ValidationError(
                    f"{option} has several values, of which the last may be the model; name the model before it, or "
                    f"give {option} once for each value.",
                    parameter="model",
                )
    return args.named_model if args.model is None else args.model


def _tls(args: argparse.Namespace) -> JsonObject:
    """uvicorn's settings of TLS; {}: there is none. Raises `ValidationError` for files that cannot be used."""
    if args.ssl_certfile is None:
        for option in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(args, option) is not None:
                refuse(f"--{option.replace('_', '-')}", getattr(args, option), "left out without --ssl-certfile")
        return {}
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    from llm.tools.serve.uvicorn_server import check_tls

    try:
        check_tls(given)
    except OSError as error:  # `ssl.SSLError` is one
        message = f"--ssl-certfile {show(args.ssl_certfile)} cannot be used with its key ({error.strerror or error})."
        raise ValidationError(message, parameter="ssl_certfile") from error
    return given


def _serve(args: argparse.Namespace) -> int:
    check_options(args)
    model, keys = _model_of(args), _keys_of([key for given in args.api_key for key in given])
    given_names = [name for given in args.served_model_name for name in given]
    limits = _limits(args.max_body_bytes, args.max_waiting, args.timeout)
    check_integer("shutdown_timeout", args.shutdown_timeout, 0)
    if not re.fullmatch(r"(/[!-~]*[!-.0-~])?", args.root_path):
        refuse("root_path", args.root_path, "a path such as /model")
    tls = _tls(args)
    listener = _listen(args.host, args.port, bool(keys), args.insecure) if args.uds is None else _listen_at(args.uds)
    try:
        from llm.llm import EMBEDDED_MODEL, LLM
        from llm.tools.serve.app import Sites
        from llm.tools.serve.uvicorn_server import server_of

        modules, given = lora_modules_of(args), engine_arguments(args)
        if modules:
            given.setdefault("enable_lora", True)
        with LLM(EMBEDDED_MODEL if model is None else model, **given) as llm:
            names = _names(given_names or model, llm)
            endpoint = dataclasses.replace(
                _endpoint(llm, args.host, names, modules, keys, limits),
                tool_parser=args.tool_call_parser,
                chat_template_kwargs=args.default_chat_template_kwargs,
                tells_usage=args.enable_force_include_usage,
                sites=Sites(args.allowed_origins, args.allowed_methods, args.allowed_headers, args.allow_credentials),
                log_requests=args.enable_log_requests,
            )
            server = server_of(endpoint.app(), args.root_path, args.shutdown_timeout, tls)
            at = f"{url_of(listener, bool(tls))}/v1" if args.uds is None else f"the socket {args.uds}"
            print(f"{names[0]} is served at {at}; Ctrl-C ends", file=sys.stderr, flush=True)
            server.run([listener])
            print("ended", file=sys.stderr)
    finally:
        listener.close()
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)
    return 0
