"""`python -m llm serve MODEL`, and `with llm.serve(port=0) as url:` in a thread: the one place that listens on a port.

uvicorn speaks HTTP. SIGTERM and Ctrl-C let what runs finish, and end then; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from llm.base.checks import check_integer, refuse
from llm.base.command_line import add_engine_flags, add_lora_modules, engine_arguments, lora_modules_of
from llm.base.optional import optional_package
from llm.base.types import Commands
from llm.errors import LLMError, ValidationError

if TYPE_CHECKING:
    import uvicorn

    from llm.llm import LLM
    from llm.tools.serve.app import Endpoint

HOST, PORT = "127.0.0.1", 8000
_DRAIN_SECONDS = 120
_KEY = "with api_key=, or insecure=True to let everybody in who can reach it"


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
    listener = _listen(host, port, bool(api_key), insecure)
    try:
        if lora_modules and not isinstance(model, LLM):
            arguments.setdefault("enable_lora", True)
        llm = model if isinstance(model, LLM) else LLM(EMBEDDED_MODEL if model is None else model, **arguments)
        try:
            names = _names(served_model_name, llm)
            with _running(
                _endpoint(llm, host, names, lora_modules, api_key, max_waiting, max_body_bytes, timeout), listener
            ):
                yield url_of(listener)
        finally:
            if llm is not model:
                llm.close()
    finally:
        listener.close()


def _endpoint(
    llm: LLM,
    host: str,
    names: tuple[str, ...],
    modules: Mapping[str, str | Path] | None,
    api_key: str | Sequence[str] | None,
    max_waiting: int,
    max_body_bytes: int,
    timeout: float | None,
    tool_parser: str = "auto",
    log_requests: bool = False,
) -> Endpoint:
    from llm.async_llm import AsyncLLM
    from llm.tools.serve.app import Endpoint, Limits

    check_integer("max_waiting", max_waiting, 0)
    check_integer("max_body_bytes", max_body_bytes, 1)
    keys = (api_key,) if isinstance(api_key, str) else tuple(api_key or ())
    limits = Limits(max_body_bytes, max_waiting, seconds=timeout)
    # Without a key, a name is all that tells a page of this machine from one of another site.
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if _is_own(host) and not keys else None
    given = {name: str(path) for name, path in (modules or {}).items()}
    return Endpoint(AsyncLLM(llm), names, given, limits, keys, hosts, tool_parser, log_requests)


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
    optional_package("uvicorn", "serve")
    optional_package("starlette", "serve")
    check_integer("port", port, 0)
    if not _is_own(host):
        if not has_key and not insecure:
            refuse("host", host, f"an address of this machine alone, such as 127.0.0.1; or go on {_KEY}")
        print(f"warning: {host} can be reached from other machines.", file=sys.stderr)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        message = (
            f"{host}:{port} cannot be listened on ({getattr(error, 'strerror', None) or error}); choose another port."
        )
        raise ValidationError(message, parameter="port", value=port) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(endpoint: Endpoint, root_path: str = "", drain_seconds: int = _DRAIN_SECONDS) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Ends with a status of 0 when a signal has asked it to, and it has let what ran finish."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return

            def asked(number: int, frame: FrameType | None) -> None:
                self.handle_exit(number, frame)

            before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    config = uvicorn.Config(
        endpoint.app(),
        log_level="error",
        access_log=False,
        server_header=False,
        root_path=root_path,
        timeout_graceful_shutdown=drain_seconds,
        ws="none",
    )
    return Server(config)


@contextmanager
def _running(endpoint: Endpoint, listener: socket.socket) -> Iterator[None]:
    """The server in a thread."""
    server = _server(endpoint)
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
    command.add_argument("--host", default=HOST, help="the address to listen on (default: %(default)s)")
    command.add_argument("--port", type=int, default=PORT, metavar="N", help="0: any free one (default: %(default)s)")
    about = "requests must have it; may be given several times"
    command.add_argument(*("--api-key", "--api_key"), action="append", default=[], metavar="KEY", help=about)
    command.add_argument("--insecure", action="store_true", help="other machines may connect without a key")
    about = "what requests call the model; may be given several times"
    options = ("--served-model-name", "--served_model_name")
    command.add_argument(*options, action="append", metavar="NAME", help=about)
    command.add_argument(
        *("--root-path", "--root_path"), default="", metavar="PATH", help="where a proxy has mounted it"
    )
    command.add_argument("--timeout", type=float, metavar="SECONDS", help="of an answer (default: as long as it takes)")
    command.add_argument(
        *("--max-waiting", "--max-num-queued-reqs"),
        *("--max_waiting", "--max_num_queued_reqs"),
        type=int,
        default=1024,
        metavar="N",
        help="requests beyond --max-num-seqs; more are answered 429 (default: %(default)s)",
    )
    command.add_argument(
        *("--max-body-bytes", "--max_body_bytes"), type=int, default=32 << 20, metavar="N", help="of a request"
    )
    command.add_argument(
        *("--shutdown-timeout", "--shutdown_timeout"),
        type=int,
        default=_DRAIN_SECONDS,
        metavar="SECONDS",
        help="of what runs at SIGTERM (default: %(default)s)",
    )
    command.add_argument(
        *("--tool-call-parser", "--tool_call_parser"),
        default="auto",
        metavar="FORM",
        help="how the model writes tool calls (default: as its chat template says)",
    )
    command.add_argument(
        *("--enable-auto-tool-choice", "--enable_auto_tool_choice"),
        action="store_true",
        help="taken, for commands of vLLM: tools are always read",
    )
    command.add_argument(
        *("--enable-log-requests", "--enable_log_requests"), action="store_true", help="log bodies, prompts included"
    )
    add_lora_modules(command)
    add_engine_flags(command)


def _serve(args: argparse.Namespace) -> int:
    listener = _listen(args.host, args.port, bool(args.api_key), args.insecure)
    try:
        from llm.llm import EMBEDDED_MODEL, LLM

        modules, given = lora_modules_of(args), engine_arguments(args)
        if modules:
            given.setdefault("enable_lora", True)
        with LLM(EMBEDDED_MODEL if args.model is None else args.model, **given) as llm:
            names = _names(args.served_model_name or args.model, llm)
            endpoint = _endpoint(
                *(llm, args.host, names, modules, args.api_key, args.max_waiting, args.max_body_bytes, args.timeout),
                *(args.tool_call_parser, args.enable_log_requests),
            )
            server = _server(endpoint, args.root_path, args.shutdown_timeout)
            print(f"{names[0]} is served at {url_of(listener)}/v1; Ctrl-C ends", file=sys.stderr, flush=True)
            server.run([listener])
            print("ended", file=sys.stderr)
    finally:
        listener.close()
    return 0
