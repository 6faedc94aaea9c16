"""Backends: the decoder on the CPU or a GPU, with the arena that it computes over.

A backend is built in two parts, since loading weights takes a while. The arena and the facts about the decoder are
built first. The decoder itself is loaded while the daemon already serves names and files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from decoder.batch import IntArray, NativeStep, StepBatch
from decoder.checkpoints.weights import Weights
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder, check, choose_isa
from decoder.cpu.packed_weights import arithmetic_revision
from decoder.image_facts import KvFormat
from decoder.memory import available_memory_bytes, total_memory_bytes
from decoder.model import Model
from decoder.model_config import KV_DTYPE, ModelConfig
from kvfs.pages.store import PageStore
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace
from scheduler.batch.policy import StepLimits
from symphony.settings.config import Config
from symphony.views.reports import human_bytes

log = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.25
"""Default size limit of the page pool, as a share of the memory that is free when the daemon starts."""
MAX_KV_MEMORY_SHARE = 0.75
"""Upper bound of the default size with a GPU, as a share of the free memory. With a GPU, the pool also holds the homes
of the GPU's pages.
"""
WARN_MEMORY_SHARE = 0.9
"""Share of the machine's memory. If --kv-memory exceeds it, the daemon warns that the kernel may kill the daemon."""
GPU_LIMITS = StepLimits(max_tokens=2048)
"""Limits of a step on a GPU. From 512 rows on, arithmetic limits the speed of matrix products. A step of 2,048 rows is
still short.
"""

ArenaT = TypeVar("ArenaT")


class KvStore(PageStore, KvFormat, Protocol):
    """Protocol of an arena: it stores the file system's pages, in a format that headers of KV images describe."""


class Decoder(Protocol):
    """Protocol of a decoder, which computes steps."""

    def step(self, batch: StepBatch) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder that has its weights."""

    decoder: Decoder
    native: NativeStep | None = None
    keep: Callable[[], None] = lambda: None
    """Function that keeps the loaded weights for the next start. It runs for seconds, while steps are computed."""
    make_room: Callable[[], object] | None = None
    """Function that removes kept weights while the disk is nearly full. None: no weights are kept."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An arena, and the loader of the decoder that will compute over it."""

    arena: KvStore
    load: Callable[[Weights, Callable[[float], None]], Loaded]
    """Function that loads a decoder with these weights, and keeps no reference to them.

    The function runs for seconds, on a worker. Meanwhile it calls its second argument repeatedly, with the share of the
    work that is done. An error that the second argument raises stops the loading.
    """
    description: str
    """Description of the backend, for people."""
    bits: str
    """Short name of what the bits of results depend on beside the model and the precision: the hardware, and the
    revision of the arithmetic from the second on, like `cpu avx2 2`.
    """
    limits: StepLimits = field(default_factory=StepLimits)
    expect: Callable[[IntArray], None] | None = None
    """Callback that gets the numbers of the pages that a call will need."""
    max_entries: int | None = None
    """Maximum length of a file, in entries. None: only the number of pages limits the length."""
    statistics: Callable[[], dict[str, int]] = dict
    close: Callable[[], None] = lambda: None
    """Function that ends the arena's threads. The decoder must be closed before."""


def build_backend(config: Config, model: Model) -> Backend:
    """Build the backend that the configuration names, without weights. SymError: the backend can't be built."""
    return _build_cuda(config, model) if config.device == "cuda" else _build_cpu(config, model)


def _build_cpu(config: Config, model: Model) -> Backend:
    dtype, isa = KV_DTYPE[config.precision], choose_isa()
    num_threads = available_cores() if config.threads is None else config.threads
    check(model.config, model.weights, num_threads, config.precision)
    revision = arithmetic_revision(model.config, model.weights, config.precision)
    page_bytes = PAGE_ENTRIES * model.config.entry_bytes(dtype)
    kv_memory = config.kv_memory
    if kv_memory is None:
        kv_memory = int(available_memory_bytes() * KV_MEMORY_SHARE)
    arena = _arena(kv_memory, page_bytes, lambda num_pages: Arena(model.config, num_pages, dtype))
    return Backend(
        arena,
        partial(_load_cpu, model.config, arena, num_threads, isa, config.precision, config.weights_cache),
        f"cpu ({config.precision}, {isa}, {num_threads} threads)",
        bits=f"cpu {isa}" if revision == 1 else f"cpu {isa} {revision}",
    )


