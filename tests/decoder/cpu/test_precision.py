"""The precision that a daemon chooses by itself follows the file, the processor and the memory, and then stays."""

import dataclasses

import pytest

from decoder.cpu import precision as choosing
from decoder.cpu.packed_weights import packed_bytes
from decoder.cpu.precision import WEIGHTS_SHARE, choose_precision
from decoder.model import load_model
from tests.decoder.cpu.quantized import quantized

MODEL = load_model("tiny")


@pytest.mark.parametrize(
    ("kinds", "isa", "precision", "why"),
    [
        ((), "avx512-bf16", "bf16", "the processor multiplies bfloat16"),
        ((), "avx2", "int8", "avx2 has no products of bfloat16"),
        (("Q4_0", "Q8_0"), "avx2", "int4", "4-bit codes"),
        (("Q8_0",), "amx", "int8", "codes that int4 can't keep"),
    ],
)
def test_the_choice_follows_the_file_and_the_processor(kinds, isa, precision, why):
    weights = quantized(MODEL.weights, *kinds) if kinds else MODEL.weights
    found, reason = choose_precision(dataclasses.replace(MODEL, weights=weights), isa)
    assert found == precision
    assert why in reason


@pytest.mark.parametrize(("fitting", "precision"), [("bf16", "bf16"), ("int8", "int8"), ("int4", "int4")])
def test_float_weights_get_the_most_bits_that_leave_memory_for_kv(monkeypatch, fitting, precision):
    num_bytes, _ = packed_bytes(MODEL.config, MODEL.weights, fitting)
    monkeypatch.setattr(choosing, "available_memory_bytes", lambda: int(num_bytes / WEIGHTS_SHARE) + 1)
    assert choose_precision(MODEL, "avx512-bf16")[0] == precision


@pytest.mark.parametrize(("kinds", "isa"), [((), "avx2"), ((), "avx512-bf16"), (("Q8_0",), "avx2")])
def test_rows_that_are_too_long_for_int8_are_not_given_to_it(kinds, isa):
    model = load_model("tiny:ffn=32800,layers=1,hidden=32")
    model = dataclasses.replace(model, weights=quantized(model.weights, *kinds) if kinds else model.weights)
    precision, why = choose_precision(model, isa)
    assert precision == "bf16"
    assert ("too long for int8" in why) == (not kinds and isa == "avx2")


def test_a_state_keeps_the_precision_of_its_newest_files_of_the_model():
    kept = [MODEL.identity | {"precision": each, "layout": "x"} for each in ("float32", "int8")]
    others = [MODEL.identity | {"model": "other", "precision": "int4"}, MODEL.identity | {"precision": "float16"}]
    assert choose_precision(MODEL, "avx2", [*others, *kept])[0] == "float32"
