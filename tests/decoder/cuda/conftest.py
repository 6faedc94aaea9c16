"""Fixtures of the cuda backend in Triton's interpreter, or on a GPU with TRITON_INTERPRET=0."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decoder.cuda.arena import CudaArena
from decoder.cuda.backend import CudaDecoder
from decoder.cuda.device import Device, open_device
from decoder.model_config import GPU_KV_DTYPE
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Bench
from tests.triton_kernels.interpreter import hasten, mend_bfloat16, mend_float8


@pytest.fixture(scope="session")
def device() -> Device:
    device = open_device()
    if not device.is_gpu:
        hasten()
    return device


@pytest.fixture
def mended(device, monkeypatch) -> None:
    if not device.is_gpu:
        mend_bfloat16(monkeypatch)
        mend_float8(monkeypatch)


@pytest.fixture
def cuda_bench(device) -> Iterator[Callable[..., Any]]:
    decoders: list[CudaDecoder] = []

    def make(
        *,
        precision: str = "float32",
        kv_dtype: str | None = None,
        invariant: bool = True,
        num_pages: int = 64,
        num_frames: int = 64,
        seed: int = 0,
        **shape: Any,
    ):
        config = tiny_config(**shape)
        arena = CudaArena(config, num_pages, num_frames, device, GPU_KV_DTYPE[kv_dtype or precision])
        weights = random_weights(config, seed=7)
        decoders.append(CudaDecoder(config, weights, arena, precision=precision, invariant=invariant))
        return Bench(config, decoders[-1], arena, seed)

    yield make
    for decoder in decoders:
        decoder.close()
        decoder.arena.check()
