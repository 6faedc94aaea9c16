"""Backends: how large a page pool may be, and what a GPU may lack."""

import dataclasses
import logging
import os

import pytest
import torch

from decoder.cpu.backend import choose_isa
from decoder.cuda.device import Device
from decoder.model import load_model
from libsym.errors import Invalid, NoSpace
from symphony.daemon import backends
from symphony.settings.loading import load
from tests.decoder.cpu.quantized import quantized

MEMORY = 1 << 28


@pytest.mark.parametrize(("share", "warnings"), [(0.89, 0), (0.91, 1), (1, 1), (1.01, None)])
def test_a_pool_of_nearly_all_memory_is_warned_of_and_one_of_more_is_refused(monkeypatch, caplog, share, warnings):
    monkeypatch.setattr(backends, "total_memory_bytes", lambda: MEMORY)
    config = load(None, {"model": "tiny", "kv_memory": str(int(share * MEMORY))})
    if warnings is None:
        with pytest.raises(Invalid, match="more than all memory that the daemon may have"):
            backends.build_backend(config, load_model("tiny"))
        return
    with caplog.at_level(logging.WARNING):
        backends.build_backend(config, load_model("tiny")).close()
    assert len([record for record in caplog.records if "of all memory" in record.message]) == warnings


def test_the_precision_is_in_the_description_of_the_backend():
    config = load(None, {"model": "tiny", "kv_memory": "1M", "precision": "int8"})
    backend = backends.build_backend(config, load_model("tiny"))
    assert "int8" in backend.description
    backend.close()


@pytest.mark.parametrize(
    ("precision", "kinds", "revision"),
    [
        ("float32", ["Q4_K", "Q6_K"], ""),
        ("int8", ["Q4_K"], ""),
        ("int4", [], ""),
        ("int4", ["Q4_0"], ""),
        ("int4", ["Q4_1"], ""),
        ("int4", ["Q4_0", "Q5_0", "Q8_0"], ""),
        ("int4", ["IQ4_NL", "MXFP4"], ""),
        ("int4", ["Q4_0", "Q4_1"], " 2"),  # within Q, K and V: one matrix with mins before
        ("int4", ["Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q6_K"], " 2"),
        ("int4", ["Q4_K"], " 2"),
    ],
)
def test_files_are_marked_as_of_other_bits_only_if_the_arithmetic_of_their_codes_has_changed(
    precision, kinds, revision
):
    model = load_model("tiny:hidden=256,ffn=256,heads=8,kv_heads=4,head_dim=32")
    if kinds:
        model = dataclasses.replace(model, weights=quantized(model.weights, *kinds))
    backend = backends.build_backend(load(None, {"kv_memory": "1M", "precision": precision}), model)
    assert backend.bits == f"cpu {choose_isa()}{revision}"
    backend.close()


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the options are those of the interpreter of kernels"
)
def test_memory_that_others_took_meanwhile_is_one_line(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.06 GiB.")

    monkeypatch.setattr("decoder.cuda.backend.CudaDecoder", full)
    config = load(None, {"device": "cuda", "precision": "float32", "kv_memory": "1M"})
    model = load_model("tiny:layers=1")
    backend = backends.build_backend(config, model)
    assert backend.bits == "cuda interpreter invariant"
    with pytest.raises(NoSpace, match="the GPU's memory ran out: say a smaller --gpu-memory"):
        backend.load(model.weights, lambda _share: None)
    backend.close()


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "message"),
    [
        ((7, 5), "F16", r"the decoder needs .* 8\.0, Some GPU has 7\.5"),
        ((8, 0), "F8_E4M3", r"--kv-dtype fp8 needs .* 8\.9, Some GPU has 8\.0"),
        ((8, 0), "BF16", None),
        ((9, 0), "F8_E4M3", None),
    ],
)
def test_a_gpu_too_old_for_the_kernels_is_named(monkeypatch, capability, kv_dtype, message):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Some GPU")
    device = Device(torch.device("cuda", 0))
    if message is None:
        device.check_age(kv_dtype)
    else:
        with pytest.raises(Invalid, match=message):
            device.check_age(kv_dtype)
