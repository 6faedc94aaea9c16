"""Cost model of steps, fitted while they run: `cost.h` has its form, and `policy.c` plans by it.

The predicted time of a step is a sum of parts, none of them negative: a curve over its rows that never falls, its
logits, and the entries that it reads. The fit minimises relative deviations, because the machine may be shared: a step
that took three times as long because of a neighbour has no more weight than one that took a tenth longer. The method is
weighted least squares over sums that decay slowly, so that no observations are kept.

A machine also has faster and slower minutes, in which all steps change alike. One number, the *pace*, describes these
changes, and adapts within some steps.

Parts without observations come from a guess for the kind of machine, scaled to the observed steps. The guess counts as
one observation of each part.
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
"""Record of a step: its work (`sym_work`), and its time."""

KINDS = ("1 decode", "2-8 decodes", "9-64 decodes", "65+ decodes", "prefills", "mixed")
"""Kinds of steps. Errors of predictions are counted for each kind."""

Records: TypeAlias = npt.NDArray[np.void]
Floats: TypeAlias = npt.NDArray[np.float64]

# Nanoseconds for the first row, each further row, logits at all, each row of logits, each distinct entry, each entry
# seen, and each pair: see `sym_work`.
_GUESSES = {
    "cpu": (10e6, 500e3, 2e6, 100e3, 1e3, 1e3, 800.0),
    "cuda": (4e6, 10e3, 0.3e6, 2e3, 10.0, 10.0, 1.0),
}
_HALF_LIFE = 4_000
"""Steps after which an observation has half its weight: a few minutes of decoding."""
_PACE_STEPS = 32
"""Steps within which the pace adapts."""
_EXACT = 0.03
"""Relative error below which a prediction counts as exact: clocks and caches vary as much."""
_SWEEPS = 20
"""Sweeps over the parts in one fit. Each fit continues from the previous fit. 20 sweeps take 0.3 ms."""
_NUM_ERRORS = 1_000
"""Number of latest errors that are kept for each kind of step."""
_VERSION = 1


def _parts(records: Records) -> Floats:
    """Return [steps, parts]: the amount of each part in each step. The curve is a sum of rises from knot to knot."""
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
    """Return the index in KINDS of each record."""
    of_decodes = np.searchsorted([1, 8, 64], records["num_rows"])
    has_prefills = records["num_pairs"] > 0
    return np.where(has_prefills, np.where(records["num_seen"] > 0, 5, 4), of_decodes)


class CostModel:
    """Predictor of the times of steps on one backend, in one precision, of one model."""

    def __init__(self, backend: str, precision: str, path: Path | None, *, model: str = "") -> None:
        """Load the kept fit, or begin with the guess. `path`: file with the fits of all backends and models."""
        self._path, self._key = path, f"{backend} {precision} {model}".strip()
        self._guess = _guess(backend)
        self._fitted = self._guess.copy()
        self._products = np.zeros((len(self._guess), len(self._guess)))
        """Weighted sums over steps, relative to their times. This array sums products of parts, `_sums` the parts."""
        self._sums = np.zeros(len(self._guess))
        self._log_scale = self._log_pace = 0.0
        """Logarithms of two ratios: of observed times to the guess, and of the latest times to the fit."""
        self._num_seen = 0
        self._errors: tuple[deque[float], ...] = tuple(deque(maxlen=_NUM_ERRORS) for _ in KINDS)
        self.coefficients: Any = ffi.new("sym_cost *")
        """Coefficients as a `sym_cost`, always in the same object. The run gets a copy of it after each `observe`."""
        self._load()
        self._publish()

    def predict(self, records: Records) -> Floats:
        """Predict the nanoseconds of each of these steps. Their `ns` is ignored."""
        return np.asarray(_parts(records) @ self._fitted * math.exp(self._log_pace))

    def observe(self, records: Records) -> None:
        """Learn from the records of several computed steps."""
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
        """Number of steps that the model has learnt from."""
        return self._num_seen

    def errors(self) -> dict[str, tuple[float, int]]:
        """Return for each kind of step the median relative error of the latest predictions, and their number."""
        return {
            kind: (float(np.median(errors)), len(errors))
            for kind, errors in zip(KINDS, self._errors, strict=True)
            if errors
        }

    def save(self) -> None:
        """Save the fit, in place of an earlier one for the same backend, precision and model."""
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
            return  # predictions from the guess alone are not counted
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
        """Fit the parts by least squares, one after the other. No part may become negative."""
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
        """Write the coefficients. Another thread may read them at any time: each number is valid by itself."""
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
            logger.warning("%s: the cost model of %r is ignored: %s", self._path, self._key, error)
            return
        self._fitted, self._sums, self._products = arrays
        self._log_scale, self._log_pace = numbers
        self._num_seen = num_seen


def _read(path: Path) -> dict[str, Any]:
    """Return the file's records by backend, precision and model; none if the file is missing or damaged."""
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
        logger.warning("%s: the cost models of steps are ignored: %s", path, error)
        return {}
    return models
