"""Files that do not fit into memory, on a real mount: copied out, copied in and put together while they come and go."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import libsym as sym

NUM_FILES, NUM_TOKENS = 16, 700
"""Number of files, and their tokens. Files of 22 pages each need six times the room that there is."""


def image_of(path: Path) -> bytes:
    """Past what the kernel has of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = bytearray()
        while data := os.read(descriptor, 50_000):
            found += data
        return bytes(found)
    finally:
        os.close(descriptor)


@pytest.fixture
def small(start_daemon):
    daemon = start_daemon("--model", "tiny", "--precision", "float32", "--kv-memory", "1M")
    sym.connect(str(daemon.socket))
    yield daemon
    sym.daemon_check()
    sym.close()
    assert daemon.stop() == 0, daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()


def test_images_go_out_and_come_in_while_programs_use_what_does_not_fit(small, tmp_path):
    assert sym.daemon_stat()["tiers"]["num_frames"] * 6 < NUM_FILES * (NUM_TOKENS // 32 + 1) * 2
    files, images = [], []
    for number in range(NUM_FILES):
        files.append(sym.kv_create(f"{number}.kv"))
        sym.kv_write(files[-1], [(number + each) % 250 for each in range(NUM_TOKENS)])
        images.append(image_of(small.mount / f"{number}.kv"))
    is_over = threading.Event()

    def use() -> int:
        """Programs that go on with one file after the other, in forks."""
        rng, num_uses = random.Random(0), 0
        while not is_over.is_set():
            with sym.kv_fork(files[rng.randrange(NUM_FILES)]) as kv:
                sym.pred(kv, [rng.randrange(250)])
            num_uses += 1
        return num_uses

    def carry(number: int) -> None:
        """Out and in again, and a part of it into another file."""
        out = tmp_path / f"{number}.kv"
        out.write_bytes(image_of(small.mount / f"{number}.kv"))
        assert out.read_bytes() == images[number]
        (small.mount / f"back{number}.kv").write_bytes(out.read_bytes())
        assert image_of(small.mount / f"back{number}.kv") == images[number]
        with sym.kv_open(f"{number}.kv") as kv, sym.kv_extract(kv, [(40, 600)], f"part{number}.kv") as part:
            assert sym.kv_read(part)[0] == [(number + each) % 250 for each in range(40, 600)]

    with ThreadPoolExecutor(5) as threads:
        uses = threads.submit(use)
        try:
            list(threads.map(carry, range(NUM_FILES)))
        finally:
            is_over.set()
        assert uses.result() > 0
    tiers = sym.daemon_stat()["tiers"]
    assert tiers["num_in"] > 0
    assert tiers["num_dropped"] > 0
    for number, file in enumerate(files):
        file.close()
        assert image_of(small.mount / f"{number}.kv") == images[number]
    with pytest.raises(sym.NoSpace, match="pages are needed in memory at once, and there is room for"):
        sym.kv_extract("0.kv", [(1, None)] * 6, "large.kv", rebase=False)
    assert sym.kv_write(sym.kv_create(), [1, 2, 3]) == 3
