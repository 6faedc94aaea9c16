"""Builds of the tree, in an environment of their own: the base, the server, and what either says of what it lacks.

One build for the module: an sdist, and the wheel of that, as `python -m build` makes them.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from libsym.abi import ABI_VERSION
from symphony import __version__
from symphony.checks.installed import PACKAGES
from tests.symphony.daemons import Daemon

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".*", "tests", "__pycache__", "*.so", "_*.c", "build", "dist", "*.egg-info", "_abi.py", "results")
EXTENSIONS = (
    "libsym/_channel",
    "kvfs/_pages",
    "kvfs/_shim",
    "decoder/cpu/_step",
    "scheduler/_loop",
    "symphony/launcher/_kernel",
)
SITE = Path(sysconfig.get_paths()["purelib"])
"""Directory of this process' packages."""
BASE = ("anyio", "cffi", "_cffi_backend*", "pycparser", "idna", "typing_extensions.py", "sniffio")
"""Packages that the base installation needs, with what these need."""


pytestmark = pytest.mark.timeout(900)  # all C is compiled, maybe beside much else


def clean(**more: str) -> dict[str, str]:
    """An environment in which a Python finds what is installed beside it alone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def run(*words: object, status: int = 0, **how) -> str:
    """Output of a command, on either stream."""
    how = {"env": clean(), "cwd": "/"} | how
    done = subprocess.run(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **how
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def copy_of_the_tree(directory: Path) -> Path:
    """Files of a release; a build writes into them."""
    return Path(shutil.copytree(ROOT, directory / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT)))


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with the sdist and the wheel."""
    directory = tmp_path_factory.mktemp("built")
    tree = copy_of_the_tree(directory)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, tree]
    run(*command, cwd=directory, env=clean(CC=str(ROOT / "tests/cc")))
    shutil.rmtree(tree)
    return directory


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Make an environment with the wheel, and with this process's packages that are named, or all but the GPU's."""

    def make(name: str, *names: str, of: Path = wheel) -> Path:
        directory = tmp_path_factory.mktemp(name)
        run(sys.executable, "-m", "venv", "--without-pip", directory)
        pip = [sys.executable, "-m", "pip", "--python", directory / "bin/python", "install", "--quiet"]
        run(*pip, "--no-deps", "--no-index", "--no-compile", of)
        (site,) = directory.glob("lib/python3*/site-packages")
        for found in [path for pattern in names for path in SITE.glob(pattern)]:
            (site / found.name).symlink_to(found)
        if not names:
            no_gpu = "import sys; sys.modules['torch'] = sys.modules['triton'] = None"
            (site / "others.pth").write_text(f"{no_gpu}\n{SITE}\n")
        return directory

    return make


@pytest.fixture(scope="module")
def base(environment):
    return environment("base", *BASE)


@pytest.fixture(scope="module")
def server(environment):
    return environment("server")


@pytest.mark.slow
def test_the_names_that_PyPI_has_too_are_the_tree_s_own(tmp_path):
    """A scheduler that was installed after ours, over it or in front of it, is told by doctor."""
    program = "from symphony.checks.installed import foreign_packages; print(*foreign_packages(), sep='\\n')"
    assert run(sys.executable, "-P", "-c", program, env=clean(PYTHONPATH=str(ROOT))) == "\n"
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/__init__.py").touch()
    said = run(sys.executable, "-P", "-c", program, env=clean(PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert said.startswith(f"scheduler is imported from {tmp_path}/scheduler/__init__.py, and belongs to {ROOT}")
    command = [sys.executable, "-P", "-m", "symphony", "serve", "--model", "tiny"]
    said = run(*command, env=clean(PYTHONPATH=f"{tmp_path}:{ROOT}"), status=1)
    assert said.startswith("symphony: scheduler is imported from "), said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_what_is_imported_is_what_the_metadata_asks_for():
    """libsym and the launcher live with the base, programs with their extra, kernels with the GPU's."""
    text = (ROOT / "setup.py").read_text()

    def packages(*lists: str) -> set[str]:
        found = re.findall(rf"^ *(?:{'|'.join(lists)}) ?= ?\[(.*?)\]", text, re.DOTALL | re.MULTILINE)
        assert len(found) == len(lists)
        return set(re.findall(r'"([\w-]+)[>=]', "".join(found)))

    base, server, gpu = packages("install_requires"), packages("SERVER"), packages("GPU")
    names = {"_cffi_backend": "cffi", "mooncake": "mooncake-transfer-engine-non-cuda", "zmq": "pyzmq"}
    imported: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found = {names.get(name, name) for name in imports_of(path)}
            imported.setdefault(room_of(path), set()).update(found - sys.stdlib_module_names - set(PACKAGES))
    assert imported["libsym"] == {"anyio", "cffi"} == base
    assert imported.pop("lips") - base == packages("PROGRAMS", "GATEWAY")
    assert imported["symphony/launcher"] <= {"cffi"}  # that of what builds it
    assert set[str]().union(*imported.values()) - base == server | gpu | packages("FLEET"), (
        "what nobody imports is not asked for"
    )
    assert imported["triton_kernels"] - {"numpy"} == gpu