def _load_cpu(
    shape: ModelConfig,
    arena: Arena,
    num_threads: int,
    isa: str,
    precision: str,
    cache_directory: Path | None,
    weights: Weights,
    checkpoint: Callable[[float], None],
) -> Loaded:
    decoder = CpuDecoder(
        shape,
        weights,
        arena,
        num_threads,
        isa,
        precision=precision,
        checkpoint=checkpoint,
        cache_directory=cache_directory,
    )
    return Loaded(decoder, decoder.native, decoder.keep, decoder.make_room)


def _build_cuda(config: Config, model: Model) -> Backend:
    try:  # importing torch takes seconds and memory: a daemon on the CPU avoids it
        from decoder.cuda.arena import CudaArena  # noqa: PLC0415
        from decoder.cuda.backend import CudaDecoder, check_config  # noqa: PLC0415
        from decoder.cuda.device import naming_full_memory, open_device  # noqa: PLC0415
        from decoder.cuda.memory_plan import choose_dtypes, plan_memory  # noqa: PLC0415
    except ImportError as error:
        raise Invalid(f"--device cuda needs torch and Triton ({error}): pip install 'symphony-os[gpu]'") from error
    check_config(model.config)
    dtype, kv_dtype = choose_dtypes(config.precision, config.kv_dtype)
    device = open_device()
    if not device.is_gpu and config.precision != "float32":
        raise Invalid(f"Triton's interpreter multiplies {config.precision} wrongly: say --precision float32")
    device.check_age(kv_dtype)
    plan = plan_memory(model.config, dtype, kv_dtype, device.free_bytes(), config.gpu_memory)
    kv_memory = config.kv_memory
    if kv_memory is None:
        available = available_memory_bytes()
        wanted = plan.num_frames * plan.page_bytes + available * KV_MEMORY_SHARE
        kv_memory = int(min(wanted, available * MAX_KV_MEMORY_SHARE))
    with naming_full_memory():
        arena = _arena(
            kv_memory,
            plan.page_bytes,
            lambda num_pages: CudaArena(model.config, num_pages, plan.num_frames, device, kv_dtype),
        )
    shape, precision, invariant = model.config, config.precision, config.invariant

    def load(weights: Weights, checkpoint: Callable[[float], None]) -> Loaded:
        with naming_full_memory():
            return Loaded(
                CudaDecoder(shape, weights, arena, precision=precision, invariant=invariant, checkpoint=checkpoint)
            )

    kind = "invariant" if invariant else "not invariant"
    return Backend(
        arena,
        load,
        f"cuda ({precision}, {kind}, {device.name})",
        bits=f"cuda {device.architecture} {kind}",
        limits=GPU_LIMITS,
        expect=arena.expect,
        max_entries=arena.num_frames * PAGE_ENTRIES,
        statistics=arena.statistics,
        close=arena.close,
    )


def _arena(kv_memory: int, page_bytes: int, make: Callable[[int], ArenaT]) -> ArenaT:
    num_pages = kv_memory // page_bytes
    if num_pages < 1:
        raise Invalid(f"--kv-memory {kv_memory} is less than one page of this model ({page_bytes} bytes)")
    memory = total_memory_bytes()
    if kv_memory > memory:
        raise Invalid(
            f"--kv-memory {kv_memory} is more than all memory that the daemon may have ({memory} bytes, "
            f"{human_bytes(memory)}: of the machine, or of a control group): say a smaller --kv-memory"
        )
    if kv_memory > WARN_MEMORY_SHARE * memory:
        log.warning(
            "--kv-memory is %d %% of all memory (%s): the kernel may kill the daemon when pages fill it",
            100 * kv_memory // memory,
            human_bytes(memory),
        )
    try:
        return make(num_pages)
    except (OSError, OverflowError) as error:
        raise NoSpace(f"no page pool of {kv_memory} bytes can be had ({error}): say a smaller --kv-memory") from error
