"""The one command for a GPU runs to its last line without one, and finds what it checks to hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """`(output, results)` of a run at toy sizes, without the peer: transformers takes seconds to load."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.md"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "scripts" / "bench" / "gpu.py", "--interpret", "--out", out]
    command += ["--only", "tests,attention,products,step"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_text().splitlines() == done.stdout.splitlines()[-len(out.read_text().splitlines()) :]
    return done.stdout, json.loads(out.with_suffix(".json").read_text())


def test_every_part_runs_to_its_last_line(interpreted):
    output, results = interpreted
    assert results["failures"] == []
    assert results["parts"].keys() >= {"tests", "ceilings", "attention", "products", "step", "contract", "errors"}
    assert " s in all: " in output.splitlines()[-1]


def test_it_does_not_claim_a_speed_without_a_gpu(interpreted):
    output, results = interpreted
    assert "nothing here says anything about speed" in results["conditions"]["device"]
    judged = [
        line for line in output.splitlines() if line.startswith("| ") and line.endswith(("reached |", "missed** |"))
    ]
    assert len(judged) == 2  # the contract and the kernels' tests


def test_the_contract_holds_in_the_step(interpreted):
    _, results = interpreted
    assert results["parts"]["contract"]["invariant"]["all"] == 1.0
    assert results["parts"]["attention"]["shared prefix"]["same_bits"] == 1.0
    assert all(row["same_bits"] == 1.0 for row in results["parts"]["products"].values() if "same_bits" in row)


def test_logits_are_near_those_of_float64(interpreted):
    _, results = interpreted
    errors = {name.split(", ")[1]: row["relative_error"] for name, row in results["parts"]["errors"].items()}
    assert errors["invariant"] < 0.01
    assert errors["free"] < 0.01
    assert errors["fp8 KV"] < 0.05


WRONG = """
import sys
sys.path.insert(0, "scripts/bench")
import gpu, gpu_kernels

report, sound = gpu.Report(interpret=True), gpu.ROOT
gpu.ROOT = gpu.Path(sys.argv[1])
gpu.run_tests(report, gpu.REAL)
assert report.failures == [f"tests: test_{file}.py: exit status -6: " for file in "ab"], report.failures
assert report.parts["tests"]["all files"]["passed_share"] == 0.0
gpu.ROOT = sound

sys.argv = ["gpu.py", "--interpret", "--only", "tests,attentoin"]
try:
    gpu.main()
except SystemExit as error:
    assert error.code == 2

right = gpu_kernels.product_bits
gpu_kernels.product_bits = lambda *arguments: right(*arguments) | {"same_bits": 0.0}
sys.argv = ["gpu.py", "--interpret", "--only", "products"]
sys.exit(gpu.main())
"""


def test_a_test_file_that_crashes_an_unknown_part_and_bits_that_differ_are_failures(tmp_path):
    for file, text in (
        ("scripts/bench/gpu_tests.py", "import os\nos.abort()\n"),
        *((f"triton_kernels/{file}.py", "") for file in "ab"),
        *((f"tests/triton_kernels/test_{file}.py", "") for file in "ab"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", WRONG, tmp_path]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "no attentoin among tests, attention" in done.stderr
    assert "FAILED: products: o: the same bits in any batch" in done.stdout
