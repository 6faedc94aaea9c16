#!/usr/bin/env python3
"""Measure how soon a daemon answers: the first start packs the weights, the next start maps them. And the memory of
one and of two daemons.

The model is a GGUF file of a known shape with random weights in Q4_0, written for the run, or `--model`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from harness import Daemon, Row, arguments, processor, served, show_rows

import libsym as sym
from decoder.checkpoints.gguf import read_gguf
from decoder.model import packaged_gguf


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


SHAPES = {
    "tiny": Shape(256, 2, 4, 2, 512, 49_152),
    "1b": Shape(2048, 22, 32, 4, 5632, 49_152),  # TinyLlama
    "8b": Shape(4096, 32, 32, 8, 14_336, 128_256),  # Llama 3
}
VALUES, BLOCK_BYTES = 32, 18  # of a block of Q4_0: a float16 scale, and 32 codes of 4 bits


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the output and input features of each matrix, by its name in the file."""
    found = {"token_embd": (shape.vocab, shape.hidden), "output": (shape.vocab, shape.hidden)}
    kv = shape.hidden // shape.heads * shape.kv_heads
    for layer in range(shape.layers):
        found |= {
            f"blk.{layer}.attn_q": (shape.hidden, shape.hidden),
            f"blk.{layer}.attn_k": (kv, shape.hidden),
            f"blk.{layer}.attn_v": (kv, shape.hidden),
            f"blk.{layer}.attn_output": (shape.hidden, shape.hidden),
            f"blk.{layer}.ffn_gate": (shape.ffn, shape.hidden),
            f"blk.{layer}.ffn_up": (shape.ffn, shape.hidden),
            f"blk.{layer}.ffn_down": (shape.hidden, shape.ffn),
        }
    return found


def metadata(name: str, shape: Shape) -> dict[str, Any]:
    """Return the metadata of the packaged model for another shape. Its vocabulary is filled up."""
    found: dict[str, Any] = dict(read_gguf(packaged_gguf()).metadata)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    missing = shape.vocab - len(tokens)
    unused = int(gguf.TokenType.UNUSED)
    return found | {
        "general.name": name,
        "llama.block_count": shape.layers,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.ffn,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": shape.hidden // shape.heads,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.tokens": [*tokens, *(f"<unused{number}>" for number in range(missing))],
        "tokenizer.ggml.token_type": [*types, *[unused] * missing],
    }


