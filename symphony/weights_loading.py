"""The second part of a start: the weights are loaded while names, files and the socket are there already."""

from __future__ import annotations

import logging
import time
from typing import Any

import trio

from decoder.checkpoints.weights import Weights
from scheduler.batch.batch_scheduler import BatchScheduler
from symphony.backends import Backend, Loaded

log = logging.getLogger(__name__)


class WeightsLoading:
    """A backend's decoder, from the checkpoint to the first step that it can compute."""

    def __init__(self, backend: Backend, weights: Weights) -> None:
        self._backend = backend
        self._weights = weights
        self._began_s: float | None = None
        self._took_s: float | None = None
        self._loaded: Loaded | None = None

    async def run(self, batches: BatchScheduler) -> None:
        """Load, and give the batch scheduler its decoder. Cancelling ends it soon; raises what the loading raises."""
        self._began_s = time.monotonic()
        load, weights = self._backend.load, self._weights
        self._weights = Weights({})  # once they are packed, the checkpoint's mapping can go
        self._loaded = await trio.to_thread.run_sync(load, weights, trio.from_thread.check_cancelled)
        self._took_s = time.monotonic() - self._began_s
        log.info("weights loaded in %.1f s", self._took_s)
        batches.provide(self._loaded.decoder, self._loaded.native)

    def info(self) -> dict[str, Any]:
        """For `symphony stat`: whether they are there, and how long it took or has taken so far."""
        if self._took_s is not None:
            return {"weights": "loaded", "weights_s": round(self._took_s, 3)}
        took_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return {"weights": "loading", "weights_s": round(took_s, 3)}

    def close(self) -> None:
        """Ends the threads of the backend; no step may be under way, and no loading."""
        if self._loaded is not None:
            self._loaded.decoder.close()
        self._backend.close()
