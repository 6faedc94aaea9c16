"""Packed weights that are kept in files: what is used, what is packed anew, and what a killed writer leaves."""

import gc
import os
import random
import resource
import signal
import threading
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import xxhash

from decoder.checkpoints.weights import Weights
from decoder.cpu import panel_cache
from decoder.cpu._step import lib
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.cpu.packed_weights import pack_weights
from decoder.cpu.panel_cache import BLOCK_BYTES, REVISION, PanelCache, open_cache
from decoder.cpu.panel_memory import FileView, PanelMemory
from decoder.model import load_model
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Bench, Call, tokens_of
from tests.decoder.cpu.kept_panels import NUM_BLOCKS, a_checkpoint, memory_of, new_memory, no_checkpoint, writer
from tests.decoder.cpu.quantized import quantized
from tests.decoder.small_checkpoints import CONFIG, gguf_metadata, gguf_tensors, write_gguf


@pytest.fixture
def about(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    return a_checkpoint(tmp_path / "model.gguf")


@pytest.fixture
def cache(tmp_path):
    return PanelCache(tmp_path / "cache")


@pytest.fixture
def kept(cache, about):
    """The path of a file with the panels of seed 7."""
    cache.keep(about, memory_of(7))
    return cache.directory / about.file_name


def names(cache) -> list[str]:
    return [path.name for path in cache.directory.iterdir()]


def loaded_as(cache, about, seed: int) -> bool:
    memory = new_memory()
    is_loaded = cache.load(about, memory, no_checkpoint)
    assert not is_loaded or np.array_equal(memory.array, memory_of(seed).array)
    return is_loaded


def mapped_file(memory: PanelMemory) -> str:
    """The file that the memory shows; empty if it is anonymous."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, end = (int(word, 16) for word in fields[0].split("-"))
        if first <= memory.array.ctypes.data < end:
            return fields[5] if len(fields) > 5 else ""
    raise AssertionError(memory)


@pytest.mark.slow
@pytest.mark.parametrize("is_huge", [True, False])
def test_a_file_is_mapped_if_it_is_in_huge_pages_and_copied_if_not(cache, about, monkeypatch, caplog, is_huge):
    monkeypatch.setattr(FileView, "is_huge", lambda _view: is_huge)
    caplog.set_level("INFO")
    first, second = memory_of(7), new_memory()
    cache.keep(about, first)
    assert cache.load(about, second, no_checkpoint)
    for memory in (first, second):
        assert np.array_equal(memory.array, memory_of(7).array)
        assert mapped_file(memory) == (str(cache.directory / about.file_name) if is_huge else "")
    assert ("mapped" if is_huge else "copied") in caplog.text
    assert names(cache) == [about.file_name]
    assert (cache.directory.stat().st_mode & 0o777, (cache.directory / about.file_name).stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def test_a_mapped_file_may_be_removed(cache, about, kept, monkeypatch):
    monkeypatch.setattr(FileView, "is_huge", lambda _view: True)
    memory = new_memory()
    assert cache.load(about, memory, no_checkpoint)
    kept.unlink()
    assert np.array_equal(memory.array, memory_of(7).array)
    assert not loaded_as(cache, about, 7)


@pytest.mark.parametrize(
    ("field", "value"), [("revision", REVISION + 1), ("fingerprint", "0" * 64), ("matrices", [[3, 64, 96, 0]])]
)
def test_panels_of_another_kind_are_packed_anew_and_replaced(cache, about, kept, caplog, field, value):
    other = replace(about, **{field: value})
    assert not loaded_as(cache, other, 7)
    assert f"{kept} is not used: it was made for another {field}" in caplog.text
    cache.keep(other, memory_of(8))
    assert loaded_as(cache, other, 8)
    assert names(cache) == [kept.name]


@pytest.mark.parametrize("change", ["touched", "other bytes", "other file"])
def test_panels_of_a_changed_checkpoint_are_packed_anew(cache, about, kept, caplog, change):
    path, at = Path(about.checkpoint[0][0]), Path(about.checkpoint[0][0]).stat()
    if change == "touched":
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    else:
        if change == "other file":
            path.rename(f"{path}.old")
        path.write_bytes(b"WEIGHTS" if change == "other file" else b"more weights")
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert not loaded_as(cache, a_checkpoint(path), 7)
    assert f"{kept} is not used: it was made for another checkpoint" in caplog.text


@pytest.mark.parametrize("field", ["precision", "processor"])
def test_each_precision_and_processor_has_a_file(cache, about, kept, caplog, field):
    other = replace(about, **{field: "other"})
    assert not loaded_as(cache, other, 7)
    cache.keep(other, memory_of(8))
    assert loaded_as(cache, about, 7)
    assert loaded_as(cache, other, 8)
    assert not caplog.text


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (3, "its header is damaged"),
        (BLOCK_BYTES - 1, "its header is damaged"),
        (BLOCK_BYTES, "block 0 is damaged"),
        ((1 + NUM_BLOCKS) * BLOCK_BYTES - 1, f"block {NUM_BLOCKS - 1} is damaged"),
    ],
)
def test_a_damaged_file_is_not_used_and_replaced(cache, about, kept, caplog, at, why):
    with kept.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    assert not loaded_as(cache, about, 7)
    assert f"{kept} is not used: {why}" in caplog.text
    cache.keep(about, memory_of(7))
    assert loaded_as(cache, about, 7)


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"about": {"revision": 1}}', b'{"about": 1, "more": 2}'])
def test_a_header_of_another_release_is_not_used(cache, about, kept, caplog, text):
    text = text.ljust(BLOCK_BYTES - 8)
    with kept.open("r+b") as file:
        file.write(xxhash.xxh3_64_digest(text) + text)
    assert not loaded_as(cache, about, 7)
    assert f"{kept} is not used: another release of Symphony wrote it" in caplog.text


@pytest.mark.parametrize("size", [0, 100, BLOCK_BYTES, NUM_BLOCKS * BLOCK_BYTES, (2 + NUM_BLOCKS) * BLOCK_BYTES])
def test_a_file_of_another_size_is_not_used(cache, about, kept, caplog, size):
    os.truncate(kept, size)
    assert not loaded_as(cache, about, 7)
    assert f"{kept} is not used: it" in caplog.text


def test_another_users_file_or_mode_is_not_used(cache, about, kept, caplog):
    kept.chmod(0o640)
    assert not loaded_as(cache, about, 7)
    assert "its mode is 0640, not 0600" in caplog.text
    kept.chmod(0o600)
    assert loaded_as(cache, about, 7)
    kept.rename(cache.directory / "other")
    kept.symlink_to("other")
    assert not loaded_as(cache, about, 7)
    kept.unlink()
    os.mkfifo(kept, 0o600)
    assert not loaded_as(cache, about, 7)
    assert "it is no file" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER OWNER: needs root")
def test_the_owner_of_files_and_of_the_directory_is_checked(cache, about, kept, caplog):
    os.chown(kept, 12345, -1)
    assert not loaded_as(cache, about, 7)
    assert "it belongs to uid 12345, not to 0" in caplog.text
    os.chown(cache.directory, 12345, -1)
    assert open_cache(cache.directory) is None
    assert f"{cache.directory} is no cache for packed weights" in caplog.text


def test_a_directory_that_others_may_enter_or_that_cannot_be_made_is_no_cache(tmp_path, caplog):
    (tmp_path / "open").mkdir(mode=0o755)
    assert open_cache(tmp_path / "open") is None
    assert "its mode is 0755, not 0700" in caplog.text
    (tmp_path / "file").touch()
    assert open_cache(tmp_path / "file") is None
    assert open_cache(tmp_path / "file" / "cache") is None
    assert caplog.text.count("is no cache for packed weights, so each start packs them") == 3


def test_a_full_disk_is_one_line_and_leaves_nothing(cache, about, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    memory = memory_of(7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK_BYTES, before[1]))
    try:
        cache.keep(about, memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = caplog.records
    assert f"packed weights are not kept in {cache.directory / about.file_name}" in record.message
    assert names(cache) == []
    assert not mapped_file(memory)


def test_a_twentieth_of_the_disk_stays_free(cache, about, caplog, monkeypatch):
    monkeypatch.setattr(panel_cache, "FREE_SHARE", 1.0)
    cache.keep(about, memory_of(7))
    assert "would leave less than 5 % of the disk free" in caplog.text
    assert names(cache) == []


def test_a_full_disk_loses_the_longest_unused_files_first_and_none_in_use(cache, about, kept, caplog, monkeypatch):
    caplog.set_level("INFO")
    used, others = new_memory(), [replace(about, precision=name) for name in ("old", "new")]
    monkeypatch.setattr(FileView, "is_huge", lambda _view: True)
    for other in others:
        cache.keep(other, memory_of(8))
    assert cache.load(about, used, no_checkpoint)
    for number, path in enumerate((kept, *(cache.directory / each.file_name for each in others))):
        os.utime(path, (number, number))
    assert cache.make_room()
    assert len(names(cache)) == 3
    looks = [False, False, True]
    monkeypatch.setattr(PanelCache, "_has_room", lambda _cache, _num_bytes: looks.pop(0))
    gc.collect()  # the memory of the others
    assert cache.make_room()
    assert sorted(names(cache)) == sorted([kept.name, others[1].file_name])
    assert f"{cache.directory / others[0].file_name} is removed: the disk is nearly full" in caplog.text
    looks[:] = [False] * 9
    assert not cache.make_room()
    assert names(cache) == [kept.name]
    assert np.array_equal(used.array, memory_of(7).array)


def test_panels_of_a_checkpoint_that_changes_while_they_are_written_are_not_kept(cache, about, caplog):
    Path(about.checkpoint[0][0]).write_bytes(b"other weights")
    cache.keep(about, memory_of(7))
    assert "the checkpoint has changed meanwhile" in caplog.text
    assert names(cache) == []


@pytest.mark.slow
def test_a_killed_writers_file_is_never_used_and_written_anew(cache, about, caplog):
    for stop_at in (1, NUM_BLOCKS, 0):  # the header, which is block 0, comes last
        with writer(cache, about, stop_at) as process:
            while process.stdout.readline().strip() != str(stop_at):
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert names(cache) == [f"{about.file_name}.part"]
        assert not loaded_as(cache, about, 7)
    assert not caplog.text
    cache.keep(about, memory_of(7))
    assert names(cache) == [about.file_name]
    assert loaded_as(cache, about, 7)


@pytest.mark.slow
def test_a_writer_waits_for_another_writer_of_the_same_file_and_shares_its_file(cache, about):
    with writer(cache, about, 3) as process:
        while process.stdout.readline().strip() != "3":
            assert process.poll() is None
        waiting = threading.Thread(target=cache.keep, args=(about, memory := memory_of(7)))
        waiting.start()
        part = (cache.directory / f"{about.file_name}.part").stat().st_ino
        process.stdin.write("\n")
        process.stdin.flush()
        waiting.join()
        assert process.wait() == 0
    assert names(cache) == [about.file_name]
    assert (cache.directory / about.file_name).stat().st_ino == part
    assert np.array_equal(memory.array, memory_of(7).array)


@pytest.mark.slow
def test_writers_that_are_killed_at_any_moment_leave_a_whole_file_or_none(cache, about):
    rng = random.Random(5)
    for _ in range(6):
        with writer(cache, about, "none") as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))  # any moment of the writing
            process.kill()
        loaded_as(cache, about, 7)  # compares the bytes
    cache.keep(about, memory_of(7))
    assert loaded_as(cache, about, 7)


# ---- With a model


def a_model(path: Path, seed: int = 0):
    tensors = gguf_tensors(CONFIG, random_weights(CONFIG, seed))
    return load_model(str(write_gguf(path, gguf_metadata(), tensors, "Q4_0")))


def panels_of(model, precision: str, directory: Path | None = None, isa: str = "plain"):
    packed = pack_weights(model.config, model.weights, precision, cache_directory=directory, isa=isa)
    packed.keep()
    return packed.owned[0].array


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "int8", "int4"])
def test_a_model_from_the_cache_has_the_same_panels(tmp_path, cache, caplog, precision):
    caplog.set_level("INFO")
    model = a_model(tmp_path / "a.gguf")
    panels = panels_of(model, precision)
    assert panels.any()
    for line in ("packed weights are kept in", "packed weights of"):
        caplog.clear()
        assert np.array_equal(panels_of(model, precision, cache.directory), panels)
        (record,) = caplog.records
        assert line in record.message
    other = a_model(tmp_path / "a.gguf", seed=3)  # another model in the place of the first
    assert np.array_equal(panels_of(other, precision, cache.directory), panels_of(other, precision))
    assert len(names(cache)) == 1


def test_weights_that_are_no_files_are_not_kept(cache):
    config, directory = tiny_config(), cache.directory / "none"
    pack_weights(config, random_weights(config), "bf16", cache_directory=directory, isa="plain").keep()
    assert not directory.exists()


@pytest.mark.slow
def test_steps_give_the_same_bits_while_the_memory_becomes_a_file(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(FileView, "is_huge", lambda _view: True)
    model = a_model(tmp_path / "a.gguf")
    arena = Arena(model.config, 8, "BF16")
    decoder = CpuDecoder(
        model.config, model.weights, arena, 2, precision="int4", cache_directory=cache.directory, solo_work=0
    )
    bench = Bench(model.config, decoder, arena)
    file = bench.file(40)

    def logits() -> np.ndarray:
        file.length = 0
        return bench.step(Call(file, tokens_of(40), "last"))[0]

    expected, keeping = logits(), threading.Thread(target=decoder.keep)
    keeping.start()
    while keeping.is_alive():
        assert np.array_equal(logits(), expected)
    assert np.array_equal(logits(), expected)
    assert mapped_file(decoder._packed.owned[0])
    decoder.close()


def exact_weights(*kinds: str):
    """Weights whose values are exact, so that every machine makes the same."""
    config = tiny_config(hidden_size=64, num_layers=1)
    weights, arrays = random_weights(config), {}
    for number, name in enumerate(sorted(weights.names())):
        shape = weights.shape(name)
        codes = (np.arange(np.prod(shape)) * 37 + number) % 255 - 127
        arrays[name] = codes.reshape(shape).astype(np.float32) / np.float32(128)
    exact = Weights.of_arrays(arrays)
    return config, quantized(exact, *kinds) if kinds else exact


@pytest.mark.parametrize(
    ("precision", "kinds", "digest"),
    [
        ("float32", (), "09a38dcdf8936712"),
        ("bf16", (), "ff5d24dc948ea78f"),
        ("int8", (), "bcc99eae4a3fe7f4"),
        ("int4", ("Q4_0",), "136f2b49198febc3"),
        ("int4", ("Q4_1", "Q8_0"), "0ca1fe08674dafa2"),
    ],
)
def test_a_new_layout_has_a_new_revision(precision, kinds, digest):
    """If this fails, panels of older releases are wrong: raise SYM_PANELS_REVISION, and state the new digests here."""
    config, weights = exact_weights(*kinds)
    panels = pack_weights(config, weights, precision).owned[0].array
    assert (lib.SYM_PANELS_REVISION, blake2b(panels, digest_size=8).hexdigest()) == (2, digest)
