"""A daemon ends, with or without warning, and the next one goes on with its files."""

import signal

import pytest

from tests.symphony.launchers import eventually

pytestmark = pytest.mark.slow

BITS = """
        import hashlib
        def bits(dist): return hashlib.sha256(bytes(memoryview(dist.logits))).hexdigest()[:16]
"""


@pytest.fixture
def lives(start_daemon):
    """Starts one daemon after the other over the same state."""

    def start(*options: str, **how):
        return start_daemon("--model", "tiny", "--kv-memory", "64M", *options, **how)

    return start


def test_what_was_synced_outlives_a_kill_and_pred_computes_the_new_token_alone_with_the_same_bits(lives, tmp_path):
    first = lives("--precision", "int8")
    before = first.run(
        BITS
        + """
        text = list(range(1, 200)) + list(range(1, 102))
        kv = sym.kv_create("a.kv")
        sym.kv_write(kv, text[:-1])
        fork = sym.kv_fork(kv, "fork.kv")
        again = bits(sym.pred(kv, text[-1:]))
        sym.kv_write(fork, [9, 9])
        cut = sym.kv_fork(kv, "cut.kv")
        cut.truncate(70)
        for each in (kv, fork, cut): sym.kv_sync(each)
        print(bits(sym.pred(sym.kv_fork(kv), [7])), bits(sym.pred(sym.kv_fork(fork), [7])),
              bits(sym.pred(sym.kv_fork(cut), [7])), again)
        """
    )
    first.stop(signal.SIGKILL)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    second = lives("--precision", "auto")  # the state keeps the precision of its files
    after = second.run(
        BITS
        + """
        kv, fork, cut = (sym.kv_open(name, "rw") for name in ("a.kv", "fork.kv", "cut.kv"))
        found = [bits(sym.pred(sym.kv_fork(each), [7])) for each in (kv, fork, cut)]
        last = kv.read()[0][-1:]
        kv.truncate(len(kv) - 1)                      # the same prompt again: its last token alone
        found.append(bits(sym.pred(kv, last)))
        print(*found)
        assert sym.daemon_stat()["num_tokens"] == 4, sym.daemon_stat()["num_tokens"]
        assert sym.kv_stat(kv).lost_tokens == 0
        """
    )
    assert after == before
    assert "user.kv.lost" not in second.shell(f"getfattr -d {second.mount}/a.kv").stdout


def test_a_limit_of_disk_fails_syncs_and_writes_and_a_program_that_opens_what_lost_entries_is_warned(lives):
    first = lives("--disk", "64K")
    first.run(
        """
        kv = sym.kv_create("a.kv")
        sym.kv_write(kv, [1] * 640)
        try: sym.kv_sync(kv)
        except sym.NoSpace as error: assert "--disk" in str(error)
        else: raise AssertionError
        assert len(sym.pred(kv, [2]).probs()) > 0, "work goes on in memory"
        """
    )
    assert "No space left" in first.shell(f"head -c 2000000 /dev/zero > {first.mount}/plain", check=False).stderr
    first.shell(f"rm {first.mount}/plain")
    assert "64K; " in first.symphony("stat").stdout
    assert "IT FAILS" in first.symphony("stat").stdout
    assert first.stop() == 1
    second = lives()
    assert "; 1 file lost entries: symphony fsck\n" in second.symphony("stat").stdout
    assert second.symphony("fsck").stdout.startswith("/a.kv: 0 of its 641 entries are left: see symphony help")
    opened = """
        import trio, warnings
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as told:
            sym.kv_open("a.kv"); there = sys._getframe().f_lineno
            sym.kv_open_or_compute("a.kv", [1])
            async def main(): await sym.aio.kv_open("a.kv")
            trio.run(main)
            exec("\\n" * (there + 3) + "sym.kv_open('a.kv')", {"sym": sym})
        print(*[(each.category.__name__, each.lineno - there) for each in told], told[0].message if told else "")
    """
    assert second.run(opened) == (
        "('RuntimeWarning', 0) ('RuntimeWarning', 1) ('RuntimeWarning', 2) ('RuntimeWarning', 4) "
        "a.kv: 0 of its 641 entries are left: see symphony help user.kv.lost\n"
    )
    second.run("with sym.kv_open('a.kv', 'rw') as kv: kv.truncate(len(kv))")
    assert second.run(opened) == "\n"
    assert "lost entries" not in second.symphony("stat").stdout
    second.run("with sym.kv_create('small.kv') as kv: sym.kv_write(kv, [1] * 32); sym.kv_sync(kv)")
    assert eventually(lambda: second.stat()["disk"]["num_unsynced_files"] == 0)
    assert "small.kv" in second.symphony("du", "--disk").stdout
