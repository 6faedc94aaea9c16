"""A daemon ends, with or without warning, and the next one goes on with its files."""

import signal
import subprocess

import pytest

from tests.decoder.checkpoints import small_library
from tests.decoder.test_families import CASES, small_model
from tests.kvfs.durable.damage import damage_record

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


def test_what_was_synced_outlives_a_kill_and_pred_computes_the_new_token_alone_with_the_same_bits(lives):
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
    config, library = CASES["mistral, window"], small_library()
    model = str(tmp_path / "model")
    small_model(*config).save_pretrained(model)
    library.save(f"{model}/tokenizer.json")
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


def test_a_program_gets_not_connected_and_connect_brings_it_back(lives):
    first = lives()
    program = first.program(
        """
        kv = sym.kv_create("a.kv")
        sym.kv_write(kv, [1, 2, 3]); sym.kv_sync(kv)
        print("ready", flush=True); sys.stdin.readline()
        try: sym.pred(kv, [4])
        except sym.NotConnected: print("gone", flush=True)
        sym.connect(wait=60)
        print(sym.kv_open("a.kv").read()[0])
        """
    )
    assert program.stdout.readline() == "ready\n"
    first.stop(signal.SIGKILL)
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "gone\n"
    lives()
    out, err = program.communicate(timeout=60)
    assert (out, err) == ("[1, 2, 3]\n", "")


def test_files_of_another_precision_are_listed_moved_copied_and_removed_and_opening_one_says_why_not(lives, tmp_path):
    first = lives("--precision", "float32")
    first.run(
        """
        kv = sym.kv_create('longer.kv'); sym.kv_write(kv, [5] * 70)
        sym.kv_fork(kv, 'a.kv'); sym.kv_write(kv, [6] * 5)            # their last page is shared
        """
    )
    exported = first.shell(f"sha256sum < {first.mount}/a.kv").stdout
    assert first.stop() == 0
    second = lives("--precision", "bf16")
    kv = second.mount
    out = second.run(
        """
        print(sym.kv_stat("a.kv").tokens)
        try: sym.kv_open("a.kv")
        except sym.Invalid as error: print("precision float32" in str(error), "copied out" in str(error))
        sym.kv_write(sym.kv_create("own.kv"), [1] * 40)
        """
    )
    assert out == "70\nTrue True\n"
    second.shell(f"cd {kv} && mkdir d && mv a.kv d/ && cp d/a.kv fork.kv && cp d/a.kv {tmp_path}/out.kv && rm d/a.kv")
    assert second.shell(f"sha256sum < {tmp_path}/out.kv").stdout == exported
    assert second.shell(f"grep -c . {kv}/.symphony/text/own.kv; ls {kv}/.symphony/text").stdout.split()[1:] == [
        "d",
        "own.kv",
    ]
    assert second.stop() == 0
    third = lives("--precision", "float32")
    assert third.run("print(sym.kv_open('fork.kv').read()[0] == [5] * 70, sym.kv_stat('own.kv').tokens)") == "True 40\n"
    assert third.shell(f"sha256sum < {third.mount}/fork.kv").stdout == exported


def test_more_than_memory_holds_starts_lists_copies_out_and_goes_on(lives, tmp_path):
    first = lives()
    first.run("for i in range(4): sym.kv_write(sym.kv_create(f'{i}.kv'), [i + 1] * 640)")
    page_bytes = first.stat()["page_bytes"]
    assert first.stop() == 0
    second = lives("--kv-memory", str(30 * page_bytes))  # the last option counts
    out = second.run(
        """
        print(sym.kv_stat("3.kv").tokens)
        files = [sym.kv_open(f"{i}.kv", "rw") for i in range(4)]
        for kv in files: sym.pred(kv, [7])
        print([kv.read()[0] == [i + 1] * 640 + [7] for i, kv in enumerate(files)])
        """
    )
    assert out == "640\n[True, True, True, True]\n"
    second.shell(f"cp {second.mount}/2.kv {tmp_path}/2.kv && ls -l {second.mount}")
    assert (tmp_path / "2.kv").stat().st_size == (second.mount / "2.kv").stat().st_size


