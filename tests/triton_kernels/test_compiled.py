"""Results of ptxas for GPUs that need not be here: no kernel spills, and occupancy holds.

The default launches; `scripts/compile_kernels` compiles all that the decoder makes, and records them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symphony-tests/triton"


def in_a_process_of_its_own(module: str, *arguments) -> subprocess.CompletedProcess:
    """Run a module without Triton's interpreter, which this process has.

    Triton keeps what it has compiled by a hash of the kernel, the options and its own version: for all checkouts.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(KEPT)}
    command = [sys.executable, "-W", "error", "-m", f"tests.triton_kernels.{module}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    KEPT.mkdir(parents=True, exist_ok=True)
    old = ["-mindepth", "1", "-maxdepth", "1", "-mtime", "+14"]
    subprocess.run(["find", KEPT, *old, "-exec", "rm", "-r", "{}", "+"], check=True)
    told = tmp_path_factory.mktemp("triton") / "figures"
    done = in_a_process_of_its_own("compile_ahead", "--default", "--json", told)
    assert told.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(told.read_text())


def test_every_kernel_file_has_launches_to_compile(compiled):
    _, _, figures = compiled
    files = {path.stem for path in (ROOT / "triton_kernels").glob("[!_]*.py") if "_kernel[" in path.read_text()}
    assert files == figures.keys()
    assert all(figures[file][sm] for file in files for sm in ("sm_80", "sm_90"))


def test_every_default_launch_is_recorded(compiled):
    _, _, figures = compiled
    for file, reports in figures.items():
        recorded = json.loads((HERE / "recorded" / f"{file}.json").read_text())
        for sm, report in reports.items():
            assert report.keys() <= recorded[sm].keys(), f"scripts/compile_kernels --record {file}"


def test_no_kernel_of_the_decode_path_spills_registers(compiled):
    _, _, figures = compiled
    spilled = {
        (sm, name): taken["spilled"]
        for reports in figures.values()
        for sm, report in reports.items()
        for name, taken in report.items()
        if taken["spilled"] and not taken["may_spill"]
    }
    assert spilled == {}


def test_as_many_warps_fit_as_were_recorded_with_the_same_matrix_instruction(compiled):
    status, output, _ = compiled
    assert status == 0, output


def test_half_precision_attention_runs_on_one_matrix_instruction(compiled):
    """Another one for decode than for prefill would be another order of additions."""
    _, _, figures = compiled
    files = ("paged_decode_attention", "paged_prefill_attention", "shared_prefix_attention")
    for sm, instruction, least in (("sm_90", "wgmma", 7), ("sm_80", "mma", 3)):
        attend = [figures[file][sm] for file in files]
        taken = [figure["matrix"] for report in attend for name, figure in report.items() if name.startswith("attend")]
        assert len(taken) >= least
        assert set(taken) == {instruction}


def test_batches_of_other_sizes_need_no_compilation_of_their_own():
    done = in_a_process_of_its_own("batches")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers.keys() >= {"matmul", "attend_splits", "merge_splits", "attend_prefixes", "attend_tiles"}
    assert set(numbers.values()) == {1}, numbers
