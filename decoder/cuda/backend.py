"""The decoder on an NVIDIA GPU. The host lays out a batch, and uploads each pass in one copy.

The host waits once in each pass, for the logits. The rows of a pass are its decodes, then its prefills one after the
other. A pass of decodes alone runs as a captured graph (`graphs.py`). In other passes, kernels are launched one by one.

The residual stream is float32. Activations have the precision of the weights. So the sum over the layers is rounded
when a product reads it, and not at each addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder.batch import IntArray, MassArray, StepBatch
from decoder.checkpoints.weights import Weights
from decoder.checks import check_batch, check_shape
from decoder.cores import available_cores
from decoder.cuda.arena import CudaArena
from decoder.cuda.decode_layout import DecodeLayout, decode_arrays, lay_tables
from decoder.cuda.device import Device, Mark
from decoder.cuda.device_weights import LayerWeights, load_weights
from decoder.cuda.graphs import DecodeGraphs, DecodeSize
from decoder.cuda.memory_plan import LOGIT_ROWS, MAX_ROWS, MAX_SPLITS, PRECISIONS
from decoder.cuda.passes import ChunkRows, Pass, divide, table_width
from decoder.cuda.products import Products
from decoder.cuda.staging import Laid, Staging, fill
from decoder.cuda.tables import rope_table
from decoder.model_config import ModelConfig
from libsym.errors import Invalid
from triton_kernels.attention_launch import wide_shape
from triton_kernels.attention_mass import attention_mass, mass_steps
from triton_kernels.attention_splits import SPLIT_PAGES
from triton_kernels.embedding import embed
from triton_kernels.gated_activation import gated_activation
from triton_kernels.page_copy import copy_pages
from triton_kernels.paged_decode_attention import Scratch, layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention, prefill_tiles
from triton_kernels.rmsnorm import MAX_HIDDEN_SIZE, add_rmsnorm, rmsnorm
from triton_kernels.rope_store import rope_store
from triton_kernels.shared_prefix_attention import SharedPrefixes

_PARALLEL_BYTES = 1 << 20
"""If a step has fewer bytes of logits, the thread of the step copies them to their readers."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Tensors on the device that attention needs for the decodes of a pass."""

    page_tables: Tensor
    lengths: Tensor
    groups: SharedPrefixes | None


@dataclass(frozen=True, slots=True)
class _Mass:
    """Tensors on the device for the mass of the prefills that ask for it."""

    tiles: Tensor
    steps: Tensor
    first_columns: Tensor
    levels: Tensor
    sums: Tensor
    """[layers, KV heads, columns]"""