def room_of(path: Path) -> str:
    words = path.relative_to(ROOT).parts
    return "symphony/launcher" if words[:2] == ("symphony", "launcher") else words[0]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_C_of_another_version_of_the_ABI_is_told_at_the_import(tmp_path):
    ours = shutil.copytree(ROOT / "libsym", tmp_path / "libsym", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ours / "_abi.py").read_text()
    (ours / "_abi.py").write_text(re.sub(r"^ABI_VERSION = \d+$", "ABI_VERSION = 99", text, flags=re.MULTILINE))
    said = run(sys.executable, "-P", "-c", "import libsym", env=clean(PYTHONPATH=str(tmp_path)), status=1)
    assert f"is of ABI version {ABI_VERSION}, and the Python beside it of version 99: install" in said


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_an_installation_need(built):
    with tarfile.open(built / f"symphony_os-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [path for folder in ("man", "scripts/systemd", *PACKAGES) for path in (ROOT / folder).rglob("*")]
    needed += [ROOT / "scripts" / name for name in ("install", "uninstall", "lib.sh", "service.sh")]
    wanted = {str(path.relative_to(ROOT)) for path in needed if path.is_file() and "__pycache__" not in path.parts}
    made = {f"{name}{suffix}" for name in EXTENSIONS for suffix in (".abi3.so", ".c")} | {"libsym/_abi.py"}
    assert wanted - made - names == set()
    assert not any(name.startswith("tests/") for name in names), "some without the rest: what setuptools thinks of"


@pytest.mark.slow
def test_the_wheel_is_for_every_Python_from_3_11_on_and_every_instruction_set(wheel):
    assert re.fullmatch(rf"symphony_os-{re.escape(__version__)}-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        step = archive.read("decoder/cpu/_step.abi3.so")
    assert sorted(name for name in names if name.endswith(".so")) == sorted(f"{name}.abi3.so" for name in EXTENSIONS)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, *(f"symphony_os-{__version__}.{each}" for each in ("dist-info", "data"))}
    pages = {Path(name).name for name in names if ".data/data/share/man/man" in name}
    assert pages == {path.name for path in (ROOT / "man").glob("*.[1-8]")}
    kernels = re.findall(r"\bkernels_\w+", (ROOT / "decoder/cpu/isa.h").read_text())
    assert [name for name in kernels if name.encode() not in step] == []
    assert set(re.findall(rb"-march=[\w-]+", step)) <= {b"-march=x86-64"}, "made for the machine that built it"


BITS = """
import hashlib
import numpy as np
from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model_config import KV_DTYPE
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid

config, length = tiny_config(), 70
for isa in ("amx", "amx-emulated", "avx512-bf16", "avx512", "avx2", "plain"):
    for precision, dtype in KV_DTYPE.items():
        arena = Arena(config, 3, dtype)
        try:
            decoder = CpuDecoder(config, random_weights(config, seed=7), arena, 2, isa, precision=precision)
        except Invalid as error:
            print(error)
            continue
        rows, entries = np.empty((length, config.vocab_size), np.float32), np.arange(length, dtype=np.int32)
        pages, views = np.arange(3, dtype=np.int32), tuple(memoryview(row) for row in rows)
        decoder.step(StepBatch((Chunk(tokens=entries, positions=entries, pages=pages, start=0, rows=views),), ()))
        assert np.isfinite(rows).all()
        print(isa, precision, hashlib.sha256(rows.tobytes()).hexdigest())
        decoder.close()
"""


@pytest.mark.slow
def test_the_wheel_of_scripts_wheels_is_for_Debian_12_and_computes_the_bits_of_a_build_from_source(
    environment, server, tmp_path
):
    """The build is of the sdist, with another optimization."""
    run(ROOT / "scripts/wheels", "--quick", tmp_path)
    (made,) = tmp_path.glob("*.whl")
    glibc = re.fullmatch(rf"symphony_os-{re.escape(__version__)}-cp311-abi3-manylinux_2_(\d+)_x86_64\.whl", made.name)
    assert glibc is not None
    assert int(glibc[1]) <= 36
    with zipfile.ZipFile(made) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
    assert sorted(names) == sorted(f"{name}.abi3.so" for name in EXTENSIONS)
    bits = [run(each / "bin/python", "-c", BITS) for each in (environment("made", of=made), server)]
    assert bits[0] == bits[1]
    assert re.search("^plain float32 ", bits[0], re.MULTILINE)


PROGRAM = """
import sys
import libsym as sym
with sym.kv_create() as kv:
    tokens = sym.tokenize("Once")
    for _ in range(5):
        tokens = [sym.pred(kv, tokens).argmax()]
        print(tokens[0])
    print(list(sym.generate(kv, tokens, max_tokens=4)))
assert sym.__file__.startswith(sys.argv[1]), sym.__file__
"""


@pytest.mark.slow
def test_a_program_with_the_base_alone_uses_a_daemon_of_the_extra_server(base, server, tmp_path):
    assert run(base / "bin/symphony", "--version") == f"symphony {__version__}\n"
    with pytest.raises(AssertionError, match="No module named 'trio'"):
        run(base / "bin/python", "-c", "import trio")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    command = ["env", "-u", "PYTHONPATH", str(server / "bin/symphony")]
    daemon = Daemon(tmp_path, "--model", "tiny", "--kv-memory", "64M", command=command)
    assert daemon.process.stdin is not None
    daemon.process.stdin.close()
    try:
        environment = {name: value for name, value in daemon.environment.items() if name != "PYTHONPATH"}
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        alone = run(base / "bin/python", program, base, env=environment)
        assert len(alone.splitlines()) == 6
        assert run(server / "bin/python", program, server, env=environment) == alone
        symphony = base / "bin/symphony"
        assert run(symphony, "run", program, base, env=environment, cwd=tmp_path) == alone
        assert "program" in run(symphony, "ps", "--all", env=environment)
        assert run(symphony, "stat", env=environment).startswith("model    tiny\n")
        assert "total" in run(symphony, "du", env=environment)
        assert "all in " + str(server) in run(server / "bin/symphony", "doctor", env=environment)
        assert daemon.stop() == 0, daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["serve --model tiny", "fsck", "doctor", "trace summary x", "completion bash"])
