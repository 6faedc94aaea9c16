#!/usr/bin/env python3
"""Checks the Triton kernels and the decoder on this machine's GPU, times them, and prints a table.

    python3 scripts/bench/gpu.py [--out gpu.md] [--only PART,...]
    python3 scripts/bench/gpu.py --interpret

A run takes less than 8 minutes on an H200. --interpret runs the same code at toy sizes in Triton's interpreter, where
times mean nothing.

The script needs torch, triton, transformers, numpy and this source tree; nothing has to be built or installed. Weights
are random and made on the device. Speeds are shares of ceilings from the same run: the bandwidth of a copy, the rate of
a large bf16 product, and for a whole step the time to read its weights and KV once. If a part fails or has no time
left, the script notes that as a failure and the other parts still run. `--out FILE.md` also writes FILE.json. The exit
status is 0 if everything ran and every check held (tests, equal bits, errors). A speed below its aim is no failure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__" and "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads the variable at its import
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

from gpu_imports import use_source_tree  # noqa: E402

use_source_tree()

import numpy as np  # noqa: E402
import torch  # noqa: E402

TIME_LIMIT_S = 460
"""Time by which every part must end. The script skips a part that needs longer, so a run takes less than 8 minutes."""
HARD_LIMIT_S = 475
"""Time at which the script writes its results and exits, even if a part (say, an endless kernel) still runs."""
PARTS = ("tests", "attention", "products", "step", "peer")

MOST_ERROR = {"product": 0.01, "bf16": 0.03, "fp8": 0.10}
"""Largest errors that rounding explains, relative to the norm of the result. bfloat16 has 8 bits, float8 has 4."""


SIZES = {
    "copy_bytes": (2 << 30, 1 << 16),
    "product_side": (8192, 64),
    "attention_frames": (64 * (16384 + 128) // 32, 40),
    "attention_layers": (4, 1),
    "batch": (64, 3),
    "context": (4096, 40),
    "prefix": (16384, 256),
    "suffix": (128, 8),
    "prefill_rows": (4096, 33),
    "prefill_prefix": (4096, 33),
    "product_rows": ((1, 16, 64, 256, 4096), (1, 17)),
    "product_sets": (4, 1),
    "step_runs": (100, 1),
    "contract_length": (700, 37),
    "neighbours": (62, 3),
    "prefill_length": (2048, 33),
    "small_layers": (2, 1),
    "small_length": (600, 36),
    "peer_context": (1024, 20),
    "peer_tokens": (48, 8),
    "test_files": (99, 1),
    "tests_of_a_file": (0, 2),
}
"""Sizes of the measured work: sizes for a GPU, and toy sizes for the interpreter."""
REAL, TOY = (SimpleNamespace(**{name: sizes[index] for name, sizes in SIZES.items()}) for index in range(2))


AIMS = (
    ("decode attention, batch 64 on 4,096: share of copy bandwidth", "attention/decode, batch 64/of_copy", 0.85),
    ("shared prefix, 64 branches on 16,384: times the unshared kernel", "attention/shared prefix/speedup", 5.0),
    ("prefill attention: share of the bf16 product rate", "attention/prefill, free/of_products", 0.60),
    ("decode step, batch 1: share of the floor", "step/batch 1, invariant/of_floor", 0.85),
    ("decode step, batch 64: share of the floor", "step/batch 64, invariant/of_floor", 0.85),
    ("the contract, batch 1: share of throughput kept", "step/batch 1, cost/kept", 0.95),
    ("the contract, batch 64: share of throughput kept", "step/batch 64, cost/kept", 0.95),
    ("the contract, prefill: share of throughput kept", "step/prefill, cost/kept", 0.95),
    ("the contract holds, bit for bit", "contract/invariant/all", 1.0),
    ("kernels' own tests that passed", "tests/all files/passed_share", 1.0),
)
"""Aims on an H200. Each has a name, the place of its figure (part, row and column), and the least value that reaches
it.
"""


@dataclass(slots=True)
class Report:
    """Results of the run, collected part by part."""

    interpret: bool
    began: float = field(default_factory=time.monotonic)
    conditions: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def add(self, part: str, name: str, figures: dict[str, float]) -> None:
        self.parts.setdefault(part, {})[name] = figures
        shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        print(f"[{self.elapsed:5.0f} s] {part}: {name}: {shown}", flush=True)

    def check(self, what: str, holds: object) -> None:
        """Note a failure unless the condition holds. Speeds are never checked."""
        if not holds:
            self.failures.append(f"{what}: does not hold")
            print(f"[{self.elapsed:5.0f} s] FAILED: {self.failures[-1]}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"[{self.elapsed:5.0f} s] {text}", flush=True)

    @contextmanager
    def part(self, name: str, needs_s: float) -> Iterator[bool]:
        """Yield whether enough time is left for the part. Note an exception in the part as a failure, and go on."""
        started = self.elapsed
        if not self.interpret and started + needs_s > TIME_LIMIT_S:
            self.failures.append(
                f"{name}: left out, {TIME_LIMIT_S - started:.0f} s were left and it needs {needs_s:.0f}"
            )
            print(self.failures[-1], flush=True)
            yield False
            return
        try:
            yield True
        except Exception as error:  # noqa: BLE001  # GPUs are rare, so the other parts still run
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()
        self.seconds[name] = round(self.elapsed - started, 1)
        release()

    def aims(self) -> Iterator[tuple[str, float, float | None, bool]]:
        """Yield each aim as (name, least value, found value, whether the aim is independent of speed)."""
        for what, place, at_least in AIMS:
            part, name, figure = place.split("/")
            yield what, at_least, self.parts.get(part, {}).get(name, {}).get(figure), part in {"contract", "tests"}


def release() -> None:
    """Free cached device memory, since the next part may use another library."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Run:
    """Arguments of every part of the run."""

    report: Report
    sizes: SimpleNamespace
    interpret: bool
    clock: Any
    ceilings: Any
    dtype: torch.dtype