def test_a_limit_of_disk_fails_syncs_and_writes_and_work_goes_on_in_memory(lives):
    first = lives("--precision", "float32", "--disk", "1M")
    out = first.run(
        """
        kv = sym.kv_create("big.kv")
        sym.kv_write(kv, [1] * 3200)
        try: sym.kv_sync(kv)
        except sym.NoSpace as error: print(error.errno, "--disk" in str(error))
        print(len(sym.pred(kv, [2]).probs()) > 0, len(kv))
        """
    )
    assert out == "28 True\nTrue 3201\n"
    assert "No space left" in first.shell(f"head -c 2000000 /dev/zero > {first.mount}/plain", check=False).stderr
    first.shell(f"rm {first.mount}/plain")
    assert "1.0M" in first.symphony("stat").stdout
    assert "IT FAILS" in first.symphony("stat").stdout
    first.run("sym.kv_remove('big.kv')")
    first.run("kv = sym.kv_create('small.kv'); sym.kv_write(kv, [1] * 32); sym.kv_sync(kv); sym.kv_sync()")
    assert first.stat()["disk"]["num_unsynced_files"] == 0
    assert "small.kv" in first.symphony("du", "--disk").stdout


def test_after_a_full_disk_stat_counts_files_that_lost_entries_and_a_program_that_opens_one_is_warned(lives):
    first = lives("--disk", "16K")
    first.run("for name in ('a.kv', 'b.kv'): sym.kv_write(sym.kv_create(name), [1] * 640)")
    assert first.stop() == 1
    second = lives()
    assert "; 2 files lost entries: symphony fsck\n" in second.symphony("stat").stdout
    assert second.symphony("fsck").stdout.startswith("/a.kv: 0 of its 640 entries are left: see symphony help")
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
        "a.kv: 0 of its 640 entries are left: see symphony help user.kv.lost\n"
    )
    second.shell(f"setfattr -x user.kv.lost {second.mount}/a.kv")
    second.run("with sym.kv_open('b.kv', 'rw') as kv: kv.truncate(len(kv))")
    assert second.run(opened) == "\n"
    assert "lost entries" not in second.symphony("stat").stdout


def test_a_ttl_runs_on_while_no_daemon_is_there(lives):
    first = lives()
    first.run(
        """
        for name, ttl in (("short.kv", 0.5), ("long.kv", 5000)):
            with sym.kv_create(name) as kv: sym.kv_advise(kv, sym.TTL(ttl))
        sym.kv_sync()
        """
    )
    first.stop(signal.SIGKILL)
    second = lives()
    second.run("while [each.name for each in sym.kv_list()] != ['long.kv']: time.sleep(0.01)")


def test_the_state_is_closed_to_others_and_freed_space_goes_back(lives, tmp_path):
    first = lives()
    state = tmp_path / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    first.run("kv = sym.kv_create('a.kv'); sym.kv_write(kv, [1] * 3200); sym.kv_sync(kv)")
    slots = next((state / "slots").iterdir())
    full = slots.stat().st_blocks
    first.run("sym.kv_remove('a.kv'); sym.kv_sync(); sym.kv_sync()")
    first.run(f"import pathlib\nwhile pathlib.Path({str(slots)!r}).stat().st_blocks >= {full}: time.sleep(0.01)")


def test_a_plain_file_whose_bytes_are_lost_is_an_error_and_not_empty(lives, tmp_path):
    first = lives()
    first.shell(f"echo kept > {first.mount}/plain && sync {first.mount}/plain")
    first.stop(signal.SIGKILL)
    next((tmp_path / "state" / "files").iterdir()).unlink()
    second = lives()
    assert "Input/output error" in second.shell(f"cat {second.mount}/plain", check=False).stderr
    assert "the bytes of /plain are lost" in second.log.read_text()
    second.shell(f"echo new > {second.mount}/plain && grep new {second.mount}/plain")


def test_a_damaged_row_of_the_index_is_an_error_of_one_file_and_the_rest_is_served(lives, tmp_path):
    first = lives()
    first.run("""
        for name in ("bad.kv", "good.kv"):
            kv = sym.kv_create(name)
            sym.kv_write(kv, [1, 2, 3])
        """)
    first.stop(signal.SIGTERM)
    damage_record("inodes", "/bad.kv")(tmp_path / "state")
    second = lives()
    listed = second.shell(
        f"ls {second.mount}; ls -U {second.mount} >/dev/null; cat {second.mount}/bad.kv; "
        f"rm -f {second.mount}/bad.kv; cp {second.mount}/good.kv {tmp_path}/bad.kv; "
        f"mv {tmp_path}/bad.kv {second.mount}/",
        check=False,
    )
    assert listed.stdout.split() == ["bad.kv", "good.kv"]
    assert listed.stderr.count("Input/output error") == 3
    assert second.run("""
        try: sym.kv_open("bad.kv")
        except OSError as error: print(error.errno)
        print([(each.name, each.kind) for each in sym.kv_list()], list(sym.kv_open("good.kv").read()[0]))
        """).split("\n") == ["5", "[('bad.kv', 'damaged'), ('good.kv', 'kv')] [1, 2, 3]", ""]
    assert "names that are refused: 1" in second.stat()["disk"]["damage"]
