"""`python -m llm doctor`: what it sees, what it says to do, and what it never shows."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path

import pytest
from kernel_sets import needs_kernels

from llm.cli import main
from llm.kernels.cpu import build
from llm.platforms.cpu import CpuPlatform
from llm.tools import doctor
from llm.tools.bench import machine


def named(root: Path = Path("/")) -> dict[str, doctor.Finding]:
    return {item.name: item for item in doctor.examine(root)}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_WATCH_SECONDS", 0.0)  # too short to say anything of other programs


@pytest.fixture
def no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_answer", lambda: doctor.Finding("embedded model", "not asked"))


@needs_kernels
def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    shown = capsys.readouterr().out
    assert status in (0, 1) and ("what to do:" in shown) == bool(status)
    assert f"Python {platform.python_version()}" in shown and "torch 2." in shown
    assert build.fast_targets()[-1] in shown and "GiB free" in shown
    assert "answers 16 tokens; batch-invariant: yes" in shown


@pytest.mark.usefixtures("no_answer")
def test_it_names_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "home-of-somebody"
    monkeypatch.setenv("HOME", str(secret))
    monkeypatch.setenv("LLM_OFFLOAD_FOLDER", f"{secret}/weights")
    monkeypatch.setenv("LLM_PLATFORM", "/somewhere/private/cpu")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CXX", f"{secret}/bin/c++")
    monkeypatch.setattr(build, "_COMPILERS", ())
    shown = "\n".join(f"{item.text} {item.todo}" for item in doctor.examine())
    for word in ("home-of-somebody", "somewhere", "private", "hf_secret", platform.node(), str(tmp_path)):
        assert word not in shown
    user = getpass.getuser()
    assert user == "root" or user not in shown
    assert "LLM_OFFLOAD_FOLDER=~/weights" in shown and "CXX (set)" in shown


@needs_kernels
@pytest.mark.usefixtures("no_answer")
def test_each_fault_has_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not named()["kernels"].todo
    site = tmp_path / "site-packages"
    (site / "llm-0.36.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(build, "packaged_library", lambda target: None)
    monkeypatch.setattr(build, "_COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.CpuWatch, "__exit__", lambda self, *_: setattr(self, "other_cores", 1.5))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000000 kB\nMemAvailable: 100000 kB\n")
    found = named(tmp_path)
    assert "llm-0.36.dist-info" in found["other llm"].text and "pip uninstall -y llm" in found["other llm"].todo
    assert "cannot be" in found["kernels"].text and "apt-get install g++" in found["kernels"].todo
    assert found["other programs"].text == "use 1.5 of these cores now" and found["other programs"].todo
    assert found["memory"].text.startswith("0.1 of 1.9 GiB") and "container" in found["memory"].todo
    assert "VLLM_LOGGING_LEVEL" in found["variables"].todo


@pytest.mark.usefixtures("no_answer")
def test_slower_kernels_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"GenuineIntel", "avx512_fp16", *build._CPU_FLAGS["avx512_bf16"].split()}
    monkeypatch.setattr(build, "read_cpu_flags", lambda: flags)
    slower = "avx512_vnni; slower here, used if LLM_CPU_ISA asks for it: avx512_bf16"
    assert named()["processor"].text.endswith(slower)
    monkeypatch.setattr(build, "read_cpu_flags", lambda: flags - {"avx512_fp16"})
    assert named()["processor"].text.endswith("avx512_vnni, avx512_bf16")


@pytest.mark.usefixtures("no_answer")
def test_too_many_threads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 4096)
    assert "num_threads=" in named()["threads"].todo
    monkeypatch.setattr("torch.get_num_threads", lambda: CpuPlatform().num_threads())
    assert not named()["threads"].todo


@needs_kernels
def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "packaged_library", lambda target: None)
    monkeypatch.setattr(build, "is_usable", lambda path: False)
    found = named()
    assert "in about a minute" in found["kernels"].text
    assert found["embedded model"].todo == "run `python -m llm kernels build`"


def test_a_device_without_kernels_in_triton_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "device='cpu' has no kernels in Triton; `python -m llm doctor` examines" in capsys.readouterr().err