def run_tests(report: Report, sizes: SimpleNamespace) -> None:
    """Run the kernels' own tests, all files concurrently. Without a GPU, the same tests run in the interpreter."""
    kernels = sorted((ROOT / "triton_kernels").glob("[!_]*.py"))
    paths = (ROOT / "tests" / "triton_kernels" / f"test_{kernel.name}" for kernel in kernels)
    files = [path for path in paths if path.exists()][: sizes.test_files]
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "gpu_tests.py")]
    limit = ["--most", str(sizes.tests_of_a_file)] if sizes.tests_of_a_file else []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [(path, subprocess.Popen([*command, str(path), *limit], **pipes)) for path in files]
    passed = total = 0
    deadline = time.monotonic() + 150
    for path, process in started:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            report.failures.append(f"tests: {path.name} was not over in time")
        results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        failed = [each for each in results if each["outcome"] == "failed"]
        if process.returncode or not results:  # a negative status: a signal ended the process
            report.failures.append(f"tests: {path.name}: exit status {process.returncode}: {err.strip()[-300:]}")
            total += 1
        for each in failed[:4]:
            report.failures.append(f"tests: {path.name}: {each['test']}: {each['why'].strip()[-200:]}")
        good = sum(each["outcome"] == "passed" for each in results)
        passed, total = passed + good, total + good + len(failed)
        report.add("tests", path.stem, {"passed": good, "failed": len(failed)})
    report.add("tests", "all files", {"passed": passed, "of": total, "passed_share": passed / max(1, total)})


