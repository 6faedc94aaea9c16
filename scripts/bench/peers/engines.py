"""The measured engines. Each is a process that is stopped while other engines have their turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
MODELS = "models"


@dataclass(frozen=True, slots=True)
class Spec:
    """The command that starts an engine, and the precision of ours that it is compared with."""

    name: str
    precision: str
    command: tuple[str, ...]


def our_specs(model: str, precisions: list[str], threads: int, isa: str, before: Path | None = None) -> list[Spec]:
    """Return our decoders, or those of the checkout `before`."""
    python, here = (before / ".venv/bin/python", before / "scripts/bench/peers") if before else (sys.executable, HERE)
    name = "before" if before else "ours"
    return [
        Spec(
            f"{name}-{precision}",
            precision,
            (str(python), str(here / "drive_ours.py"), model, precision, str(threads), isa),
        )
        for precision in precisions
    ]


def peer_specs(directory: Path, threads: int) -> list[Spec]:
    """Return the engines that are installed in the directory, as README.md describes."""
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


class Side:
    """The process group of an engine. The group runs only within `running`, and is stopped (SIGSTOP) otherwise."""

    def __init__(self, spec: Spec, log_directory: Path) -> None:
        self.spec = spec
        self._log = log_directory / f"{spec.name}.log"
        with self._log.open("w") as log:
            pipe, environment = subprocess.PIPE, os.environ | {"PYTHONUNBUFFERED": "1"}
            own = {"stderr": log, "start_new_session": True, "env": environment}
            self._process = subprocess.Popen(spec.command, stdin=pipe, stdout=pipe, text=True, **own)
        self._read()
        self.about = self.ask({"do": "load"})
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the read below reports the reason
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

    def pids(self) -> list[int]:
        """Return the processes of the engine's group."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(path.name)) == self._process.pid:
                    found.append(int(path.name))
        return found

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the engine: all processes of its group."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
