"""Worker processes: messages arrive as they were sent, every end of a worker is found and told, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from workers.echo_role import SCHEMA, Colour, Point

from llm.errors import PromptTooLongError, SamplingError, ValidationError, WorkerDiedError
from llm.workers.messages import Message, Schema, sizes_of
from llm.workers.process import WorkerProcess

ROLE = "workers.echo_role"


def started(number: int = 0, **options: object) -> WorkerProcess:
    return WorkerProcess(ROLE, number, SCHEMA, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    worker = started(3)
    yield worker
    pid = worker.pid
    worker.close()
    assert is_gone(pid)


def is_gone(pid: int, seconds: float = 15.0) -> bool:
    """True once no process has this number; a zombie is none that runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def crossed(value: object, schema: Schema = SCHEMA) -> object:
    """The value after its way through bytes."""
    data = schema.encode("kind", value)
    header, buffers = sizes_of(data[:16])
    assert len(data) == 16 + header + buffers
    view = memoryview(data)[16:]
    message = schema.decode(view[:header], view[header:])
    assert isinstance(message, Message) and message.kind == "kind"
    return message.body


VALUES: list[object] = [
    None,
    [True, 1, 1.5, "text \ud800 \u2028", None],
    [2**64 - 1, -(2**63), 5e-324, -0.0, float("inf"), float("-inf")],
    (1, [2, (3,)], {4, 5}, frozenset({"six"})),
    {"a": {1: "int key", (2, 3): "tuple key"}, "$tuple": [1], "": 0},
    {"$odd": 1},
    b"\x00\xff",
    [Point(1, (2, 3)), Point(4, Point(5)), Colour.BLUE],
    Path("/some/where"),
    [torch.bfloat16, torch.float8_e4m3fn],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_arrives_as_it_was(value: object) -> None:
    got = crossed(value)
    assert got == value and repr(got) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_arrays_and_tensors_arrive_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 200, shape).to(dtype)
    got = crossed([tensor.t() if len(shape) == 2 else tensor])[0]  # type: ignore[index]
    assert got.dtype == dtype and torch.equal(got.t() if len(shape) == 2 else got, tensor)
    if dtype is not torch.bfloat16:
        array = tensor.numpy()
        same = crossed(array)
        assert same.dtype == array.dtype and same.shape == shape and same.tobytes() == array.tobytes()  # type: ignore[attr-defined]
        assert same.flags.writeable  # type: ignore[attr-defined]
    nan = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)  # NaNs keep their payload
    assert torch.equal(crossed(nan).view(torch.int32), nan.view(torch.int32))  # type: ignore[attr-defined]
    assert crossed(np.float32(0.1)) == np.float32(0.1)


def test_errors_arrive_with_their_class_words_and_fields() -> None:
    error = crossed(PromptTooLongError("too long", num_tokens=7, limit=5))
    assert type(error) is PromptTooLongError and str(error) == "too long" and error.num_tokens == 7 and error.limit == 5
    assert type(crossed(SamplingError("none left"))) is SamplingError
    assert type(crossed(KeyError("x"))) is KeyError

    class Own(Exception):
        pass

    assert str(crossed(Own("said"))) == "Own: said"


@pytest.mark.parametrize("value", [object(), lambda: 0, Point, [{"x": object()}], Point(1, object())])
def test_what_is_not_plain_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(ValidationError, match="cannot be sent to a worker process"):
        SCHEMA.encode("kind", value)
    with pytest.raises(ValidationError, match="Point cannot be sent"):
        Schema().encode("kind", Point(1))


def test_a_worker_is_an_interpreter_of_its_own(worker: WorkerProcess) -> None:
    worker.send("who")
    message = worker.receive(60)
    assert message is not None
    number, pid, main, cores, environment = message.body  # type: ignore[misc]
    assert number == 3 and pid == worker.pid != os.getpid()
    assert main.endswith("llm/workers/start.py")  # `__main__` of this program was not imported again
    assert cores == sorted(os.sched_getaffinity(0)) and environment["PATH"] == os.environ["PATH"]
    assert os.getsid(pid) == pid  # Ctrl-C of the terminal does not reach it


