"""A daemon that serves names and files while its weights are being loaded."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import libsym as sym
from decoder.checkpoints.weights import Weights
from symphony.daemon import weights_loading
from symphony.daemon.backends import Loaded
from symphony.daemon.weights_loading import WeightsLoading
from tests.decoder.small_checkpoints import write_gguf
from tests.symphony.launchers import eventually

TINY = ("--model", "tiny", "--kv-memory", "8M")

HELD = """
import select
import symphony.daemon.backends as backends
import symphony.daemon.weights_loading as weights_loading
from libsym.errors import Invalid

class HeldDecoder(backends.CpuDecoder):
    def __init__(self, *args, checkpoint, **options):
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            checkpoint(0.456)
        word = sys.stdin.readline().strip()
        if word != "go":
            raise Invalid(f"the weights are {word}")
        super().__init__(*args, checkpoint=checkpoint, **options)

backends.CpuDecoder = HeldDecoder
weights_loading.TOLD_EVERY_S = 0.01
"""
"""The weights come when the daemon is told so."""

KEEPING = """
import symphony.daemon.backends as backends

class KeepingDecoder(backends.CpuDecoder):
    def keep(self):
        print("keeping", flush=True)
        sys.stdin.readline()

backends.CpuDecoder = KeepingDecoder
"""
"""The weights are never kept."""


@pytest.fixture
def held(start_planted):
    daemon = start_planted(HELD, *TINY)
    sym.connect(str(daemon.socket))
    yield daemon
    sym.close()


def test_names_and_files_are_served_while_the_weights_load_and_pred_waits(held):
    program = held.program("""
        kv = sym.kv_create("early.kv")
        print("made", flush=True)
        sym.pred(kv, [1, 2, 3])
        print("computed", kv.len(), flush=True)
    """)
    assert program.stdout.readline() == "made\n"
    assert held.shell(f"ls {held.mount}").stdout == "early.kv\n"
    held.shell(
        f"cp {held.mount}/early.kv {held.mount}/copy.kv; mkdir {held.mount}/d; mv {held.mount}/copy.kv {held.mount}/d/"
    )
    assert [entry.name for entry in sym.kv_list("d")] == ["copy.kv"]
    assert sym.tokenize("Hi") == [72, 105]
    assert "cpu (" in sym.model_info().backend
    stat = sym.daemon_stat()
    assert (stat["weights"], stat["num_steps"]) == ("loading", 0)
    eventually(lambda: sym.daemon_stat()["weights_share"] == 0.456)
    assert "weights  loading (46 %, " in held.symphony("stat").stdout
    assert "symphony_weights_loaded 0\n" in (held.mount / ".symphony/metrics").read_text()
    held.tell("go")
    assert program.communicate(timeout=60) == ("computed 3\n", "")
    stat = sym.daemon_stat()
    assert stat["weights"] == "loaded"
    assert stat["weights_s"] > 0
    assert 0 < stat["held"]["num"] == sum(stat["held"]["nums"])
    assert "weights  loaded in " in held.symphony("stat").stdout
    assert "symphony_weights_loaded 1\n" in (held.mount / ".symphony/metrics").read_text()
    sym.daemon_check()
    assert "weights are being loaded: 45 %" in held.log.read_text()
    assert "weights loaded in" in held.log.read_text()


def test_a_daemon_can_be_stopped_while_its_weights_load(held):
    program = held.program("""
        try:
            sym.pred(sym.kv_create("early.kv"), [1])
        except sym.NotConnected:
            print("gone")
    """)
    eventually(lambda: sym.daemon_stat()["waiting_calls"])
    assert held.stop() == 0
    assert program.communicate(timeout=20) == ("gone\n", "")
    assert not os.path.ismount(held.mount)
    assert not held.socket.exists()


def test_weights_that_cannot_be_loaded_end_the_daemon_in_one_line(held):
    held.tell("damaged")
    assert held.process.wait(30) == 1
    assert held.log.read_text().splitlines()[-1] == "symphony: the weights are damaged"
    assert not os.path.ismount(held.mount)
    assert not held.socket.exists()


def test_the_next_daemon_has_the_weights_from_the_cache_and_gives_the_same_bits(start_daemon, tmp_path):
    cache, model = tmp_path / "cache", write_gguf(tmp_path / "a.gguf", encoding="Q4_0")
    options = ("--model", str(model), "--precision", "int4", "--kv-memory", "8M", "--weights-cache", str(cache))
    rows = []
    for line in (f"packed weights are kept in {cache}/", f"packed weights of {cache}/"):
        daemon = start_daemon(*options)
        sym.connect(str(daemon.socket))
        rows.append(list(sym.pred(sym.kv_create(), [1, 2, 3]).logits))
        eventually(lambda daemon=daemon, line=line: line in daemon.log.read_text())
        sym.close()
        daemon.process.kill()
        daemon.process.wait()
    assert rows[0] == rows[1]
    assert len(list(cache.iterdir())) == 1


def test_a_daemon_does_not_wait_for_weights_that_are_being_kept(start_planted):
    daemon = start_planted(KEEPING, *TINY)
    assert daemon.process.stdout.readline() == "keeping\n"
    assert len(daemon.program("print(sym.pred(sym.kv_create(), [1]).argmax())").communicate(timeout=60)[0]) > 1
    assert daemon.stop() == 0


def test_symphony_model_asks_the_daemon_for_its_cache(start_daemon, tmp_path):
    cache, model = tmp_path / "cache", write_gguf(tmp_path / "a.gguf", encoding="Q4_0")
    daemon = start_daemon("--model", str(model), "--kv-memory", "8M", "--weights-cache", str(cache))
    eventually(lambda: "packed weights are kept" in daemon.log.read_text())
    shown = daemon.symphony("model", "list").stdout
    assert "small  bf16       " in shown
    assert shown.endswith(f" in {cache}\n")
    assert daemon.symphony("fsck", "--weights").stdout.startswith(f"{cache}: 1 file of packed weights")


def test_a_daemon_looks_for_room_again_and_again(caplog, monkeypatch):
    monkeypatch.setattr(weights_loading, "ROOM_EVERY_S", 0.001)
    looks, enough = [], trio.Event()

    def look():
        looks.append(1)
        if len(looks) == 2:
            raise OSError(5, "the disk fails")
        if len(looks) == 3:
            trio.from_thread.run_sync(enough.set)

    fake: Any = SimpleNamespace(
        load=lambda _weights, _checkpoint: Loaded(fake, make_room=look), provide=lambda _decoder, _native: None
    )

    async def keep() -> None:
        loading = WeightsLoading(fake, Weights({}))
        async with trio.open_nursery() as nursery:
            await loading.run(fake)
            nursery.start_soon(loading.keep)
            with trio.fail_after(20):
                await enough.wait()
            nursery.cancel_scope.cancel()

    trio.run(keep)
    assert "packed weights cannot be removed: [Errno 5] the disk fails" in caplog.text
