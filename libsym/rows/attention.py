"""Attention: the weights that the new tokens of a `pred` gave to each entry, or to each page, of the file."""

from __future__ import annotations

import math
import sys
from array import array
from typing import Any, Literal

from libsym.abi import ATTENDED_STRUCT, ATTENTION_STRUCT, PAGE_ENTRIES, AttentionBy, AttentionTo
from libsym.arguments import int64, shown
from libsym.errors import Invalid, ProtocolError

AttentionColumns = Literal["pages", "entries"]
AttentionRows = Literal["sum", "layer"]

_TO = {"pages": AttentionTo.PAGES, "entries": AttentionTo.ENTRIES}
_BY = {"sum": AttentionBy.SUM, "layer": AttentionBy.LAYER}


def attention_block(columns: object, rows: object) -> bytes:
    """Return the request for attention as it goes over the wire: struct sym_attention."""
    if not isinstance(columns, str) or columns not in _TO:
        raise Invalid(f"attention={shown(columns)}: 'entries' for a number for each entry, 'pages' for each page of 32")
    if not isinstance(rows, str) or rows not in _BY:
        raise Invalid(f"by={shown(rows)}: 'sum' for one number a column, 'layer' for one by each layer and KV head")
    return ATTENTION_STRUCT.pack(_TO[columns], _BY[rows], 0, 0)


class Attention:
    """The attention mass of a call: a float32 number for each entry (or page) of the file, new entries included.

    In each head of each layer, the weights of a token add up to 1 over the entries that it sees. The mass of an entry
    is the sum of the weights that the new tokens of the call gave it. With `by="sum"` the sum is over all heads of all
    layers, with `by="layer"` over the query heads of one KV head of one layer. An entry that a mask or a window hides
    has mass 0.

    >>> kv = sym.kv_create()
    >>> mass = sym.pred(kv, [65, 66, 67], attention="entries").attention
    >>> mass.shape, mass.num_entries
    ((3,), 3)
    >>> round(sum(mass.mass()))     # 3 tokens by 4 heads of 2 layers
    24
    >>> mass = sym.pred(kv, [68], attention="pages", by="layer").attention
    >>> mass.shape                  # layers, KV heads, pages
    (2, 2, 1)
    """

    __slots__ = ("_floats", "num_entries", "shape")

    def __init__(self, payload: bytes | memoryview) -> None:
        """Read the attention from `payload`: a struct sym_attended and its numbers."""
        data = memoryview(payload)
        if len(data) < ATTENDED_STRUCT.size:
            raise ProtocolError(f"the daemon answered {len(data)} bytes for attention")
        layers, heads, columns, self.num_entries = ATTENDED_STRUCT.unpack_from(data)
        numbers = data[ATTENDED_STRUCT.size :]
        self.shape: tuple[int, ...] = (layers, heads, columns) if layers else (columns,)
        """(columns,), or with `by="layer"` (layers, KV heads, columns)."""
        if columns not in {self.num_entries, -(-self.num_entries // PAGE_ENTRIES)} or not columns:
            raise ProtocolError(f"the daemon answered {columns} columns of attention for {self.num_entries} entries")
        if len(numbers) != 4 * math.prod(self.shape):
            raise ProtocolError(f"the daemon answered {len(numbers)} bytes of attention for {self.shape}")
        self._floats: memoryview[float] = numbers.cast("f")

    @property
    def values(self) -> memoryview[float]:
        """All numbers in the order of `shape`: a read-only float32 view, not a copy.

        >>> dist = sym.pred(sym.kv_create(), [65], attention="entries")
        >>> dist.attention.values.tolist()
        [8.0]
        """
        return self._floats

    def mass(self, layer: int | None = None, head: int | None = None) -> memoryview[float]:
        """Return the numbers of one layer and one KV head, a number for each column.

        Without `layer` or `head`, the result is the sum over all layers or heads. The numbers of a single layer and
        head are a view, a sum is a copy.

        >>> dist = sym.pred(sym.kv_create(), [65], attention="entries", by="layer")
        >>> dist.attention.mass(0, 1).tolist(), dist.attention.mass(0).tolist(), dist.attention.mass().tolist()
        ([2.0], [4.0], [8.0])
        """
        if len(self.shape) == 1:
            if layer is not None or head is not None:
                raise Invalid("the mass was summed over layers and heads: ask pred() with by='layer'")
            return self._floats
        layers, heads, columns = self.shape
        at_layers = range(layers) if layer is None else (_index(layer, layers, "layer"),)
        at_heads = range(heads) if head is None else (_index(head, heads, "head"),)
        rows = [
            self._floats[(i * heads + h) * columns : (i * heads + h + 1) * columns] for i in at_layers for h in at_heads
        ]
        if len(rows) == 1:
            return rows[0]
        return memoryview(array("f", map(sum, zip(*rows, strict=True)))).cast("B").toreadonly().cast("f")

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a view for numpy: float32 of `shape`."""
        numpy = sys.modules["numpy"]  # numpy calls this method, so numpy is loaded already
        found = numpy.frombuffer(self._floats, numpy.float32).reshape(self.shape)
        return numpy.asarray(found, dtype) if copy is None else numpy.array(found, dtype, copy=copy)

    def __repr__(self) -> str:
        what = "entries" if self.shape[-1] == self.num_entries else "pages"
        by = "" if len(self.shape) == 1 else f" by {self.shape[0]} layers and {self.shape[1]} KV heads"
        return f"<Attention to {self.shape[-1]} {what}{by}>"


def asked(attention: Attention | None) -> Attention:
    """Return the attention of a distribution. Invalid: the `pred` did not ask for it."""
    if attention is None:
        raise Invalid("no attention came with this: ask pred() with attention='entries' or 'pages'")
    return attention


def _index(number: int, count: int, what: str) -> int:
    number = int64(number, what)
    if not 0 <= number < count:
        raise Invalid(f"{what}={number}: the model has {what}s 0 to {count - 1}")
    return number
