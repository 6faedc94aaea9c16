"""`symphony model` and `symphony fsck --weights`: files of packed weights, listed, checked and removed."""

import fcntl
import json

import pytest

from decoder.cpu.panel_cache import BLOCK_BYTES, PanelCache
from symphony.checks import doctor
from tests.decoder.cpu.kept_panels import NUM_BLOCKS, a_checkpoint, memory_of
from tests.kvfs.durable.damage import flip


@pytest.fixture
def about(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    return a_checkpoint(tmp_path / "model.gguf")


@pytest.fixture
def kept(tmp_path, about):
    """The path of a file of a cache, which no daemon uses."""
    cache = PanelCache(tmp_path / "cache")
    cache.keep(about, memory_of(7))
    return cache.directory / about.file_name


@pytest.fixture
def symphony(symphony, monkeypatch, tmp_path, kept):
    """Return a function that runs a command on the cache."""
    monkeypatch.setenv("SYMPHONY_SOCKET", str(tmp_path / "none"))
    monkeypatch.setenv("SYMPHONY_WEIGHTS_CACHE", str(kept.parent))
    return symphony


def states(symphony) -> dict[str, str]:
    status, told, _ = symphony("model", "list", "--json")
    assert status == 0
    return {each["name"]: each["state"] for each in json.loads(told)["files"]}


def test_files_are_listed_with_what_they_are_for(symphony, kept, about, tmp_path):
    status, told, _ = symphony("model", "list")
    assert status == 0
    heading, line, sums = told.splitlines()
    assert heading.split() == ["MODEL", "PRECISION", "PROCESSOR", "SIZE", "LAST", "USE", "STATE", "FILE"]
    assert line.startswith("A model/8B  int4       avx2       12M ")
    assert line.endswith(f" unused  {kept.name}")
    assert sums == f"1 file of 12M in {kept.parent}"
    (found,) = json.loads(symphony("model", "list", "--json")[1])["files"]
    assert (found["precision"], found["checkpoint"]) == ("int4", [str(tmp_path / "model.gguf")])


def test_the_state_of_a_file_says_whether_a_start_would_use_it(symphony, kept, about, tmp_path):
    assert states(symphony) == {kept.name: "unused"}
    with kept.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert states(symphony) == {kept.name: "in use"}
    (tmp_path / "model.gguf").rename(tmp_path / "gone.gguf")
    assert states(symphony) == {kept.name: "outdated"}
    flip(kept, 100)
    part = kept.with_name(f"{kept.name}.part")
    part.touch(mode=0o600)
    assert states(symphony) == {kept.name: "damaged", part.name: "unfinished"}
    with part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert states(symphony)[part.name] == "in use"


def test_files_are_removed_by_name_or_if_no_daemon_uses_them(symphony, kept):
    assert symphony("model", "remove", "other.panels")[0] == 1
    with kept.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert symphony("model", "remove", "--unused")[1] == f"0 files of 0 removed from {kept.parent}\n"
        assert kept.exists()
    (kept.parent / "note.txt").touch()
    assert symphony("model", "remove", "--unused")[1] == f"1 file of 12M removed from {kept.parent}\n"
    assert [path.name for path in kept.parent.iterdir()] == ["note.txt"]
    kept.write_bytes(b"damaged")
    assert symphony("model", "remove", kept.name)[0] == 0
    assert not kept.exists()
    status, _, error = symphony("model", "remove", "note.txt")
    assert (status, error) == (1, f"symphony: {kept.parent} has no note.txt: symphony model lists the files\n")


def test_fsck_reads_every_block_and_removes_a_damaged_file_if_it_shall(symphony, kept):
    assert symphony("fsck", "--weights")[:2] == (
        0,
        f"{kept.parent}: 1 file of packed weights, 12M: all is as it was written\n",
    )
    for block in (1, NUM_BLOCKS):
        flip(kept, block * BLOCK_BYTES + 77)
    assert symphony("fsck", "--weights", "--quick")[0] == 0
    status, told, _ = symphony("fsck", "--weights", "--json")
    (finding,) = json.loads(told)["findings"]
    assert (status, finding["kind"], finding["is_damage"]) == (1, "weights", True)
    assert finding["what"] == f"{kept}: 2 of its {NUM_BLOCKS} blocks are damaged"
    assert kept.exists()
    status, told, _ = symphony("fsck", "--weights", str(kept.parent), "--repair")
    assert (status, "1 thing damaged, and repaired" in told) == (1, True)
    assert not kept.exists()


def test_fsck_finds_headers_that_are_damaged_and_leftovers_that_are_none(symphony, kept, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"another model")
    part = kept.with_name(f"{kept.name}.part")
    part.touch(mode=0o600)
    status, told, _ = symphony("fsck", "--weights")
    assert (status, told.count(" is outdated;"), told.count(" is unfinished;")) == (0, 1, 1)
    flip(kept, 0)
    status, told, _ = symphony("fsck", "--weights", "--quick")
    assert (status, f"{kept}: its header is damaged" in told) == (1, True)
    symphony("fsck", "--weights", "--repair")
    assert not list(kept.parent.iterdir())


def test_a_cache_that_is_not_there_is_one_line(symphony, monkeypatch, tmp_path):
    for command in (("model", "list", "--weights-cache"), ("fsck", "--weights")):
        status, told, error = symphony(*command, str(tmp_path / "none"))
        assert (status > 0, told, error.count("\n")) == (True, "", 1)
        assert "there is no such directory" in error
    monkeypatch.setenv("SYMPHONY_WEIGHTS_CACHE", "")
    assert "the key weights_cache is empty" in symphony("model", "list")[2]


def test_the_doctor_tells_of_the_directory_and_how_others_are_kept_out(symphony, kept, monkeypatch):
    found = doctor.check_weights()
    assert (found.ok, found.detail) == (True, f"1 packed, 12M in {kept.parent}")
    kept.parent.chmod(0o755)
    found = doctor.check_weights()
    assert (found.ok, found.advice.partition(":")[0]) == (False, f"chmod 700 {kept.parent}")
    monkeypatch.setenv("SYMPHONY_WEIGHTS_CACHE", str(kept.parent / "none"))
    assert doctor.check_weights().ok is None
