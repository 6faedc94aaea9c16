"""A daemon of a crowd's own, from this checkout or another one, and who crowds it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SYMPHONY = ("-m", "symphony.cli")


@dataclass(frozen=True)
class Attacked:
    """A daemon that serves: where it is, and what programs need to find it."""

    pid: int
    mount: Path
    socket: Path
    log: Path
    tree: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SYMPHONY_SOCKET": str(self.socket), "PYTHONPATH": str(self.tree)}

    def program(self, source: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program given as text, with pipes for text in and out. To be another user, it calls os.setresuid."""
        return subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def arguments(description: str | None, model: str = "tiny") -> argparse.ArgumentParser:
    """Return a parser with the options of every crowd, which may add its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is crowded")
    parser.add_argument("--model", default=model)
    parser.add_argument("--quick", action="store_true", help="a small crowd, and the tiny model: whether it works")
    return parser


@contextmanager
def attacked(args: argparse.Namespace, *options: str, symphony: Sequence[str | Path] = SYMPHONY) -> Iterator[Attacked]:
    """Serve until the crowd has gone; every user may reach the socket and the mount."""
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        where.chmod(0o755)
        mount, socket, log = where / "kv", where / "socket", where / "log"
        mount.mkdir()
        tree = args.tree.resolve()
        own = tree / ".venv/bin/python"
        command = [
            own if own.exists() else sys.executable,
            *symphony,
            "serve",
            "--model",
            args.model,
            "--mount",
            mount,
        ]
        command += ["--socket", socket, "--state", where / "state", *options]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        with log.open("w") as errors:
            served = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            assert served.stdout is not None
            assert served.stdout.readline().startswith("symphony:"), log.read_text()
            yield Attacked(served.pid, mount, socket, log, tree)
        finally:
            served.terminate()
            status = served.wait(60)
            if status:  # its mount would keep the directory from being removed
                subprocess.run(["fusermount3", "-uzq", mount], check=False)
        if status:
            raise SystemExit(f"the daemon ended with status {status}:\n{log.read_text()}")


def processor() -> str:
    """To be printed beside every figure."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    flags = set(next((line.partition(": ")[2] for line in lines if line.startswith("flags")), "").split())
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags]
    return f"{os.cpu_count()} cores of {name} ({', '.join(known)})"
