"""A daemon ends, with or without warning, and the next one goes on with its files."""

import signal
import subprocess

import pytest

from tests.decoder.small_checkpoints import save, small_model
from tests.kvfs.durable.damage import damage_record
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
    first = lives()
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
    second = lives()
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


def test_a_window_of_attention_comes_back_too(lives, tmp_path):
    model = str(save(tmp_path / "model", small_model("Mistral", sliding_window=20)))
    source = (
        BITS
        + """
        kv = sym.kv_open("w.kv", "rw") if {there} else sym.kv_create("w.kv")
        if not {there}: sym.kv_write(kv, list(range(1, 91))); sym.kv_sync(kv)
        print(bits(sym.pred(sym.kv_fork(kv), [3])))
        """
    )
    first = lives("--model", model)
    before = first.run(source.format(there=False))
    first.stop(signal.SIGKILL)
    second = lives("--model", model)
    assert second.run(source.format(there=True)) == before
    assert second.stat()["num_tokens"] == 1


def test_a_daemon_that_is_told_to_end_loses_nothing_that_has_a_name(lives):
    first = lives("--quota", "1G")
    kv = first.mount
    first.run("sym.kv_write(sym.kv_create('a.kv', 0o640), [1] * 50)")
    first.shell(
        f"cd {kv} && cp a.kv b.kv && mkdir -m 2750 dir && mv b.kv dir/ && ln a.kv hard.kv && ln -s a.kv soft && "
        "mkfifo pipe && echo plain > dir/plain && setfattr -n user.note -v x dir/plain && chown 7:8 hard.kv && "
        "touch -d 2001-02-03 dir/plain && mkdir domain && setfattr -n user.kv.quota -v 1M domain && cp a.kv domain/ && "
        "setfattr -n user.kv.ttl -v 9000 a.kv && head -c 300000 /dev/urandom > big && cat big > big2 && "
        "truncate -s 0 big && : > empty"
    )
    see = (
        f"cd {kv} && find . -printf '%p %y %m %U:%G %s %n %i %T@ %l\\n' | sort && "
        "find . -print0 | sort -z | xargs -0 getfattr -hd -m . && "
        "find . -type f -print0 | sort -z | xargs -0 sha256sum && getfattr -n user.kv.used domain"
    )
    before = first.shell(see).stdout
    assert first.stop() == 0, first.log.read_text()
    second = lives("--quota", "1G")
    hits = r"s/user.kv.\(hits\|tier\)=.*//"
    after = second.shell(see).stdout
    assert subprocess.run(["sed", hits], input=after, capture_output=True, text=True, check=True).stdout == (
        subprocess.run(["sed", hits], input=before, capture_output=True, text=True, check=True).stdout
    )


def test_fsync_on_the_mount_and_symphony_sync_keep_files_and_directories(lives):
    first = lives()
    first.shell(
        f"cd {first.mount} && mkdir -p one/two && echo kept > one/two/file && sync one/two/file && "
        "mkdir three && echo x > three/x && sync three"
    )
    first.run("sym.kv_write(sym.kv_create('one/a.kv'), [1] * 40)")
    first.symphony("sync")
    first.shell(f"cp {first.mount}/one/a.kv {first.mount}/unsynced.kv")
    first.stop(signal.SIGKILL)
    second = lives()
    found = second.shell(f"cd {second.mount} && cat one/two/file && ls three && ls one && stat -c %s one/a.kv").stdout
    assert found.splitlines()[:4] == ["kept", "x", "a.kv", "two"]
    assert second.run("print(len(sym.kv_open('one/a.kv')))") == "40\n"


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


def test_what_is_lost_or_damaged_is_an_error_of_one_file_and_the_rest_is_served(lives, tmp_path):
    first = lives()
    first.shell(f"echo kept > {first.mount}/plain && sync {first.mount}/plain")
    first.run("""
        for name in ("bad.kv", "good.kv"):
            with sym.kv_create(name) as kv: sym.kv_write(kv, [1, 2, 3])
        """)
    first.stop(signal.SIGTERM)
    damage_record("inodes", "/bad.kv")(tmp_path / "state")
    next((tmp_path / "state" / "files").iterdir()).unlink()
    second = lives()
    errors = second.shell(f"cd {second.mount}; cat plain; cat bad.kv; rm -f bad.kv; ls", check=False)
    assert errors.stderr.count("Input/output error") == 3
    assert errors.stdout.split() == ["bad.kv", "good.kv", "plain"]
    assert "the bytes of /plain are lost" in second.log.read_text()
    second.shell(f"echo new > {second.mount}/plain && grep new {second.mount}/plain")
    assert (
        second.run("""
        try: sym.kv_open("bad.kv")
        except OSError as error: print(error.errno)
        print([(each.name, each.kind) for each in sym.kv_list()], sym.kv_read("good.kv")[0])
        """)
        == "5\n[('bad.kv', 'damaged'), ('good.kv', 'kv'), ('plain', 'file')] [1, 2, 3]\n"
    )
    assert "names that are refused: 1" in second.stat()["disk"]["damage"]