@dataclass(frozen=True, slots=True)
class _Prefills:
    """Tensors on the device that attention needs for the prefills of a pass."""

    page_tables: Tensor
    starts: Tensor
    first_rows: Tensor
    tiles: Tensor
    masks: Tensor | None
    mask_first: Tensor
    mask_words: Tensor
    mass: _Mass | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors on the device for all rows of one pass."""

    tokens: Tensor
    positions: Tensor
    entries: Tensor
    """Place for K and V of each row, as frame * 32 + entry in the frame; -1: the row stores nothing."""
    decodes: _Decodes | None
    prefills: _Prefills | None


class CudaDecoder:
    """The GPU decoder: computes steps of one model over the pages of an arena.

    With `invariant`, a call gives the same bits alone or in any batch, for any chunks of its prefill, with or without a
    shared prefix. One thread at a time may call `step`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arena: CudaArena,
        *,
        precision: str = "bf16",
        invariant: bool = True,
        checkpoint: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Load the weights, and allocate the buffers of a step. `checkpoint`: see `load_weights`."""
        check_config(config)
        dtype = PRECISIONS[precision]
        self.config, self.arena, self.invariant = config, arena, invariant
        self._device: Device = arena.device
        self._dtype = dtype
        device = self._device.torch
        self._weights = load_weights(config, weights, dtype, self._device, checkpoint)
        self._products = Products(self._weights, dtype, device, invariant=invariant)
        self._rope = [rope_table(config, self._device, local=local) for local in _rotations(config)]
        self._layer_pages = [layer_pages(arena.frames, layer, config.head_dim) for layer in range(config.num_layers)]
        heads, dim = config.num_heads, config.head_dim
        self._scratch = Scratch.allocate(1, heads, dim, MAX_SPLITS * SPLIT_PAGES, device)
        self._prefill_shape = wide_shape(heads, config.num_kv_heads, dim, dtype, arena.frames.dtype)
        self._logits = torch.empty((LOGIT_ROWS, config.vocab_size), dtype=torch.float32, device=device)
        self._read = self._device.pinned(LOGIT_ROWS, config.vocab_size, dtype=torch.float32)
        self._stream = self._device.stream()
        self._staging = Staging(self._device, MAX_ROWS * 8)
        self._layout = DecodeLayout(self._device)
        self._graphs = DecodeGraphs(self._device, self._run_decodes)
        self._copiers = ThreadPoolExecutor(min(4, available_cores()), thread_name_prefix="rows")
        self._device.settle()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that a step reads. Steps a second are at most memory bandwidth / this number."""
        return self._weights.num_bytes

    def step(self, batch: StepBatch) -> None:
        """Compute a batch in one pass, or in several passes if one does not fit on the device.

        K and V are written into the batch's pages, and logits into its rows.
        """
        checked = check_batch(batch, self.config, self.arena.num_pages)
        passes = divide(batch.chunks, checked, self.arena.num_frames)
        copies = batch.copies
        if copies and not (len(passes) == 1 and self._fits(passes[0], copies)):
            most = max(1, self.arena.num_frames // 2)
            for first in range(0, len(copies), most):
                self._run(Pass(()), copies[first : first + most])
            copies = ()
        for each in passes:
            self._run(each, copies)

    def close(self) -> None:
        """End the threads of the decoder and of its arena."""
        self._copiers.shutdown()
        self.arena.close()

    # ---- one pass

    def _fits(self, work: Pass, copies: Sequence[tuple[int, int, int]]) -> bool:
        return len(work.pages) + 2 * len(copies) <= self.arena.num_frames

    def _run(self, work: Pass, copies: Sequence[tuple[int, int, int]]) -> None:
        used, written, blank = work.pages_used(self.arena.num_pages)
        if copies:
            sources, targets = np.array(copies, np.int32).T[:2]
            used = np.union1d(used, np.concatenate((sources, targets)))
            # A target that is also a source needs its old bytes.
            written, blank = np.union1d(written, targets), np.union1d(blank, np.setdiff1d(targets, sources))
        taken = self.arena.take(used, written=written, blank=blank)
        try:
            with self._device.on(self._stream):
                self.arena.wait_for(taken, self._stream)
                self._copy(copies)
                if work.prefills:
                    self._run_mixed(work)
                elif work.decodes:
                    self._run_graph(work)
        finally:  # after an error, kernels may still run on the device
            self._device.finish(self._device.mark(self._stream))
            self.arena.release(taken)

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages whole. Device memory has enough bandwidth for that."""
        if not copies:
            return
        frames = self.arena.frames_of(np.array(copies, np.int32).T[:2])
        apart = not np.isin(frames[0], frames[1]).any()
        for pairs in [frames] if apart else np.split(frames, frames.shape[1], axis=1):
            there = self._device.upload(torch.from_numpy(np.ascontiguousarray(pairs)))
            copy_pages(self.arena.frames, there[0], there[1])

    # ---- passes of decodes alone

    def _run_graph(self, work: Pass) -> None:
        frames = self.arena.frames_of(work.pages)
        laid = self._layout.lay(work, frames)
        self._lay_rows(laid, work, frames)
        is_shared = self._layout.lay_groups(laid, work)
        self._layout.staging.upload(laid)
        rows, width = laid.host["tables"].shape
        self._graphs.run(DecodeSize(rows, width, is_shared))
        readers = [row for piece in work.decodes for row in piece.chunk.rows]
        fetched = self._fetch(len(readers))
        self._layout.expect(work, frames)  # while the device computes
        self._hand_out(readers, fetched)

    def _run_decodes(self, size: DecodeSize) -> None:
        """Run decodes on static buffers, laid out by `_run_graph`. So a graph can capture the run."""
        there = self._layout.staging.lay(decode_arrays(size.rows, size.table_pages)).device
        rows = _Rows(
            there["tokens"], there["positions"], there["entries"], _decodes(there, is_shared=size.is_shared), None
        )
        added, residual = self._layers(rows, wants_logits=True)
        self._head(added, residual, self._logits[: size.rows])

    # ---- passes with prefills

    def _run_mixed(self, work: Pass) -> None:
        num_decodes = len(work.decodes)
        wanted = _wanted_rows(work)
        laid = self._staging.lay(self._mixed_arrays(work, len(wanted)))
        there = laid.device
        frames = self.arena.frames_of(work.pages)
        self._lay_rows(laid, work, frames)
        is_shared = False
        if num_decodes:
            lay_tables(laid.host["tables"], work.counts[:num_decodes], frames)
            is_shared = self._layout.lay_groups(laid, work)
        self._lay_prefills(laid, work.prefills)
        laid.host["wanted"][:] = wanted
        self._staging.upload(laid)
        rows = _Rows(
            there["tokens"],
            there["positions"],
            there["entries"],
            _decodes(there, is_shared=is_shared) if num_decodes else None,
            _Prefills(
                there["prefill_tables"],
                there["starts"],
                there["first_rows"],
                there["tiles"],
                there["masks"] if len(there["masks"]) else None,
                there["mask_first"],
                there["mask_words"],
                mass := self._mass(there, work),
            ),
        )
        added, residual = self._layers(rows, wants_logits=len(wanted) > 0)
        readers = [row for piece in work.pieces for row in piece.chunk.rows]
        for first in range(0, len(wanted), LOGIT_ROWS):
            index = there["wanted"][first : first + LOGIT_ROWS]
            some = self._logits[: len(index)]
            self._head(added.index_select(0, index), residual.index_select(0, index), some)
            self._hand_out(readers[first : first + LOGIT_ROWS], self._fetch(len(index)))
        if mass is not None:
            _hand_out_mass(work.prefills, mass.sums.cpu().numpy())

    def _mass(self, there: dict[str, Tensor], work: Pass) -> _Mass | None:
        """Allocate the sums of the prefills' mass; None: no prefill asks for mass.

        The memory plan does not count these sums, which take a thousandth of the KV that the calls see, or a little
        more.
        """
        num_columns = sum(_num_columns(piece) for piece in work.prefills)
        if not num_columns:
            return None
        config, device = self.config, self._device.torch
        num_rows = sum(piece.length for piece in work.prefills)
        levels = torch.empty((num_rows, config.num_heads), dtype=torch.float32, device=device)
        shape = (config.num_layers, config.num_kv_heads, num_columns)
        sums = torch.zeros(shape, dtype=torch.float32, device=device)
        return _Mass(there["mass_tiles"], there["mass_steps"], there["mass_columns"], levels, sums)

    def _mixed_arrays(self, work: Pass, num_wanted: int) -> dict[str, tuple[int, ...]]:
        num_rows, num_prefills = int(work.lengths.sum()), len(work.prefills)
        shapes: dict[str, tuple[int, ...]] = {}
        if work.decodes:
            width = max(table_width(len(piece.pages)) for piece in work.decodes)
            shapes |= decode_arrays(len(work.decodes), width)
        shapes |= dict.fromkeys(("tokens", "positions", "entries"), (num_rows,))
        lengths = np.array([piece.length for piece in work.prefills], np.int32)
        return shapes | {
            "wanted": (num_wanted,),
            "prefill_tables": (num_prefills, max(len(piece.pages) for piece in work.prefills)),
            "starts": (num_prefills,),
            "first_rows": (num_prefills + 1,),
            "tiles": prefill_tiles(lengths, self._prefill_shape).shape,
            "mask_first": (num_prefills,),
            "mask_words": (num_prefills,),
            "mass_tiles": self._mass_tiles(work.prefills).shape,
            "mass_steps": mass_steps(_columns(work.prefills)).shape,
            "mass_columns": (num_prefills,),
            "masks": (sum(0 if piece.mask is None else piece.mask.size for piece in work.prefills),),
        }

    def _mass_tiles(self, pieces: Sequence[ChunkRows]) -> IntArray:
        lengths = [0 if piece.chunk.mass is None else piece.length for piece in pieces]
        return prefill_tiles(np.array(lengths, np.int32), self._prefill_shape)

    def _lay_prefills(self, laid: Laid, pieces: Sequence[ChunkRows]) -> None:
        host, first_word = laid.host, 0
        columns = _columns(pieces)
        host["mass_tiles"][:] = self._mass_tiles(pieces)
        host["mass_steps"][:] = mass_steps(columns)
        host["mass_columns"][:] = np.cumsum(columns) - columns
        lengths = np.array([piece.length for piece in pieces], np.int32)
        host["first_rows"][:] = [0, *np.cumsum(lengths)]
        host["tiles"][:] = prefill_tiles(lengths, self._prefill_shape)
        host["starts"][:] = [piece.chunk.start for piece in pieces]
        host["prefill_tables"][:] = 0
        for row, piece in enumerate(pieces):
            host["prefill_tables"][row, : len(piece.pages)] = self.arena.frames_of(piece.pages)
            host["mask_first"][row], host["mask_words"][row] = -1, 0
            if piece.mask is not None:
                words = piece.mask.view(np.int32).reshape(-1)
                host["masks"][first_word : first_word + len(words)] = words
                host["mask_first"][row], host["mask_words"][row] = first_word, piece.mask.shape[1]
                first_word += len(words)

    # ---- both kinds of passes

    def _lay_rows(self, laid: Laid, work: Pass, frames: IntArray) -> None:
        """Fill in tokens, positions and entries, with padding behind the last row."""
        fill(laid.host["tokens"], np.concatenate([piece.chunk.tokens for piece in work.pieces]), -1)
        fill(laid.host["positions"], np.concatenate([piece.chunk.positions for piece in work.pieces]), 0)
        fill(laid.host["entries"], work.entries(frames), -1)

    def _layers(self, rows: _Rows, *, wants_logits: bool) -> tuple[Tensor, Tensor]:
        """Run all layers. Return the output of the last layer, and the residual to add it to."""
        config, eps = self.config, self.config.rms_eps
        num_rows = len(rows.tokens)
        shape = (num_rows, config.hidden_size)
        residual = torch.empty(shape, dtype=torch.float32, device=self._device.torch)
        embed(rows.tokens, self._weights.embed, config.embed_scale, out=residual)
        normed = torch.empty(shape, dtype=self._dtype, device=self._device.torch)
        rmsnorm(residual, self._weights.layers[0].attn_norm, eps, out=normed)
        added, post_norm = normed, None
        for index, layer in enumerate(self._weights.layers):
            if index:
                add_rmsnorm(
                    added, residual, layer.attn_norm, eps, post_weight=post_norm, out=normed, new_residual=residual
                )
            query = self._rotated(rows, index, layer, normed)
            if rows.prefills is not None and rows.prefills.mass is not None:
                self._add_mass(rows.prefills, rows.prefills.mass, index, query[-len(rows.prefills.mass.levels) :])
            if index == config.num_layers - 1 and not wants_logits:
                break  # K and V are stored, and the layer's output is not needed
            attended = self._attend(rows, index, query)
            added = self._products.of(attended.view(num_rows, -1), layer.o)
            add_rmsnorm(
                added,
                residual,
                layer.ffn_norm,
                eps,
                post_weight=layer.post_attn_norm,
                out=normed,
                new_residual=residual,
            )
            gated = gated_activation(self._products.of(normed, layer.gate_up), config.activation)
            added, post_norm = self._products.of(gated, layer.down), layer.post_ffn_norm
        return added, residual

    def _rotated(self, rows: _Rows, index: int, layer: LayerWeights, normed: Tensor) -> Tensor:
        """Return a layer's rotated queries, and store its K and V in the pages."""
        config = self.config
        qkv = self._products.of(normed, layer.qkv, layer.qkv_bias)
        return rope_store(
            qkv,
            self._rope[config.slides(index) and len(self._rope) > 1],
            rows.positions,
            rows.entries,
            self.arena.frames,
            index,
            config.num_heads,
            config.num_kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_eps,
        )

    def _attend(self, rows: _Rows, index: int, query: Tensor) -> Tensor:
        config = self.config
        keys, values = self._layer_pages[index]
        window = config.window if config.slides(index) else 0
        out = torch.empty_like(query)
        num_decodes = 0
        if rows.decodes is not None:
            decodes = rows.decodes
            num_decodes = len(decodes.lengths)
            paged_decode_attention(
                query[:num_decodes],
                keys,
                values,
                decodes.page_tables,
                decodes.lengths,
                scale=config.score_scale,
                softcap=config.attn_softcap,
                window=window,
                groups=decodes.groups,
                scratch=self._scratch,
                out=out[:num_decodes],
            )
        if rows.prefills is not None:
            prefills = rows.prefills
            paged_prefill_attention(
                query[num_decodes:],
                keys,
                values,
                prefills.page_tables,
                prefills.starts,
                prefills.first_rows,
                prefills.tiles,
                scale=config.score_scale,
                softcap=config.attn_softcap,
                window=window,
                masks=prefills.masks,
                mask_first=prefills.mask_first,
                mask_words=prefills.mask_words,
                invariant=self.invariant,
                out=out[num_decodes:],
            )
        return out

    def _add_mass(self, prefills: _Prefills, mass: _Mass, index: int, query: Tensor) -> None:
        config = self.config
        attention_mass(
            query,
            self._layer_pages[index][0],
            prefills.page_tables,
            prefills.starts,
            prefills.first_rows,
            mass.tiles,
            mass.steps,
            mass.first_columns,
            levels=mass.levels,
            out=mass.sums[index],
            scale=config.score_scale,
            softcap=config.attn_softcap,
            window=config.window if config.slides(index) else 0,
            masks=prefills.masks,
            mask_first=prefills.mask_first,
            mask_words=prefills.mask_words,
        )

    def _head(self, added: Tensor, residual: Tensor, logits: Tensor) -> None:
        config, post_norm = self.config, self._weights.layers[-1].post_ffn_norm
        normed, _ = add_rmsnorm(added, residual, self._weights.final_norm, config.rms_eps, post_weight=post_norm)
        self._products.of(normed, self._weights.head, out=logits)
        if config.final_softcap:
            logits.div_(config.final_softcap).tanh_().mul_(config.final_softcap)

    def _fetch(self, num_rows: int) -> Mark:
        """Start a copy of the first rows of logits to the host. Return the mark after which they have arrived."""
        self._read[:num_rows].copy_(self._logits[:num_rows], non_blocking=True)
        return self._device.mark(self._stream)

    def _hand_out(self, readers: Sequence[memoryview[float]], fetched: Mark) -> None:
        """Copy the first rows of logits to their readers, once they are fetched."""
        targets = [np.frombuffer(reader.cast("B"), np.float32) for reader in readers]
        rows = self._read[: len(readers)].numpy()
        self._device.finish(fetched)
        if rows.nbytes < _PARALLEL_BYTES:
            for target, row in zip(targets, rows, strict=True):
                np.copyto(target, row)
        else:
            list(self._copiers.map(np.copyto, targets, rows))  # without the GIL


def check_config(config: ModelConfig) -> None:
    """Raise Invalid if the kernels do not support the model's shape."""
    check_shape(config)
    if config.hidden_size > MAX_HIDDEN_SIZE:
        raise Invalid(f"{config.name}: hidden_size {config.hidden_size} is more than {MAX_HIDDEN_SIZE}")


def _rotations(config: ModelConfig) -> tuple[bool, ...]:
    """Return the kinds of RoPE as `local` flags: False for full layers, True if sliding layers have another RoPE."""
    return (False, True) if config.local_rope_theta else (False,)


def _decodes(there: dict[str, Tensor], *, is_shared: bool) -> _Decodes:
    groups = SharedPrefixes(there["group_first"], there["group_rows"], there["group_splits"], there["row_splits"])
    return _Decodes(there["tables"], there["lengths"], groups if is_shared else None)


def _wanted_rows(work: Pass) -> IntArray:
    """Return the rows of the pass whose logits are wanted: the last rows of each piece."""
    ends = np.cumsum(work.lengths)
    ranges = [np.arange(end - len(piece.chunk.rows), end) for piece, end in zip(work.pieces, ends, strict=True)]
    return np.concatenate(ranges).astype(np.int32)


def _num_columns(piece: ChunkRows) -> int:
    """Return the number of entries for which the piece wants mass."""
    return 0 if piece.chunk.mass is None else piece.chunk.start + piece.length


def _columns(pieces: Sequence[ChunkRows]) -> IntArray:
    return np.array([_num_columns(piece) for piece in pieces], np.int32)


def _hand_out_mass(pieces: Sequence[ChunkRows], sums: MassArray) -> None:
    """Add the mass of this pass to the arrays of the chunks that asked for it."""
    first = 0
    for piece in pieces:
        if piece.chunk.mass is not None:
            end = first + _num_columns(piece)
            piece.chunk.mass[:, :, : end - first] += sums[:, :, first:end]
            first = end
