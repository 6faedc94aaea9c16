"""Builds Symphony and its C extensions with cffi and the system compiler."""

import os
import runpy
import shutil
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
if not shutil.which(compiler):
    raise SystemExit(f"Symphony is built with GCC, and there is no {compiler}: install gcc and libc6-dev, or set CC")

runpy.run_path("libsym/abi_build.py", run_name="__main__")

PACKAGES = ("libsym", "kvfs", "decoder", "triton_kernels", "scheduler", "symphony", "lips")


class SideBySide(build_ext):
    """Compiles as many units at once as there are processors: the kernels of each instruction set are one."""

    def run(self) -> None:
        if "SYMPHONY_COMPILED" in os.environ:  # by scripts/lib.sh, while it installed other packages
            self.extensions = []
        super().run()

    def build_extensions(self) -> None:
        # Setuptools compiles one unit after the other, and has no other place to say otherwise.
        compile_one, compile_all = self.compiler._compile, self.compiler.compile  # noqa: SLF001

        def compile_side_by_side(*args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                units: list[Future[None]] = []
                self.compiler._compile = lambda *unit: units.append(pool.submit(compile_one, *unit))  # noqa: SLF001
                objects: list[str] = compile_all(*args, **options)
                for unit in units:
                    unit.result()
            return objects

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


setup(
    name="symphony-os",
    version="0.1.0",
    description="An operating system for LLM inference programs",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=[f"{name}*" for name in PACKAGES]),
    package_data={
        "libsym": ["*.h", "*/*.h", "*/*.c", "py.typed"],
        "kvfs": ["*/*.h", "*/*.c"],
        "decoder.cpu": ["*.h", "*.c"],
        "scheduler": ["*/*.h", "*/*.c"],
        "symphony": ["trace_page/*", "launcher/sandbox/*.h", "launcher/sandbox/*.c"],
    },
    cmdclass={"build_ext": SideBySide},
    setup_requires=["cffi>=1.17,<3"],
    cffi_modules=[
        "libsym/channel/channel_build.py:ffi",
        "kvfs/mount/shim_build.py:ffi",
        "kvfs/pages/digest_build.py:ffi",
        "decoder/cpu/step_build.py:ffi",
        "scheduler/batch/loop_build.py:ffi",
        "symphony/launcher/sandbox/kernel_build.py:ffi",
    ],
    install_requires=[
        "anyio>=4.7,<5",
        "cffi>=1.17,<3",
        "h11>=0.16,<1",
        "jinja2>=3.1.6,<4",
        "llguidance>=1.3,<2",
        "numpy>=2.0,<3",
        "outcome>=1.3,<2",
        "pyfuse3>=3.4,<4",
        "textual>=8,<9",
        "tokenizers>=0.21,<1",
        "torch>=2.6,<3",
        "trio>=0.27,<1",
        "xxhash>=3.4,<5",
    ],
    extras_require={
        "gpu": ["triton>=3.6,<4"],
        "test": [
            "clang-format==23.1.5",  # another version lays out a little otherwise
            "gguf>=0.17",
            "hypothesis>=6.100",
            "import-linter>=2.1,<3",
            "prometheus-client>=0.21,<1",
            "mypy>=1.14,<3",
            "pytest>=8.3,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.17.5,<0.18",
            "safetensors>=0.5,<1",
            "transformers>=4.57,<6",
            "triton>=3.6,<4",
        ],
    },
    entry_points={"console_scripts": ["symphony = symphony.cli:main"]},
)