def run_attention(run: Run) -> None:
    from gpu_kernels import Attention, Heads, decode_attention, fp8_attention, prefill_attention, shared_prefix

    report, sizes, clock, ceilings = run.report, run.sizes, run.clock, run.ceilings
    heads = Heads(4, 2, 16) if run.interpret else Heads(32, 8, 128)
    attention = Attention(clock, heads, sizes.attention_frames, sizes.attention_layers, run.dtype)
    for batch, context in ((sizes.batch, sizes.context), (1, sizes.batch * sizes.context // 2), (33, 1000)):
        if run.interpret and batch != sizes.batch:
            continue
        name = "decode, batch 64" if batch == sizes.batch else f"decode, batch {batch} on {context}"
        report.add("attention", name, decode_attention(clock, ceilings, attention, batch, context))
    found = shared_prefix(clock, attention, sizes.batch, sizes.prefix, sizes.suffix)
    report.add("attention", "shared prefix", found)
    report.check("a shared prefix gives the bits of the plain kernel", found["same_bits"] == 1.0)
    for invariant in (False, True):
        name = "prefill, invariant" if invariant else "prefill, free"
        for prefix in (sizes.prefill_prefix, 0):
            found = prefill_attention(clock, ceilings, attention, sizes.prefill_rows, prefix, invariant=invariant)
            report.add("attention", name if prefix else f"{name}, no prefix", found)
    found = fp8_attention(clock, ceilings, attention, sizes.batch, sizes.context)
    report.add("attention", "decode, fp8 KV", found)
    report.check("attention over fp8 KV is near", found["relative_error"] < MOST_ERROR["fp8"])


def run_products(run: Run) -> None:
    from gpu_kernels import product, product_bits

    llama = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
    shapes = {"o": (64, 96), "down": (64, 1056)} if run.interpret else llama
    for name, shape in shapes.items():
        most_rows = 40 if run.interpret else 2100
        bits = product_bits(run.clock.device, shape, run.dtype, most_rows)
        run.report.add("products", f"{name}, bits", bits)
        run.report.check(f"products: {name}: the same bits in any batch", bits["same_bits"] == 1.0)
        run.report.check(f"products: {name}: right", bits["relative_error"] < MOST_ERROR["product"])
        for rows in run.sizes.product_rows:
            sets = 1 if rows > 1000 else run.sizes.product_sets
            found = product(run.clock, run.ceilings, rows, shape, run.dtype, sets)
            run.report.add("products", f"{name}, {rows} rows", found)


def run_step(run: Run, only: set[str]) -> None:
    """Measure the step, its batch invariance and the peer. Memory holds one set of weights at a time."""
    from gpu_step import LLAMA_3_8B, Model, contract, prefill_times, step_times
    from gpu_step import TOY as TOY_MODEL

    from decoder.cuda.device import open_device

    report, sizes, clock = run.report, run.sizes, run.clock
    config = TOY_MODEL if run.interpret else LLAMA_3_8B
    device = open_device()
    num_pages = sizes.batch * -(-max(sizes.context, sizes.peer_context) // 32) + 64
    needed = max(num_pages, (sizes.neighbours + 2) * (sizes.contract_length // 32 + 1))
    kv, model = "BF16", None
    with report.part("step", 90) as go:
        if go:
            model = Model(config, device, needed, precision="bf16", kv_dtype=kv)
            model.fill()
            for batch in (1, sizes.batch):
                found = step_times(clock, run.ceilings, model, batch, sizes.context, sizes.step_runs)
                found["cost"]["kept"] = 1.0 - found["cost"]["throughput_lost"]
                for name, figures in found.items():
                    label = "batch 64" if batch != 1 else "batch 1"
                    report.add("step", f"{label}, {name}", figures)
            if "peer" in only:
                for batch in (1, sizes.batch):
                    found = step_times(clock, run.ceilings, model, batch, sizes.peer_context, sizes.step_runs // 2)
                    report.add("peer", f"ours, batch {batch} on {sizes.peer_context}", found["invariant"])
            found = prefill_times(clock, run.ceilings, model, sizes.prefill_length, 10)
            found["cost"]["kept"] = 1.0 - found["cost"]["throughput_lost"]
            for name, figures in found.items():
                report.add("step", f"prefill, {name}", figures)
    with report.part("contract", 40) as go:
        if go and model is not None:
            for invariant in (True, False):
                found = contract(model, sizes.contract_length, sizes.neighbours, invariant=invariant)
                found["all"] = min(found.values())
                report.add("contract", "invariant" if invariant else "free", found)
                what = "the contract, bit for bit" if invariant else "finite logits without the contract"
                report.check(what, (found["all"] if invariant else found["finite"]) == 1.0)
    if model is not None:
        model.close()
    model = None
    release()
    with report.part("errors", 30) as go:
        if go:
            run_errors(run, config, device, kv)
    with report.part("peer", 75) as go:
        if go and "peer" in only:
            run_peer(run, config, device.torch)


def run_errors(run: Run, config: Any, device: Any, kv: str) -> None:
    from dataclasses import replace

    from gpu_step import Model, errors

    report, sizes = run.report, run.sizes
    small = replace(config, num_layers=sizes.small_layers)
    pages = -(-sizes.small_length // 32) + 8
    exact = Model(small, device, pages, precision="bf16", kv_dtype=kv)
    narrow = Model(small, device, pages, precision="bf16", kv_dtype="F8_E4M3", weights=exact.weights)
    for name, figures in errors(exact, narrow, sizes.small_length).items():
        report.add("errors", f"{sizes.small_layers} layers, {name}", figures)
        most = MOST_ERROR["fp8" if name == "fp8 KV" else "bf16"]
        report.check(f"errors: {name}: near float64", figures["relative_error"] < most)
    exact.close()
    narrow.close()
    del exact, narrow


def run_peer(run: Run, config: Any, device: torch.device) -> None:
    from gpu_peer import Absent, Peer

    sizes, report = run.sizes, run.report
    try:
        with torch.inference_mode(mode=False):
            peer = Peer(config, run.dtype, device)
        for batch in (1, sizes.batch):
            with torch.inference_mode(mode=False):
                times, how = peer.decode_times(batch, sizes.peer_context, sizes.peer_tokens)
            found = times.figures() | {"tokens_per_s": batch / times.median}
            ours = report.parts.get("peer", {}).get(f"ours, batch {batch} on {sizes.peer_context}")
            if ours:
                found["ours_to_it"] = times.median * 1e6 / ours["median_us"]
            report.add("peer", f"transformers {peer.version}, batch {batch} on {sizes.peer_context}", found)
            report.note(f"transformers, batch {batch}: {how}; it samples on the device, ours hands out whole logits")
    except Absent as error:
        report.note(f"no continuous batching beside it: {error}")


def conditions(interpret: bool) -> dict[str, Any]:
    import triton

    found = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "Triton's interpreter: nothing here says anything about speed",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
    }
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        found["transformers"] = "none"
    if not interpret:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return found


def markdown(report: Report) -> list[str]:
    lines = [", ".join(f"{key} {value}" for key, value in report.conditions.items()) + ".", ""]
    lines += ["| aim | at least | found | |", "|---|---|---|---|"]
    for what, at_least, value, is_equality in report.aims():
        verdict = "not measured" if value is None else "reached" if value >= at_least else "**missed**"
        if report.interpret and not is_equality:
            verdict = "no GPU"
        found = "" if value is None else f"{value:.3f}"
        lines.append(f"| {what} | {at_least:.2f} | {found} | {verdict} |")
    for part, rows in report.parts.items():
        keys = list(dict.fromkeys(key for figures in rows.values() for key in figures))
        lines += ["", f"| {part} | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
        for name, figures in rows.items():
            cells = [_short(figures[key]) if key in figures else "" for key in keys]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    lines += ["", *(f"- FAILED: {failure}" for failure in report.failures)] if report.failures else []
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in report.seconds.items())
    lines += ["", f"{report.elapsed:.0f} s in all: {seconds}."]
    return lines


def write(report: Report, out: Path | None) -> None:
    lines = markdown(report)
    print("\n" + "\n".join(lines), flush=True)
    if out:
        out.write_text("\n".join(lines) + "\n")
        names = ("conditions", "parts", "notes", "failures", "seconds")
        out.with_suffix(".json").write_text(
            json.dumps({name: getattr(report, name) for name in names}, indent=1) + "\n"
        )


def give_up(report: Report, out: Path | None) -> None:
    report.failures.append(f"not over after {HARD_LIMIT_S} s: what was running is given up")
    write(report, out)
    os._exit(1)


class Patch:
    """Stand-in for the part of pytest's monkeypatch that `interpreter.py` uses. Changes are never undone."""

    setattr = staticmethod(setattr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="toy sizes in Triton's interpreter, on the CPU")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="the table; FILE.json beside it has all figures")
    parser.add_argument(
        "--only", default=",".join(PARTS), metavar="PART,...", help="parts to run (peer also runs step)"
    )
    options = parser.parse_args()
    only = set(options.only.split(","))
    if unknown := only.difference(PARTS):
        parser.error(f"--only: no {', '.join(sorted(unknown))} among {', '.join(PARTS)}")
    if "peer" in only:
        only.add("step")  # the peer is compared with the step
    if not options.interpret and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU: --interpret runs every line at toy sizes without one")

    from gpu_clock import Clock, measure_ceilings

    torch.manual_seed(1)
    report, sizes = Report(options.interpret), TOY if options.interpret else REAL
    report.conditions = conditions(options.interpret)
    print(report.conditions, flush=True)
    limit = threading.Timer(HARD_LIMIT_S, give_up, (report, options.out))
    limit.daemon = True
    if not options.interpret:
        limit.start()
    if options.interpret:
        from tests.triton_kernels import interpreter

        interpreter.hasten()
        for name in [name for name in vars(interpreter) if name.startswith("mend_")]:
            getattr(interpreter, name)(Patch())
    with torch.inference_mode():
        if "tests" in only:
            with report.part("tests", 0) as go:
                if go:
                    run_tests(report, sizes)
        clock = Clock(torch.device("cpu" if options.interpret else "cuda"))
        ceilings = measure_ceilings(clock, sizes.copy_bytes, sizes.product_side)
        report.add(
            "ceilings",
            "measured",
            {"copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9, "tflop_per_s": ceilings.products_flop_per_s / 1e12},
        )
        run = Run(report, sizes, options.interpret, clock, ceilings, torch.bfloat16)
        for name, part in (("attention", run_attention), ("products", run_products)):
            if name in only:
                with report.part(name, 60) as go:
                    if go:
                        part(run)
        if "step" in only:
            with report.part("all of the step", 0):
                run_step(run, only)
    limit.cancel()
    write(report, options.out)
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
