"""Compiles the kernels for GPUs that need not be there, and says what each takes of a multiprocessor.

    scripts/compile_kernels [--record] [KERNEL_FILE ...]

The launch functions themselves run, on tensors without memory (torch's `meta` device) and with a driver
that names a GPU and launches nothing: so what is compiled is what a decoder on that GPU would compile,
down to which arguments Triton finds to be multiples of 16. A launch function that waited for the device
would fail here, since a tensor without memory has no value to wait for.

Which launches there are: `launches/`. What they took when they were last recorded: `recorded/<kernel file>.json`,
written by `scripts/compile_kernels --record`.

Needs a process without TRITON_INTERPRET: Triton decides at its import which of the two it does.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.triton_kernels.launches import attention, rows

HERE = Path(__file__).resolve().parent
LAUNCHES = attention.LAUNCHES | rows.LAUNCHES
KERNEL_FILES = tuple(sorted(LAUNCHES))
CAPABILITIES = (90, 80)


class AbsentGpu:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_file(kernel_file: str, capability: int, *, every: bool) -> dict[str, dict]:
    """Return the resources of each kernel of each launch: `{"attend_split 9/3x64 bf16": {"registers": 63, ...}}`."""
    triton.runtime.driver.set_active(AbsentGpu(capability))
    report: dict[str, dict] = {}
    compiled: list[tuple[str, object]] = []
    plain_run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        del warmup
        assert all(0 < size < 2**31 for size in grid[:1]), (self.__name__, grid)
        assert all(0 < size < 2**16 for size in grid[1:]), (self.__name__, grid)
        kernel = plain_run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.__name__.strip("_").removesuffix("_kernel"), kernel))
        return kernel

    JITFunction.run = compile_only
    try:
        for launch in LAUNCHES[kernel_file]():
            if capability < launch.least_capability or not (every or launch.default):
                continue
            if not every and report and capability != CAPABILITIES[0]:
                break  # the suite compiles one launch of each file for the older GPU
            may_spill = launch.may_spill or capability < launch.may_spill_before
            compiled.clear()
            launch.run()
            assert compiled, f"{launch.name} of {kernel_file} launches nothing"
            for kernel_name, kernel in dict.fromkeys(compiled):
                name, repeats = f"{kernel_name} {launch.name}", 1
                while name in report:  # one kernel, compiled twice for one launch
                    repeats += 1
                    name = f"{kernel_name} {launch.name} ({repeats})"
                report[name] = figures(kernel) | {"may_spill": may_spill}
    finally:
        JITFunction.run = plain_run
    return report


def figures(kernel: Any) -> dict:
    """Registers a thread, bytes of stack that they spill to, shared memory, warps, and the matrix instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = found.groups()
    matrix = next((unit for unit in ("wgmma.mma", "mma.sync") if unit in kernel.asm["ptx"]), "none")
    return {
        "registers": int(registers),
        "spilled": int(stack),
        "shared": int(kernel.metadata.shared),
        "warps": int(kernel.metadata.num_warps),
        "matrix": matrix.split(".")[0],
    }


def resident_blocks(taken: dict) -> int:
    """Blocks that a Hopper multiprocessor holds: 65,536 registers (given to a thread by eights), 228 KiB of memory.

    Of that, a block takes 1 KiB more than it asks for.
    """
    threads = 32 * taken["warps"]
    by_registers = 65536 // (threads * -(-taken["registers"] // 8) * 8)
    by_memory = 228 * 1024 // (taken["shared"] + 1024)
    return min(by_registers, by_memory, 2048 // threads)


def resident_warps(taken: dict) -> int:
    return resident_blocks(taken) * taken["warps"]


def recorded(kernel_file: str) -> dict[str, dict]:
    """`{"sm_90": {"attend_split 9/3x64 bf16": {"registers": 63, ...}}}` as it was last recorded."""
    path = HERE / "recorded" / f"{kernel_file}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def compile_all(
    kernel_files: tuple[str, ...], capabilities: tuple[int, ...], *, every: bool, processes: int | None = None
) -> Iterator[tuple[str, int, dict[str, dict]]]:
    """`(kernel file, capability, report)` of each, as they come from several processes."""
    tasks = [(kernel_file, capability, every) for kernel_file in kernel_files for capability in capabilities]
    with multiprocessing.get_context("spawn").Pool(processes or len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(_compile_task, tasks, chunksize=1)


def _compile_task(task: tuple[str, int, bool]) -> tuple[str, int, dict[str, dict]]:
    kernel_file, capability, every = task
    return kernel_file, capability, compile_file(kernel_file, capability, every=every)


def faults(taken: dict, before: dict | None) -> list[str]:
    found = []
    if taken["spilled"] and not taken["may_spill"]:
        found.append("SPILLS")
    if before is not None:
        if resident_warps(taken) < resident_warps(before):
            found.append(f"FEWER WARPS FIT: {resident_warps(taken)}, recorded {resident_warps(before)}")
        if taken["matrix"] != before["matrix"]:
            found.append(f"ANOTHER MATRIX INSTRUCTION: recorded {before['matrix']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="compile_kernels",
        description="Compile every kernel as the decoder launches it, and fail if one of the decode path spills "
        "registers or fewer warps of it fit than were recorded.",
    )
    parser.add_argument("kernel_files", nargs="*", help="as in triton_kernels/, without .py; all by default")
    parser.add_argument("--record", action="store_true", help="write the figures into tests/triton_kernels/recorded/")
    parser.add_argument("--default", action="store_true", help="only what the test suite compiles")
    parser.add_argument(
        "--capability", type=int, action="append", choices=CAPABILITIES, help="80 or 90; both by default"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    reports: dict[str, dict] = {}
    worse = False
    for kernel_file, capability, report in compile_all(
        tuple(arguments.kernel_files) or KERNEL_FILES,
        tuple(arguments.capability or CAPABILITIES),
        every=not arguments.default,
    ):
        reports.setdefault(kernel_file, {})[f"sm_{capability}"] = report
        before = recorded(kernel_file).get(f"sm_{capability}", {})
        print(f"{kernel_file}, sm_{capability}:")
        for name, taken in report.items():
            found = faults(taken, before.get(name))
            worse |= bool(found)
            print(
                f"  {name:<48} {taken['registers']:>3} registers {taken['spilled']:>4} spilled {taken['shared']:>6}",
                f"shared {taken['warps']:>2} warps {resident_blocks(taken):>2} blocks {taken['matrix']:<5}",
                *found,
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(reports))
    if arguments.record:
        for kernel_file, report in reports.items():
            path = HERE / "recorded" / f"{kernel_file}.json"
            path.write_text(json.dumps(recorded(kernel_file) | report, indent=1) + "\n")
    return int(worse and not arguments.record)


if __name__ == "__main__":
    sys.exit(main())
