"""The engines that are measured: each a process that stands still while others have their turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
MODELS = "models"


@dataclass(frozen=True, slots=True)
class Spec:
    """How an engine is started, and which of our precisions it is compared with."""

    name: str
    precision: str
    command: tuple[str, ...]


def our_specs(model: str, precisions: list[str], threads: int, isa: str) -> list[Spec]:
    driver = str(HERE / "drive_ours.py")
    return [
        Spec(f"ours-{precision}", precision, (sys.executable, driver, model, precision, str(threads), isa))
        for precision in precisions
    ]


def transformers_specs(model: str, threads: int) -> list[Spec]:
    driver = str(HERE / "drive_transformers.py")
    return [
        Spec(f"transformers-{precision}", precision, (sys.executable, driver, model, dtype, str(threads)))
        for precision, dtype in (("float32", "float32"), ("bf16", "bfloat16"))
    ]


def peer_specs(directory: Path, threads: int) -> list[Spec]:
    """Whatever README.md's steps have set up in the directory."""
    models = directory / MODELS
    rows = [
        ("vllm-bf16", "bf16", "vllm", models / "ckpt-bf16", ["bfloat16"]),
        ("openvino-fp16", "bf16", "openvino", models / "ov-fp16", []),
        ("openvino-int8", "int8", "openvino", models / "ov-int8", []),
        ("openvino-int4", "int4", "openvino", models / "ov-int4", []),
        ("llamacpp-BF16", "bf16", "llamacpp", models / "smol-BF16.gguf", []),
        ("llamacpp-Q8_0", "int8", "llamacpp", models / "smol-Q8_0.gguf", []),
        ("llamacpp-Q4_1", "int4", "llamacpp", models / "smol-Q4_1.gguf", []),
        ("llamacpp-Q4_0", "int4", "llamacpp", models / "smol-Q4_0.gguf", []),
    ]
    found = []
    for name, precision, engine, model, arguments in rows:
        python = directory / f"venv-{engine}" / "bin" / "python"
        if python.exists() and model.exists():
            driver = HERE / f"drive_{engine}.py"
            found.append(Spec(name, precision, tuple(map(str, (python, driver, model, *arguments, threads)))))
    return found


@dataclass
class Loading:
    """What it took to load the model; bytes are of all the engine's processes, libraries included."""

    seconds: float
    before: int
    """Resident before loading."""
    peak: int = 0
    """Resident at most while loading."""
    peak_anonymous: int = 0
    """Of that what is no file's."""
    about: dict[str, Any] = field(default_factory=dict)


class Side:
    """An engine's process group; it is stopped (SIGSTOP) but for the time within `running`."""

    def __init__(self, spec: Spec, log_directory: Path) -> None:
        self.spec = spec
        self._log = log_directory / f"{spec.name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._read()
        self.loading = self._load()
        self._signal(signal.SIGSTOP)

    def _load(self) -> Loading:
        loading = Loading(0.0, self.memory()[0])
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                resident, anonymous = self.memory()
                loading.peak = max(loading.peak, resident)
                loading.peak_anonymous = max(loading.peak_anonymous, anonymous)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            about = self.ask({"do": "load"})
        finally:
            done.set()
            watcher.join()
        loading.seconds = about.pop("seconds")
        loading.about = about
        return loading

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading tells why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        line = stream.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            self.close()
            raise SystemExit(f"{self.spec.name}: {answer['error']}\n{last}\nLeave it out with --only, or repair it.")
        return answer

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far, those that ended included."""
        ticks = 0
        for stat in self._stats():
            ticks += sum(map(int, stat[11:15]))  # utime, stime, and those of children that were waited for
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> tuple[int, int]:
        """Bytes resident, and of them anonymous."""
        resident = anonymous = 0
        for stat in self._stats():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{stat.pid}/status").read_text().splitlines()
                fields = dict(line.split(":", 1) for line in lines)
                resident += int(fields.get("VmRSS", "0").split()[0]) << 10
                anonymous += int(fields.get("RssAnon", "0").split()[0]) << 10
        return resident, anonymous

    def _stats(self) -> Iterator[_Stat]:
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = _Stat(int(path.name), (path / "stat").read_text().rpartition(")")[2].split())
                    if int(stat[2]) == self._process.pid:  # its process group
                        yield stat

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends the engine: its own process group, which nothing else is in."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()


class _Stat(list[str]):
    """/proc/PID/stat from the state on."""

    def __init__(self, pid: int, fields: list[str]) -> None:
        super().__init__(fields)
        self.pid = pid


def busy_seconds() -> float:
    """CPU time that anything took on this machine so far, and that its host withheld."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class Disturbance:
    """The share of the cores that others took since this was made."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._began, self._busy, self._own = time.perf_counter(), busy_seconds(), self._ours()

    def _ours(self) -> float:
        times = os.times()
        return self._side.cpu_seconds() + times.user + times.system

    def share(self) -> float:
        elapsed = time.perf_counter() - self._began
        others = (busy_seconds() - self._busy) - (self._ours() - self._own)
        return max(0.0, others / (elapsed * (os.cpu_count() or 1)))
