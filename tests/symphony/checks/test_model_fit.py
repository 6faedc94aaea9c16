"""`symphony doctor --model`: the needs of a model are those that the daemon finds when it loads the model."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from decoder.model_config import KV_DTYPE
from symphony import cli
from symphony.checks import model_fit
from symphony.checks.model_fit import check_model_fit
from symphony.views.reports import human_bytes
from tests.decoder.cpu.quantized import quantized
from tests.decoder.quantized_checkpoints import gptq, tensors_of, write_checkpoint

SPEC = "tiny:layers=3,vocab=500"


def report(*words, capsys, status=0):
    assert cli.main(["doctor", "--json", *words]) == status
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8", "int4"])
def test_the_fastest_decoding_is_the_rate_of_memory_for_the_bytes_that_a_step_reads(precision, monkeypatch):
    model = load_model(SPEC)
    arena = Arena(model.config, 1, KV_DTYPE[precision])
    decoder = CpuDecoder(model.config, model.weights, arena, 1, precision=precision)
    monkeypatch.setattr(model_fit, "read_rate", lambda: 1000.0 * decoder.weight_bytes)
    check = next(each for each in check_model_fit(SPEC) if each.name == precision)
    decoder.close()
    assert "at most 1,000 tokens/s of one stream" in check.detail


def test_the_report_says_what_the_model_is_and_which_precision_it_cannot_have(monkeypatch, capsys):
    model = load_model(SPEC)
    monkeypatch.setattr(
        model_fit, "load_model", lambda _: dataclasses.replace(model, weights=quantized(model.weights, "Q8_0"))
    )
    found = report("--model", SPEC, "--context", "100", capsys=capsys)
    assert "3 layers, 500 tokens, contexts of up to 4,096" in found["model"]["detail"]
    assert "tensors of 22 Q8_0, 7 F32" in found["stored"]["detail"]
    entry_bytes = load_model(SPEC).config.entry_bytes("BF16")
    assert f"KV {100 * entry_bytes / 1024:.0f}K for 100 entries" in found["bf16"]["detail"]
    assert found["int4"]["ok"] is None
    assert "this file has other codes" in found["int4"]["detail"]
    assert found["fit"]["ok"]


def test_a_quantised_directory_says_its_codes_and_the_precision_that_keeps_them(tmp_path, capsys, caplog):
    for form, kept, lacking, auto in (
        (gptq(4, 32), "7 GPTQ 4-bit, 5 BF16", None, "int4 at a first start: the file has 4-bit codes"),
        (
            gptq(4, 32, desc_act=True),
            "7 GPTQ 4-bit act-order",
            "other codes (7 GPTQ 4-bit act-order",
            "int8 at a first",
        ),
    ):
        tensors, _ = tensors_of(form)
        directory = str(write_checkpoint(tmp_path, tensors, form.settings))
        found = report("--model", directory, "--context", "100", capsys=capsys)
        size = sum(each.nbytes for each in tensors.values())
        assert found["stored"]["detail"].startswith(f"{human_bytes(size)}: tensors of {kept}")
        assert found["auto"]["detail"].startswith(auto)
        assert lacking is None or lacking in found["int4"]["detail"]
        with caplog.at_level("INFO"):
            load_model(directory)
        assert kept in caplog.messages[-1]


def test_a_context_beyond_the_models_positions_is_noted(capsys):
    assert "context" not in report("--model", SPEC, "--context", "4096", capsys=capsys)
    found = report("--model", SPEC, "--context", "4097", capsys=capsys)
    assert found["context"]["ok"] is None
    assert found["context"]["detail"] == "4,097 entries need positions beyond the model's 4,096"


def test_a_model_that_fits_in_no_precision_is_a_failure_with_advice(capsys):
    found = report("--model", SPEC, "--context", "9" * 18, capsys=capsys, status=1)
    assert all("do not fit in memory" in found[precision]["detail"] for precision in ("float32", "bf16", "int8"))
    assert found["fit"]["advice"]


def test_a_model_that_cannot_be_served_is_refused_by_the_words_of_serve(tmp_path, capsys):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    for spec, words in ((str(path), str(path)), ("tiny:layers=9999", "9999 layers"), ("/absent", "not found")):
        found = report("--model", spec, capsys=capsys, status=1)
        assert list(found) == ["model"]
        assert words in found["model"]["detail"]


def test_a_name_in_the_file_cannot_command_the_terminal(monkeypatch, capsys):
    model = load_model(SPEC)
    config = dataclasses.replace(model.config, name="x\x1b[2Jy\nok")
    monkeypatch.setattr(model_fit, "load_model", lambda _spec: dataclasses.replace(model, config=config))
    assert cli.main(["doctor", "--model", SPEC]) == 0
    assert capsys.readouterr().out.startswith(r"ok    model    x\x1b[2Jy\nok: llama")


@pytest.mark.parametrize("words", [["--context", "5"], ["--model", "tiny", "--context", "0"]])
def test_a_context_needs_a_model_and_a_number(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(["doctor", *words]))
    assert capsys.readouterr().err


def test_a_report_that_a_full_disk_refuses_ends_in_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "symphony", "doctor", "--model", "tiny"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "symphony: the output can't be written: No space left on device\n")