def test_a_command_that_needs_more_than_the_base_says_so_in_one_line(base, words):
    said = run(base / "bin/symphony", *words.split(), status=1)
    assert re.fullmatch(
        r"symphony: this needs \w+, which the base installation lacks: pip install 'symphony-os\[server\]'\n", said
    )


@pytest.mark.slow
def test_a_daemon_without_torch_names_the_extra_that_computes_on_a_GPU(server, tmp_path):
    places = ("--state", tmp_path / "state", "--mount", tmp_path / "kv", "--socket", tmp_path / "socket")
    words = ("serve", "--model", "tiny", "--device", "cuda", *places)
    said = run(server / "bin/symphony", *words, status=1).splitlines()[-1]
    assert said.startswith("symphony: --device cuda needs torch and Triton ("), said
    assert said.endswith("): pip install 'symphony-os[gpu]'")


@pytest.mark.slow
def test_a_distribution_that_wrote_over_a_package_of_ours_is_named(server):
    (site,) = server.glob("lib/python3*/site-packages")
    other = site / "scheduler-0.8.8.dist-info"
    other.mkdir()
    try:
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: scheduler\nVersion: 0.8.8\n")
        (other / "top_level.txt").write_text("scheduler\n")
        said = run(server / "bin/symphony", "doctor", status=1)
    finally:
        shutil.rmtree(other)
    assert "scheduler was written over by scheduler: pip uninstall scheduler, then install Symphony again" in said


NO_FUSE_COMPILER = """#!/bin/sh
# Compiles nothing, and has no header of libfuse.
case "$*" in *-E*) exec gcc -nostdinc "$@" ;; esac
for word; do
    [ "$previous" != -o ] || : >"$word"
    previous=$word
done
"""


@pytest.mark.slow
def test_without_libfuse_s_headers_the_base_is_built_and_serve_says_what_is_missing(server, tmp_path):
    tree = copy_of_the_tree(tmp_path)
    compiler = executable(tmp_path / "cc", NO_FUSE_COMPILER)
    said = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, env=clean(CC=str(compiler)))
    assert "kvfs._shim is LEFT OUT" in said
    assert {name for name in EXTENSIONS if not list(tree.glob(f"{name}.*.so"))} == {"kvfs/_shim"}

    (shim,) = server.glob("lib/python3*/site-packages/kvfs/_shim.abi3.so")
    shim.rename(tmp_path / shim.name)
    try:
        said = run(server / "bin/symphony", "serve", "--model", "tiny", status=1)
    finally:
        shutil.move(tmp_path / shim.name, shim)
    assert said.startswith("symphony: this installation was built without libfuse's headers, and can't mount: install")
    assert len(said.splitlines()) == 1


def test_the_version_is_told_and_in_one_place():
    assert run(sys.executable, "-m", "symphony", "--version", cwd=ROOT) == f"symphony {__version__}\n"
    assert 'version=runpy.run_path("symphony/__init__.py")["__version__"]' in (ROOT / "setup.py").read_text()
