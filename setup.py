"""Compiles the CPU kernels into the wheel when there is a C++ compiler; pyproject.toml says all the rest.

Optional: without a compiler, or with LLM_BUILD_KERNELS=0, the wheel carries the sources alone and the kernels are
compiled when they are first used. What was compiled once is taken from the user's cache. LLM_BUILD_KERNELS=avx2,plain
names the instruction sets, "all" is every one (for a wheel that is given to others); by default it is the best of this
processor. An editable install compiles nothing here.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_build():
    """kernels/cpu/build.py by its path: PyTorch need not be there while a wheel is built.

    By way of llm/: a source distribution has files where the repository has links, and no folders beside llm/.
    """
    sys.path.insert(0, str(ROOT))  # it imports llm.base.system
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "llm" / "kernels" / "cpu" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Also puts the compiled kernels beside their sources."""

    libraries: list[str] = []  # noqa: RUF012 (bdist_wheel below reads it, of whatever instance)

    def run(self):
        super().run()
        wanted = os.environ.get("LLM_BUILD_KERNELS", "")
        folder = Path(self.build_lib, "llm", "kernels", "cpu", "compiled")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build in this tree
        if not self.editable_mode and wanted != "0":
            self.compile_kernels(folder, wanted)

    def compile_kernels(self, folder, wanted):
        build = load_build()
        for target in build.wheel_targets(wanted):
            path = folder / build.packaged_name(target)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.put_library(build, target, path)
            except (OSError, build.BuildError) as error:
                message = f"The CPU kernels for {target} are not in this wheel; they are compiled at first use: {error}"
                print(message, file=sys.stderr)
            else:
                self.libraries.append(str(path))

    def put_library(self, build, target, path):
        """By way of the user's cache: installing again, with other extras or another Python, compiles nothing."""
        try:
            library = build.ensure_library(target)
        except build.BuildError:  # also where the cache cannot be used
            build.compile_library(path, target, build.find_compiler())
        else:
            shutil.copyfile(library, path)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), *self.libraries]


class PlatformWheel(bdist_wheel):
    """For this platform when the wheel carries machine code, for any when it does not; for every Python."""

    def run(self):
        self.run_command("build")
        if BuildWithKernels.libraries:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if BuildWithKernels.libraries else tag


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
