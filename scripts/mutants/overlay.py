"""A checkout in which only the tests see replaced files, and builds of its C extensions."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parents[2]
LAID_OVER = """
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/over,workdir=$2/work" "$1" && cd "$1" || exit 99
shift 2
"$@"
exit $?
"""


def pytest(laid: dict[str, bytes], words: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest with these files laid over the checkout. Return its exit status (None: time limit) and output.

    pytest has its own namespaces of mounts and processes. So all processes and mounts of the tests end with pytest.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        place = Path(name)
        place.chmod(0o755)  # tests let other users into their directories
        for folder in ("over", "work", "tests"):
            (place / folder).mkdir()
        for file, content in laid.items():
            (place / "over" / file).parent.mkdir(parents=True, exist_ok=True)
            (place / "over" / file).write_bytes(content)
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--mount-proc"]
        command += ["--kill-child", "bash", "-c", LAID_OVER, "bash", str(HOUSE), name, sys.executable, "-m", "pytest"]
        command += ["-q", "-p", "no:cacheprovider", f"--basetemp={name}/tests/base", *words]
        environment = os.environ | {"TMPDIR": f"{name}/tests"}
        with (place / "said").open("w+") as said:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            said.seek(0)
            out = said.read()
    if status == 99 or (status is not None and out.startswith("unshare:")):
        raise SystemExit(f"nothing can be laid over {HOUSE}, which needs root: {out}")
    return status, out


def _end(unshare: subprocess.Popen[bytes]) -> None:
    """Kill the first process of a namespace, and wait until the kernel has killed the rest."""
    while unshare.poll() is None:
        for child in Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            unshare.wait(1)


class Extension:
    """C extension, compiled as by setup.py."""

    def __init__(self, about: Any, place: Path, *flags: str) -> None:
        self._about, self._place, self._flags = about, place, flags
        self._objects = {source: self._compiled(source, source) for source in about.sources}
        self.library = f"{about.name.replace('.', '/')}.abi3.so"

    def _compiled(self, source: str, text: str) -> str:
        to = f"{self._place}/{Path(text).name}.o"
        where = [f"-I{folder}" for folder in (*self._about.include_dirs, sysconfig.get_path("include"))]
        flags = ["-fPIC", "-DNDEBUG", "-w", *self._about.extra_compile_args, *where, *self._flags]
        compiler(*flags, "-iquote", str(Path(source).parent), "-c", text, "-o", to)
        return to

    def linked(self, *others: str, source: str = "", text: bytes = b"") -> bytes:
        """Link the library, with more objects or with another text for one source. Return the library's bytes."""
        objects = dict(self._objects)
        if source:
            changed = self._place / "changed.c"
            changed.write_bytes(text)
            objects[source] = self._compiled(source, str(changed))
        to = self._place / "library.so"
        compiler("-shared", "-o", str(to), *objects.values(), *others, *(f"-l{each}" for each in self._about.libraries))
        return to.read_bytes()


def extensions(files: list[str], place: Path, *flags: str) -> dict[str, list[Extension]]:
    """Return the extensions that each of these C files is compiled into. Files of the core are compiled into two
    extensions.
    """
    found: dict[str, list[Extension]] = {file: [] for file in files if file.endswith(".c")}
    for build in re.findall(r'"(\S+_build\.py):ffi"', Path("setup.py").read_text(encoding="utf-8")):
        room = tempfile.mkdtemp(dir=place)
        with redirect_stdout(io.StringIO()):
            about = runpy.run_path(build)["ffi"].distutils_extension(room, verbose=False)
        if wanted := found.keys() & set(about.sources):
            extension = Extension(about, Path(room), *flags)
            for file in wanted:
                found[file].append(extension)
    if missing := [file for file, those in found.items() if not those]:
        raise SystemExit(f"no extension of setup.py has {', '.join(missing)}")
    return found


def compiler(*words: str) -> None:
    subprocess.run([os.environ.get("CC", "cc"), *words], check=True, capture_output=True)
