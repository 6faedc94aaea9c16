"""What ptxas makes of the kernels for GPUs that need not be here: nothing spills, and occupancy holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# Registers a thread with Triton 3.9 and its own ptxas, by (kernel, compute capability). Heads are query/KV x head_dim.
RECORDED_REGISTERS = {
    "attend 9/3x64 bf16": {90: 63, 80: 64},
    "attend 9/3x64 fp16": {90: 63, 80: 64},
    "attend 32/8x128 bf16": {90: 72, 80: 80},
    "attend 4/1x256 bf16": {90: 137, 80: 128},
    "attend 9/3x64 fp32": {90: 158, 80: 70},
    "merge 9/3x64 bf16": {90: 35, 80: 33},
    "merge 9/3x64 fp16": {90: 35, 80: 33},
    "merge 9/3x64 fp32": {90: 35, 80: 33},
    "merge 32/8x128 bf16": {90: 45, 80: 43},
    "merge 4/1x256 bf16": {90: 60, 80: 60},
    "rmsnorm 576 bf16": {90: 78, 80: 64},
    "rmsnorm 4096 bf16": {90: 78, 80: 64},
    "rmsnorm 16384 bf16": {90: 115, 80: 115},
}


def resident_blocks(registers: int) -> int:
    """Blocks of 4 warps that a multiprocessor's 65,536 registers hold; they are given out by eights."""
    return 65536 // (128 * -(-registers // 8) * 8)


@pytest.fixture(scope="module", params=[90, 80], ids=["sm_90", "sm_80"])
def compiled(request, tmp_path_factory):
    """`(capability, report)` from a process of its own: this one has Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-W", "error", Path(__file__).with_name("compile_ahead.py"), str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_every_recorded_kernel_compiles(compiled):
    _, report = compiled
    assert report.keys() == RECORDED_REGISTERS.keys()


def test_no_kernel_spills_registers(compiled):
    _, report = compiled
    assert {kernel: figures["spilled"] for kernel, figures in report.items() if figures["spilled"]} == {}


def test_no_kernel_needs_so_many_registers_that_fewer_blocks_fit(compiled):
    capability, report = compiled
    for kernel, figures in report.items():
        recorded = RECORDED_REGISTERS[kernel][capability]
        assert resident_blocks(figures["registers"]) >= resident_blocks(recorded), (kernel, figures, recorded)


def test_half_precision_attention_runs_on_the_matrix_unit(compiled):
    _, report = compiled
    half = [kernel for kernel in report if kernel.startswith("attend") and not kernel.endswith("fp32")]
    assert len(half) == 4
    assert all(report[kernel]["matrix_unit"] for kernel in half)