def write_model(path: Path, name: str) -> None:
    """Write a model with random weights, one matrix at a time."""
    shape, rng, kind = SHAPES[name], np.random.default_rng(1), gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata(name, shape).items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    sizes = matrices(shape)
    norms = ["output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(shape.layers) for part in ("attn", "ffn"))]
    for norm in norms:
        writer.add_tensor_info(f"{norm}.weight", (shape.hidden,), np.dtype(np.float32), 4 * shape.hidden)
    for matrix, (rows, inputs) in sizes.items():
        stored = rows, inputs // VALUES * BLOCK_BYTES
        writer.add_tensor_info(f"{matrix}.weight", stored, np.dtype(np.uint8), stored[0] * stored[1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    for rows, inputs in sizes.values():
        blocks = rng.integers(0, 256, (rows * inputs // VALUES, BLOCK_BYTES), dtype=np.uint8)
        scales = rng.uniform(0.002, 0.006, len(blocks)).astype(np.float16)
        blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        writer.write_tensor_data(blocks)
    writer.close()


@contextlib.contextmanager
def answering(args: Namespace, model: Path, cache: Path | str) -> Iterator[tuple[Daemon, float]]:
    """Start a daemon, and yield it with the seconds from its exec to its first answer."""
    began_s = time.perf_counter()
    options = ("--precision", args.precision, "--kv-memory", "256M", "--weights-cache", cache)
    with served(str(model), *options) as daemon:
        sym.connect(daemon.socket)
        with sym.kv_create() as kv:
            sym.pred(kv, [1])
        took_s = time.perf_counter() - began_s
        yield daemon, took_s
        sym.close()


def decode_rate(daemon: Daemon, num_tokens: int) -> float:
    """Return the tokens a second of one loop over pred()."""
    sym.connect(daemon.socket)
    with sym.kv_create() as kv:
        token, began_s = 1, time.perf_counter()
        for _ in range(num_tokens):
            token = sym.pred(kv, [token]).argmax()
        return num_tokens / (time.perf_counter() - began_s)


def pss_mib(daemon: Daemon) -> float:
    """Return a daemon's proportional set size: pages that it shares count by its share."""
    for line in Path(f"/proc/{daemon.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the kernel tells no Pss")


def until_kept(daemon: Daemon, patience_s: float = 300) -> float:
    """Wait until the daemon has written the packed weights. Return the seconds."""
    began_s = time.perf_counter()
    while "packed weights are" not in (text := daemon.log.read_text()):
        if time.perf_counter() - began_s > patience_s:
            raise SystemExit(f"the weights are not kept:\n{text}")
        time.sleep(0.05)
    if "are not kept" in text:
        raise SystemExit(text)
    return time.perf_counter() - began_s


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: Namespace, model: Path, scratch: Path) -> list[Row]:
    found: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    for number in range(args.rounds):
        cache = scratch / f"cache-{number}"
        with answering(args, model, "") as (daemon, took_s):
            note("none", took_s)
            note("rate none", decode_rate(daemon, args.tokens))
            note("pss none", pss_mib(daemon))
        drop_from_page_cache(model)
        with answering(args, model, cache) as (daemon, took_s):
            note("first", took_s)
            note("kept", until_kept(daemon))
            note("rate first", decode_rate(daemon, args.tokens))
            note("pss first", pss_mib(daemon))
        with answering(args, model, cache) as (one, took_s):
            note("next", took_s)
            note("rate next", decode_rate(one, args.tokens))
            note("pss one", pss_mib(one))
            sym.close()
            with answering(args, model, cache) as (two, _):
                note("pss two", (pss_mib(one) + pss_mib(two)) / 2)
        for path in cache.iterdir():
            drop_from_page_cache(path)
        with answering(args, model, cache) as (_, took_s):
            note("disk", took_s)
        for path in cache.iterdir():
            path.unlink()
    return [
        Row("answer without a cache, file in memory", "s", found["none"]),
        Row("answer, first start, file on disk", "s", found["first"]),
        Row("until the packed weights are kept", "s", found["kept"]),
        Row("answer, next start, weights in memory", "s", found["next"], "without", found["none"]),
        Row("answer, next start, weights on disk", "s", found["disk"], "without", found["none"]),
        Row("decode after the first start", "tokens/s", found["rate first"], "without", found["rate none"]),
        Row("decode after the next start", "tokens/s", found["rate next"], "without", found["rate none"]),
        Row("PSS without a cache", "MiB", found["pss none"]),
        Row("PSS after the first start", "MiB", found["pss first"]),
        Row("PSS of one daemon", "MiB", found["pss one"]),
        Row("PSS of each of two daemons", "MiB", found["pss two"]),
    ]


def main() -> None:
    parser = arguments(
        __doc__,
        quick=False,
        json=False,
        save=str,
        shape=("8b", f"shape of the random model: {', '.join(SHAPES)}"),
        model=(Path, "a model of your own, in place of a random one"),
        precision=("int4", "as for symphony serve (default: %(default)s)"),
        rounds=3,
        tokens=(16, "tokens of each decode loop (default: %(default)s)"),
        directory=(Path, "directory for the model and the cache, on the disk that is measured (default: temporary)"),
    )
    args = parser.parse_args()
    if args.quick:
        args.shape, args.rounds, args.tokens = "tiny", 1, 4
    with tempfile.TemporaryDirectory(prefix="sl", dir=args.directory) as directory:
        model = args.model or Path(directory) / f"{args.shape}.gguf"
        if args.model is None:
            write_model(model, args.shape)
        rows = measure(args, model, Path(directory))
        heading = f"{model.name}, {model.stat().st_size / 1e9:.2f} GB, {args.precision}; {processor()}"
        show_rows(rows, heading, args)


if __name__ == "__main__":
    main()
