"""Backends: how large a page pool may be, and what a GPU may lack."""

import logging
import os

import pytest
import torch

from decoder.cuda.device import Device
from decoder.model import load_model
from libsym.errors import Invalid, NoSpace
from symphony.daemon import backends
from symphony.settings.loading import load

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
