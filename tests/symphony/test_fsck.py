"""`symphony fsck` and `symphony scrub`: over a state that nobody uses, and through a daemon."""

import errno
import json

import pytest

import libsym as sym
from tests.kvfs.durable.damage import flip
from tests.symphony.daemons import Daemon
from tests.symphony.launchers import eventually

OPTIONS = ("--model", "tiny", "--kv-memory", "16M")


def damage_page(daemon: Daemon, page: int, page_bytes: int) -> None:
    (path,) = (daemon.mount.parent / "state/slots").glob("*.kv")
    flip(path, 4096 + page * (-(-page_bytes // 4096) * 4096) + 100)


def test_damage_is_named_by_fsck_is_eio_in_a_daemon_or_its_refusal_in_one_line_and_is_mended(
    start_daemon, symphony, monkeypatch
):
    daemon = start_daemon(*OPTIONS)
    state = daemon.mount.parent / "state"
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    for name, length in (("whole.kv", 40), ("bad.kv", 100)):
        with sym.kv_create(name) as kv:
            sym.kv_write(kv, range(length))
            sym.kv_sync(kv)
    page_bytes = sym.daemon_stat()["page_bytes"]
    for words in (("--state", str(state)), (str(state),)):
        status, _, refused = symphony("fsck", *words)
        assert (status, "a daemon uses" in refused) == (2, True)
    assert symphony("fsck")[0] == 0
    sym.close()
    assert daemon.stop() == 0
    damage_page(daemon, 3, page_bytes)  # 0 and 1 are of the first file
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}

    status, told, _ = symphony("fsck", "--state", str(state), "--json")
    found = json.loads(told)
    assert (status, found["clean"], [each["paths"] for each in found["findings"]]) == (1, False, [["/bad.kv"]])
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before

    daemon = start_daemon(*OPTIONS)
    sym.connect(str(daemon.socket))
    assert len(sym.kv_open("whole.kv")) == 40
    bad = sym.kv_open("bad.kv", "rw")
    with pytest.raises(sym.SymError, match=r"damaged on disk: /bad\.kv from entry 32 on") as caught:
        sym.pred(bad, [1])
    assert caught.value.errno == errno.EIO
    assert "/bad.kv" in daemon.log.read_text()
    status, told, _ = symphony("scrub", "--rate", "100M", "--json")
    assert (status, [each["paths"] for each in json.loads(told)["findings"]]) == (1, [["/bad.kv"]])
    status, told, _ = symphony("fsck", "--repair")
    assert status == 1
    assert told.startswith("/bad.kv: damaged on disk")
    assert "repaired: it keeps 32 of 100 entries" in told
    status, told, _ = symphony("fsck")
    assert (status, told.endswith("all is as it was written\n")) == (0, True)
    stat = sym.kv_stat("bad.kv")
    assert (stat.tokens, stat.lost_tokens) == (32, 68)
    sym.close()
    assert daemon.stop() == 0
    assert symphony("fsck", str(state))[0] == 0

    with (state / "index.db").open("r+b") as file:
        file.write(bytes(4096))
    refused = daemon.symphony("serve", *OPTIONS, "--state", str(state), "--mount", str(daemon.mount), check=False)
    assert refused.returncode == 1
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("symphony: ")]
    assert "symphony fsck" in line
    assert "Traceback" not in refused.stderr
    assert symphony("fsck", "--state", str(state), "--repair")[0] == 1
    assert start_daemon(*OPTIONS).run("print(len(sym.kv_open('whole.kv')))") == "40\n"


def test_one_scrub_at_a_time_and_one_whose_program_has_gone_is_over(shared, symphony):
    with sym.kv_create("a.kv") as kv:
        sym.kv_write(kv, range(250))
        sym.kv_sync(kv)
    slow = shared.program("""
        from libsym.calls.scrub import daemon_scrub
        daemon_scrub(rate=1, progress=lambda done, total: print(done, total, flush=True))
    """)
    assert slow.stdout.readline(), "it is under way"
    status, told, why = symphony("scrub")
    assert (status, told, "under way" in why) == (2, "", True)
    slow.kill()
    slow.communicate()
    eventually(lambda: symphony("scrub")[0] != 2)  # the daemon hears of it in its own time


def test_what_cannot_be_looked_at_is_one_line_and_status_2(tmp_path, symphony, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(tmp_path / "none.sock"))
    for words in (
        ("fsck", "--state", str(tmp_path / "nowhere")),
        ("fsck", str(tmp_path / "nowhere")),
        ("fsck", "--socket", str(tmp_path / "other.sock")),
        ("scrub",),
        ("scrub", "--rate", "much"),
    ):
        status, told, why = symphony(*words)
        assert (status, told, why.count("\n")) == (2, "", 1)
        assert why.startswith("symphony: ")
