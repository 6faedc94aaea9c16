"""Fixtures: benches, each with a decoder."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model_config import KV_DTYPE, ModelConfig
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Bench
from tests.decoder.reference import ReferenceDecoder


@pytest.fixture
def cpu_bench() -> Iterator[Callable[..., Bench]]:
    decoders: list[CpuDecoder] = []

    def make(
        *,
        threads: int = 2,
        isa: str | None = None,
        precision: str = "float32",
        weights: Weights | None = None,
        num_pages: int = 64,
        seed: int = 0,
        **shape: Any,
    ) -> Bench:
        config = tiny_config(**shape)
        arena = Arena(config, num_pages, KV_DTYPE[precision])
        weights = weights or _weights(config)
        # solo_work=0: even the smallest step uses its other threads.
        decoders.append(CpuDecoder(config, weights, arena, threads, isa, precision=precision, solo_work=0))
        return Bench(config, decoders[-1], arena, seed)

    yield make
    for decoder in decoders:
        decoder.close()


@pytest.fixture
def reference_bench() -> Callable[..., Bench]:
    def make(*, weights: Weights | None = None, num_pages: int = 64, seed: int = 0, **shape: Any) -> Bench:
        config = tiny_config(**shape)
        arena = Arena(config, num_pages)
        return Bench(config, ReferenceDecoder(config, weights or _weights(config), arena), arena, seed)

    return make


def _weights(config: ModelConfig) -> Weights:
    return random_weights(config, seed=7)
