"""The second part of a daemon's start: weights are loaded while the daemon already serves names and files."""

from __future__ import annotations

import logging
import time
from typing import Any

import trio

from decoder.checkpoints.weights import Weights
from scheduler.batch.batch_scheduler import BatchScheduler
from symphony.daemon.backends import Backend, Loaded

log = logging.getLogger(__name__)

ROOM_EVERY_S = 30.0
"""Seconds between two looks at the free space of the disk."""
TOLD_EVERY_S = 5.0
"""Seconds between two lines of the log that tell how far a long loading is."""


class WeightsLoading:
    """Loader of a backend's decoder. The loader owns the decoder that it has loaded."""

    def __init__(self, backend: Backend, weights: Weights) -> None:
        self._backend = backend
        self._weights = weights
        self._began_s: float | None = None
        self._took_s: float | None = None
        self._share = 0.0
        self._told_s = 0.0
        self._loaded: Loaded | None = None

    async def run(self, batches: BatchScheduler) -> None:
        """Load the weights, and give the decoder to the batch scheduler. A cancellation soon stops the loading."""
        self._began_s = self._told_s = time.monotonic()
        load, weights = self._backend.load, self._weights
        self._weights = Weights({})  # the checkpoint is unmapped once its weights are packed
        self._loaded = await trio.to_thread.run_sync(load, weights, self._advance)
        self._took_s = time.monotonic() - self._began_s
        log.info("weights loaded in %.1f s", self._took_s)
        batches.provide(self._loaded.decoder, self._loaded.native)

    async def keep(self) -> None:
        """Keep the loaded weights for the next start. Then remove kept weights whenever the disk is nearly full.

        A cancellation does not wait for a file that is being written. Half of a file is never used.
        """
        assert self._loaded is not None, "keep() before run()"
        await trio.to_thread.run_sync(self._loaded.keep, abandon_on_cancel=True)
        while self._loaded.make_room is not None:
            await trio.sleep(ROOM_EVERY_S)
            try:
                await trio.to_thread.run_sync(self._loaded.make_room, abandon_on_cancel=True)
            except OSError as error:
                log.warning("packed weights cannot be removed: %s", error)

    def info(self) -> dict[str, Any]:
        """Return whether the weights are loaded, the seconds so far, and the share that is loaded."""
        if self._took_s is not None:
            return {"weights": "loaded", "weights_s": round(self._took_s, 3)}
        took_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return {"weights": "loading", "weights_s": round(took_s, 3), "weights_share": round(self._share, 3)}

    def _advance(self, share: float) -> None:
        """Note the share of the work that is done, on a worker. Cancelled: the daemon ends."""
        trio.from_thread.check_cancelled()
        self._share, now_s = share, time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            log.info("weights are being loaded: %d %%", 100 * share)

    def close(self) -> None:
        """End the backend's threads. No step and no loading may be under way."""
        if self._loaded is not None:
            self._loaded.decoder.close()
        self._backend.close()
