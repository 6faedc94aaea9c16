"""What a step takes, fitted while steps run: `cost.h` says of what, and `policy.c` plans by it.

The time of a step is a sum of parts that are not negative: a curve over its rows that never falls, logits, and the
entries that it reads. Least relative deviation is what fits a shared machine: a step that took three times as long,
because of a neighbour, then pulls no more than one that took a tenth longer. It is found by least squares with
weights, over sums that forget slowly; so what was observed need not be kept.

A machine also has faster and slower minutes, in which all steps change alike. That is one number, the pace, which
follows within some steps.

What has not been seen yet is taken from a guess for the kind of machine, scaled by what was seen: it counts as one
observation of each part.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler._loop import ffi, lib

logger = logging.getLogger(__name__)

NUM_KNOTS = int(lib.SYM_COST_KNOTS)
RECORD = np.dtype(
    [(name, np.int64) for name in ("num_rows", "num_wanted", "num_entries", "num_seen", "num_pairs", "ns")]
)
"""A step: what it computed (`sym_work`), and the time that it took."""

KINDS = ("1 decode", "2-8 decodes", "9-64 decodes", "65+ decodes", "prefills", "mixed")
"""Of steps, whose errors are counted apart."""

Records: TypeAlias = npt.NDArray[np.void]
Floats: TypeAlias = npt.NDArray[np.float64]

_GUESSES = {  # nanoseconds: of the first row, each row, logits at all, of a row; entries, entries seen, pairs
    "cpu": (10e6, 500e3, 2e6, 100e3, 1e3, 1e3, 800.0),
    "cuda": (4e6, 10e3, 0.3e6, 2e3, 10.0, 10.0, 1.0),
}
_HALF_LIFE = 4_000
"""Steps after which an observation counts half: a few minutes of decoding."""
_PACE_STEPS = 32
"""So many steps tell the pace."""
_EXACT = 0.03
"""A relative error below this is none: clocks and caches vary as much."""
_SWEEPS = 20
"""Of the parts, in one fit: it goes on where the last one ended. 20 take 0.3 ms."""
_NUM_ERRORS = 1_000
"""The latest errors of a kind are what is reported."""
_VERSION = 1


def _parts(records: Records) -> Floats:
    """[steps, parts]: how much of each part a step has. The curve is a sum of steps up from knot to knot."""
    rows = records["num_rows"].astype(np.float64)
    below = np.clip(np.floor(np.log2(np.maximum(rows, 1))).astype(int), 0, NUM_KNOTS - 2)
    past = (rows - 2.0**below) / 2.0**below
    knots = np.arange(1, NUM_KNOTS)
    rises = np.where(knots <= below[:, None], 1.0, np.where(knots == below[:, None] + 1, past[:, None], 0.0))
    counts = [records[name] for name in ("num_wanted", "num_entries", "num_seen", "num_pairs")]
    return np.column_stack([rows > 0, rises, records["num_wanted"] > 0, *counts]).astype(np.float64)


def _guess(backend: str) -> Floats:
    first, row, *others = _GUESSES["cuda" if backend.startswith("cuda") else "cpu"]
    return np.array([first, *(row * 2**knot for knot in range(NUM_KNOTS - 1)), *others])


def _kinds(records: Records) -> npt.NDArray[np.intp]:
    """The index in KINDS of each."""
    of_decodes = np.searchsorted([1, 8, 64], records["num_rows"])
    has_prefills = records["num_pairs"] > 0
    return np.where(has_prefills, np.where(records["num_seen"] > 0, 5, 4), of_decodes)


class CostModel:
    """Predicts what steps take on one backend, in one precision, of one model."""

    def __init__(self, backend: str, precision: str, path: Path | None, *, model: str = "") -> None:
        """`path`: the file that keeps what was learnt, of all backends, precisions and models."""
        self._path, self._key = path, f"{backend} {precision} {model}".strip()
        self._guess = _guess(backend)
        self._fitted = self._guess.copy()
        self._products = np.zeros((len(self._guess), len(self._guess)))
        """Weighted sums over steps: of products of their parts, and of the parts, in units of what they took."""
        self._sums = np.zeros(len(self._guess))
        self._log_scale = self._log_pace = 0.0
        """What was seen, to the guess; what steps take now, to what was fitted."""
        self._num_seen = 0
        self._errors: tuple[deque[float], ...] = tuple(deque(maxlen=_NUM_ERRORS) for _ in KINDS)
        self.coefficients: Any = ffi.new("sym_cost *")
        """A `sym_cost`, always the same one: the run gets a copy of it after each `observe`."""
        self._load()
        self._publish()

    def predict(self, records: Records) -> Floats:
        """Nanoseconds that each of these steps will take; their `ns` is not looked at."""
        return np.asarray(_parts(records) @ self._fitted * math.exp(self._log_pace))

    def observe(self, records: Records) -> None:
        """Learn from steps that ran, many at once."""
        records = records[(records["ns"] > 0) & (records["num_rows"] > 0)]
        if not len(records):
            return
        parts = _parts(records)
        self._count_errors(records, parts)
        took = records["ns"].astype(np.float64)
        self._follow_pace(parts, took)
        self._add(parts, took)
        self._fit()
        self._num_seen += len(records)
        self._publish()

    @property
    def num_seen(self) -> int:
        """Steps that it has learnt from."""
        return self._num_seen

    def errors(self) -> dict[str, tuple[float, int]]:
        """By kind of step: the median relative error of the latest predictions, made before; and of how many."""
        return {
            kind: (float(np.median(errors)), len(errors))
            for kind, errors in zip(KINDS, self._errors, strict=True)
            if errors
        }

    def save(self) -> None:
        """Keep what was learnt, in place of what was kept before."""
        if self._path is None:
            return
        kept = _read(self._path)
        kept[self._key] = {
            "num_seen": self._num_seen,
            "log_scale": self._log_scale,
            "log_pace": self._log_pace,
            "fitted": self._fitted.tolist(),
            "products": self._products.tolist(),
            "sums": self._sums.tolist(),
        }
        temporary = self._path.with_name(f"{self._path.name}.new")
        temporary.write_text(json.dumps({"version": _VERSION, "models": kept}), encoding="utf-8")
        temporary.replace(self._path)

    # ---- learning ----

    def _count_errors(self, records: Records, parts: Floats) -> None:
        if not self._num_seen:
            return  # there was nothing but a guess
        off = np.abs(parts @ self._fitted * math.exp(self._log_pace) / records["ns"] - 1)
        for kind, error in zip(_kinds(records), off, strict=True):
            self._errors[kind].append(float(error))

    def _follow_pace(self, parts: Floats, took: Floats) -> None:
        share = min(1.0, len(took) / _PACE_STEPS)
        if self._num_seen:
            seen = float(np.median(np.log(took / (parts @ self._fitted))))
            self._log_pace += share * (seen - self._log_pace)
        scale = float(np.median(np.log(took / (parts @ self._guess))))
        self._log_scale += (scale - self._log_scale) * (share if self._num_seen else 1.0)
        if not self._num_seen:
            self._fitted = self._guess * math.exp(self._log_scale)

    def _add(self, parts: Floats, took: Floats) -> None:
        off = np.abs(np.log(parts @ self._fitted / took) + self._log_pace)
        weights = _EXACT / np.maximum(off, _EXACT)
        relative = parts / took[:, None]
        forgotten = 0.5 ** (len(took) / _HALF_LIFE)
        self._products = self._products * forgotten + relative.T @ (relative * weights[:, None])
        self._sums = self._sums * forgotten + relative.T @ weights

    def _fit(self) -> None:
        """Least squares over parts that are not negative, one part after the other."""
        guess = self._guess * math.exp(self._log_scale)
        products = self._products + np.diag(1 / guess**2)
        sums = self._sums + 1 / guess
        rows, wanted, found = products.tolist(), sums.tolist(), self._fitted.tolist()
        for _ in range(_SWEEPS):
            for part, row in enumerate(rows):
                rest = wanted[part] - sum(map(float.__mul__, row, found))
                found[part] = max(0.0, found[part] + rest / row[part])
        self._fitted = np.array(found)

    def _publish(self) -> None:
        """To the loop, which may read between two of these lines: each number is right for its part."""
        now = self._fitted * math.exp(self._log_pace)
        self.coefficients.rows_ns = np.cumsum(now[:NUM_KNOTS]).tolist()
        cost = self.coefficients
        cost.head_ns, cost.wanted_ns, cost.entry_ns, cost.seen_ns, cost.pair_ns = now[NUM_KNOTS:].tolist()

    def _load(self) -> None:
        found = _read(self._path).get(self._key) if self._path else None
        if found is None:
            return
        try:
            shape = self._guess.shape
            arrays = [np.array(found[name], np.float64) for name in ("fitted", "sums", "products")]
            numbers = [float(found[name]) for name in ("log_scale", "log_pace")]
            num_seen = int(found["num_seen"])
            if [array.shape for array in arrays] != [shape, shape, shape * 2]:
                raise ValueError("it has another number of parts")  # noqa: TRY301 - one message for all damage
            if not all(np.isfinite(array).all() for array in (*arrays, np.array(numbers))) or (arrays[0] < 0).any():
                raise ValueError("a number is out of range")  # noqa: TRY301
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: what is kept of %r is ignored: %s", self._path, self._key, error)
            return
        self._fitted, self._sums, self._products = arrays
        self._log_scale, self._log_pace = numbers
        self._num_seen = num_seen


def _read(path: Path) -> dict[str, Any]:
    """What is kept, by backend, precision and model; nothing if the file is damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != _VERSION:
            raise ValueError(f"its version is {kept['version']!r}, and this is {_VERSION}")  # noqa: TRY301
        models = kept["models"]
        if not isinstance(models, dict):
            raise TypeError("it has no models")  # noqa: TRY301
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: what was learnt of step times is ignored: %s", path, error)
        return {}
    return models