def test_both_may_send_much_at_once(worker: WorkerProcess) -> None:
    """Each more than the socket holds: one that only sent would wait for the other for ever."""
    worker.send("flood")
    worker.send("echo", bytes(1 << 25))
    bodies = [worker.receive(60) for _ in range(65)]
    assert [len(message.body) for message in bodies if message is not None] == [1 << 20] * 64 + [1 << 25]  # type: ignore[arg-type]
    assert worker.receive(0) is None


def test_its_output_is_told_with_its_name(worker: WorkerProcess, capfd: pytest.CaptureFixture[str]) -> None:
    worker.send("print", "hello\nthere")
    assert worker.receive(60) == ("printed", None)
    said = ""
    for _ in range(500):
        said += capfd.readouterr().err
        if said.endswith("there\n"):
            break
        time.sleep(0.02)
    assert said == "worker 3: hello\nworker 3: there\n"


def test_a_worker_that_fails_is_told_with_its_traceback() -> None:
    worker = started(5, cores={min(os.sched_getaffinity(0))}, environment={"OF_ITS_OWN": "1"}, name="replica")
    worker.send("who")
    message = worker.receive(60)
    assert message is not None and message.body[3] == [min(os.sched_getaffinity(0))]  # type: ignore[index]
    assert message.body[4]["OF_ITS_OWN"] == "1"  # type: ignore[index]
    worker.send("fail", "no luck")
    with pytest.raises(WorkerDiedError, match=r"(?s)replica 5 failed:.*echo_role.*RuntimeError: no luck") as caught:
        worker.receive(60)
    assert caught.value.number == 5 and is_gone(worker.pid)
    with pytest.raises(WorkerDiedError, match="no luck"):  # said again, whatever is asked of it
        worker.send("echo")
    worker.close()


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [("exit", 7, "exit status 7"), ("hang", None, "ended by SIGKILL"), ("stop", None, r"said nothing for \d seconds")],
)
def test_a_worker_that_dies_or_hangs_is_found(
    kind: str, body: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_WORKER_TIMEOUT", "3" if kind == "stop" else "60")
    worker = started(1)
    worker.send("echo", "begin")
    assert worker.receive(60, watched=False) == ("echo", "begin")
    worker.send("hang" if kind == "stop" else kind, body)
    if kind == "hang":
        os.kill(worker.pid, signal.SIGKILL)
    elif kind == "stop":
        os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match=f"worker 1 died: .*{said}"):
        worker.receive(60)
    assert is_gone(worker.pid) and not worker.is_alive


def test_one_that_computes_for_long_is_not_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_WORKER_TIMEOUT", "2")
    worker = started(1)
    worker.send("echo")
    assert worker.receive(60, watched=False) == ("echo", None)
    worker.send("compute", 4.0)
    assert worker.receive(60) == ("computed", None)
    worker.send("hang")  # it computes nothing, and waits for no message
    with pytest.raises(WorkerDiedError, match="said nothing"):
        worker.receive(60)


ENDS = {
    "an error": "1 / 0",
    "kill": "os.kill(os.getpid(), 9)",
    "forgotten": "del worker, other, each; gc.collect(); time.sleep(30)",
    "a fork": "os._exit(0) if os.fork() else time.sleep(25)",  # longer than is waited for the workers
    "a fork that exits": "os.wait() if os.fork() else sys.exit(); worker.send('echo'); print(worker.receive(60).kind)",
}


@pytest.mark.parametrize("end", ENDS)
def test_no_worker_outlives_its_program(end: str, tmp_path: Path) -> None:
    """Idle or in the middle of something, and whatever ends the program; without a guard around its code."""
    script, shared = tmp_path / "script.py", tmp_path / "shared"
    shared.mkdir()
    (shared / "memory").write_bytes(bytes(8))
    script.write_text(
        textwrap.dedent(
            f"""
            import gc, os, sys, time
            from workers.echo_role import SCHEMA
            from llm.workers.process import WorkerProcess
            worker, other = (WorkerProcess({ROLE!r}, number, SCHEMA, folder={str(shared)!r}) for number in range(2))
            for each in (worker, other):
                each.send("echo")
                each.receive(60)
            other.send("hang")
            print(worker.pid, other.pid, flush=True)
            {ENDS[end]}
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_gone, pids)), program.stderr and program.stderr.read()
        assert not shared.exists()  # what the program would have deleted
        program.kill()
        if end == "a fork that exits":
            assert program.stdout.read() == "echo\n"  # the child's exit ended no worker of its parent
