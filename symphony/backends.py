"""What computes: the CPU or a GPU, with the pages that it computes over.

In two parts, for weights take a while: the pages and all that is known of the decoder are there at once, the decoder
itself is loaded when names and files are served already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from decoder.batch import IntArray, NativeStep, StepBatch
from decoder.checkpoints.weights import Weights
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder, check, choose_isa
from decoder.image_facts import KvFormat
from decoder.memory import available_memory_bytes, total_memory_bytes
from decoder.model import Model
from decoder.model_config import KV_DTYPE, ModelConfig
from kvfs.pages.store import PageStore
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace
from scheduler.batch.policy import Limits
from symphony.config import Config
from symphony.reports import human_bytes

log = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.25
"""Share of the memory that is free at start that the page pool may grow to, when nothing was said."""
MAX_KV_MEMORY_SHARE = 0.75
"""The same with a GPU, whose pages have a home in host memory beside what the host keeps for it."""
WARN_MEMORY_SHARE = 0.9
"""Of all memory: a page pool of more leaves too little for weights, programs and the kernel."""
GPU_LIMITS = Limits(max_tokens=2048)
"""Products over 512 rows are bound by arithmetic, and 2,048 keep the longest step short."""

ArenaT = TypeVar("ArenaT")


class KvStore(PageStore, KvFormat, Protocol):
    """An arena: pages for the file system, in a format that images name."""


class Decoder(Protocol):
    """What runs steps."""

    def step(self, batch: StepBatch) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder that has its weights."""

    decoder: Decoder
    native: NativeStep | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """An arena, and what will compute over it."""

    arena: KvStore
    load: Callable[[Weights, Callable[[], None]], Loaded]
    """The decoder with these weights, of which it keeps nothing.

    Takes seconds, and is for a worker: it calls the second argument again and again, which may raise to end it.
    """
    description: str
    """For people."""
    bits: str
    """What the bits of numbers depend on beside the model and the precision, in short: `cpu avx2`."""
    limits: Limits = field(default_factory=Limits)
    expect: Callable[[IntArray], None] | None = None
    """To be told of pages that a call will need."""
    max_entries: int | None = None
    """Of a file that a call appends to; None: as many as there are pages."""
    statistics: Callable[[], dict[str, int]] = dict
    close: Callable[[], None] = lambda: None
    """Ends what the arena has of threads, after the decoder is closed."""


def build_backend(config: Config, model: Model) -> Backend:
    """The arena and the decoder that the configuration names; what can't be is said before any weight is loaded."""
    return _build_cuda(config, model) if config.device == "cuda" else _build_cpu(config, model)


def _build_cpu(config: Config, model: Model) -> Backend:
    dtype, isa = KV_DTYPE[config.precision], choose_isa()
    num_threads = available_cores() if config.threads is None else config.threads
    check(model.config, model.weights, num_threads, config.precision)
    page_bytes = PAGE_ENTRIES * model.config.entry_bytes(dtype)
    kv_memory = config.kv_memory
    if kv_memory is None:
        kv_memory = int(available_memory_bytes() * KV_MEMORY_SHARE)
    arena = _arena(kv_memory, page_bytes, lambda num_pages: Arena(model.config, num_pages, dtype))
    return Backend(
        arena,
        partial(_load_cpu, model.config, arena, num_threads, isa, config.precision),
        f"cpu ({config.precision}, {isa}, {num_threads} threads)",
        bits=f"cpu {isa}",
    )


def _load_cpu(
    shape: ModelConfig,
    arena: Arena,
    num_threads: int,
    isa: str,
    precision: str,
    weights: Weights,
    checkpoint: Callable[[], None],
) -> Loaded:
    decoder = CpuDecoder(shape, weights, arena, num_threads, isa, precision=precision, checkpoint=checkpoint)
    return Loaded(decoder, decoder.native)


def _build_cuda(config: Config, model: Model) -> Backend:
    try:  # torch takes seconds to import, and memory: a daemon on the CPU does without
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

    def load(weights: Weights, checkpoint: Callable[[], None]) -> Loaded:
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
