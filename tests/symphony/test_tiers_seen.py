"""Tiers in the view of users and programs, on a daemon with little memory: attributes, advice, pressure, figures.

`tests/kvfs/durable/test_tiers*.py` and `tests/scheduler/test_pressure.py` prove who goes, who waits and who is told.
"""

import errno
import os
import signal
import subprocess
import threading
from typing import Any

import anyio
import pytest

import libsym as sym
from tests.symphony.conftest import connected_to
from tests.symphony.daemons import a_daemon
from tests.symphony.launchers import eventually
from tests.symphony.services import OTHER_UID, as_user

NUM_FRAMES = 128
"""Pages of the tiny model that fit into 1 MiB."""
LARGE = 1000
"""Tokens, in 32 pages: four such files fill memory."""
WITHIN_S = 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER USER TESTED: it needs root")


@pytest.fixture
def start_small(start_daemon, monkeypatch):
    """Starts a daemon in whose memory four large files have room, and connects this process to it."""

    def start(*options, kv_memory="1M"):
        daemon = start_daemon("--model", "tiny", "--kv-memory", kv_memory, *options)
        monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
        sym.connect(str(daemon.socket))
        return daemon

    yield start
    sym.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("daemon")
    directory.chmod(0o755)
    with a_daemon(directory, "--model", "tiny", "--kv-memory", "1M", "--grace-ms", "20000") as daemon:
        daemon.mount.chmod(0o777)
        yield daemon


@pytest.fixture
def small(shared, monkeypatch):
    """The daemon of the module, without any file."""
    yield from connected_to(shared, monkeypatch)


def make(name, num_tokens=LARGE):
    with sym.kv_create(name) as kv:
        sym.kv_write(kv, [1 + number % 200 for number in range(num_tokens)])


def put(daemon, name, value):
    os.setxattr(daemon.mount / name, "user.kv.tier", value.encode())


def tier(daemon, name):
    return os.getxattr(daemon.mount / name, "user.kv.tier").decode()


def next_row(name):
    with sym.kv_open(name) as kv, kv.fork() as fork:
        return list(sym.pred(fork, [5]).logits)


# ---- the attribute


@pytest.mark.slow
def test_a_file_goes_to_disk_and_comes_back_as_its_attribute_says(small):
    make("a.kv")
    before, figures = next_row("a.kv"), small.stat()["tiers"]
    small.shell(f"setfattr -n user.kv.tier -v disk {small.mount}/a.kv")
    stat = sym.kv_stat("a.kv")
    assert (tier(small, "a.kv"), stat.tier, stat.memory_pages, stat.pages) == ("disk", "disk", 0, 32)
    put(small, "a.kv", "memory")
    assert sym.kv_stat("a.kv").memory_pages == 32
    put(small, "a.kv", "disk")
    assert len((small.mount / "a.kv").read_bytes()) == stat.size
    assert (small.mount / ".symphony" / "text" / "a.kv").read_bytes()
    assert tier(small, "a.kv") == "disk", "an image and a text bring nothing into memory"
    assert next_row("a.kv") == before
    assert 'user.kv.tier="memory"' in small.shell(f"getfattr -d {small.mount}/a.kv").stdout
    num_in = small.stat()["tiers"]["num_in"]
    assert num_in - figures["num_in"] == 64
    told = (small.mount / ".symphony" / "metrics").read_text().splitlines()
    assert {f"symphony_frames {NUM_FRAMES}", f'symphony_pages_moved_total{{way="in"}} {num_in}'} <= set(told)
    assert {"memory  ", "in use"} <= {each for each in ("memory  ", "in use") if each in small.symphony("stat").stdout}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("a.kv", "moon", errno.EINVAL),
        ("a.kv", "mixed", errno.EINVAL),
        ("directory", "disk", errno.EOPNOTSUPP),
        ("pinned.kv", "disk", errno.EBUSY),
    ],
)
def test_a_tier_that_can_not_be_set_is_refused(small, name, value, code):
    make("a.kv", 40)
    make("pinned.kv", 40)
    sym.kv_advise("pinned.kv", sym.PIN)
    (small.mount / "directory").mkdir()
    with pytest.raises(OSError, match=os.strerror(code)):
        put(small, name, value)
    assert tier(small, "a.kv") == "memory"


@needs_root
def test_only_the_owner_sets_it(small):
    sym.kv_create("a.kv", mode=0o666).close()
    set_it = f"os.setxattr('{small.mount}/a.kv', 'user.kv.tier', b'disk')"
    program = small.program(as_user(OTHER_UID, set_it))
    assert "not permitted" in program.communicate(timeout=60)[1]


def test_a_signal_ends_the_wait_for_a_file_that_is_computed_with(small):
    make("a.kv", 100)
    with sym.kv_open("a.kv", "rw") as kv, sym.generate(kv, [1], max_tokens=3900, stop_at_end=False) as generation:
        next(generation)
        process = subprocess.Popen(["setfattr", "-n", "user.kv.tier", "-v", "disk", str(small.mount / "a.kv")])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == -signal.SIGTERM
        generation.cancel()
    put(small, "a.kv", "disk")
    assert tier(small, "a.kv") == "disk"


# ---- advice


@pytest.mark.slow
def test_a_lease_ends_by_itself_can_become_a_pin_for_good_and_be_taken_back(small):
    make("leased.kv", 40)
    make("a.kv", 40)
    sym.kv_advise("leased.kv", sym.TTL(0.1), sym.PIN(1.0))
    sym.kv_advise("a.kv", sym.PIN(0.2))
    sym.kv_advise("a.kv", sym.PIN)
    stat: Any = sym.kv_stat("leased.kv")
    assert stat.pinned
    assert 0 < stat.lease_s <= 1.0
    eventually(lambda: [each.name for each in sym.kv_list()] == ["a.kv"])
    assert (sym.kv_stat("a.kv").pinned, sym.kv_stat("a.kv").lease_s) == (True, 0)
    sym.kv_advise("a.kv", sym.UNPIN)
    assert not sym.kv_stat("a.kv").pinned
    put(small, "a.kv", "disk")


@needs_root
def test_no_more_may_be_pinned_than_the_daemon_says_and_advice_outlives_it(start_small, open_to_all):
    daemon = start_small("--pin-share", "0.5")
    for name in ("a.kv", "b.kv", "c.kv"):
        make(name)
    sym.kv_advise("a.kv", sym.PIN, sym.PRIORITY(7))
    sym.kv_advise("b.kv", sym.PIN(1000))
    with pytest.raises(sym.NoSpace, match="pinned"):
        sym.kv_advise("c.kv", sym.PIN)
    assert not sym.kv_stat("c.kv").pinned
    sym.kv_advise("b.kv", sym.UNPIN)
    sym.kv_advise("c.kv", sym.PIN(1000))
    assert daemon.stat()["tiers"]["num_kept"] == 64
    sym.close()
    assert daemon.stop() == 0
    daemon = start_small()
    daemon.mount.chmod(0o1777)
    eventually(lambda: tier(daemon, "a.kv") == "memory")
    stat = sym.kv_stat("a.kv")
    assert (stat.pinned, stat.priority, sym.kv_stat("c.kv").pinned) == (True, 7, False), "a lease ends with the daemon"
    said = daemon.run(
        as_user(
            OTHER_UID,
            """
            for name in ("x.kv", "y.kv"):
                with sym.kv_create(name) as kv: sym.kv_write(kv, [1] * 1000)
            sym.kv_advise("x.kv", sym.PIN)
            try: sym.kv_advise("y.kv", sym.PIN)
            except sym.OverQuota as error: print(error)
            """,
        )
    )
    assert f"uid {OTHER_UID} would have 64 pages pinned, and 32 is the most" in said, "half of that for one user"


def test_a_pinned_file_that_grows_does_not_keep_others_out_for_ever(small):
    """Pages that the file has grown by beyond the share may go down as any other page."""
    with sym.kv_create("grows.kv") as kv:
        sym.kv_write(kv, [1] * 100)
        sym.kv_advise(kv, sym.PIN)
        sym.kv_write(kv, [1] * 3000)
    for number in range(4):
        make(f"{number}.kv", 1500)
    assert tier(small, "grows.kv") in {"mixed", "disk"}
    assert (sym.kv_stat("grows.kv").memory_pages or 0) >= 4, "what was pinned"


# ---- pressure


def test_a_program_hears_what_is_about_to_go_and_what_it_removes_is_enough(small):
    for name in ("old.kv", "new.kv", "newest.kv"):
        make(name)
    heard = list[Any]()

    def make_room():
        heard.append(sym.kv_pressure(timeout=WITHIN_S))
        sym.kv_remove("new.kv")

    thread = threading.Thread(target=make_room)
    thread.start()
    eventually(lambda: "waiting for pressure" in [each.state for each in sym.programs()])
    with sym.kv_create("more.kv") as kv:
        sym.pred(kv, [1] * 1500, deadline=15)  # and nobody waits for the end of the grace
    thread.join()
    (pressure,) = heard
    assert pressure.kind == "memory"
    assert 0 < pressure.grace_s <= 20
    assert pressure.wanted_bytes > 0
    first: Any = pressure.candidates[0]
    assert first.path in {"old.kv", "new.kv", "newest.kv"}, "who goes first is the policy's affair"
    assert (first.tokens, first.pinned, first.priority) == (LARGE, False, 0)
    assert first.memory_bytes == first.freed_bytes > 0
    assert min(first.bring_s, first.idle_s) > 0
    kept = {tier(small, "old.kv"), tier(small, "newest.kv")}
    assert kept == {"memory"}, "the program has made room in another way"


def test_a_loop_of_tasks_hears_it_too_also_of_a_quota_that_is_nearly_full(small):
    (small.mount / "key").mkdir()
    os.setxattr(small.mount / "key", "user.kv.quota", b"100K")  # twelve pages
    sym.connect(domain="key")

    async def main():
        heard = []

        async def listen():
            heard.append(await sym.aio.kv_pressure(timeout=WITHIN_S))

        async with await sym.aio.kv_create("a.kv") as kv:
            await sym.aio.kv_write(kv, [1] * 32 * 9)
            with pytest.raises(sym.WouldBlock):
                await sym.aio.kv_pressure(timeout=0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await anyio.sleep(0.05)
                await sym.aio.kv_write(kv, [1] * 96)
            (pressure,) = heard
            assert (pressure.kind, [each.path for each in pressure.candidates]) == ("quota", ["a.kv"])
            assert kv.handle in pressure.candidates[0].handles

    anyio.run(main)
    sym.connect()


# ---- the policy


def test_the_policy_is_a_file_of_the_operators_and_changes_with_the_configuration(start_small, tmp_path):
    mine, config = tmp_path / "mine.py", tmp_path / "symphony.toml"

    def reload(text, policy="return files.num_pages"):
        mine.write_text(f"def rank(files, gaps):\n    {policy}\n")
        config.write_text(text)
        done = daemon.symphony("reload", check=False)
        return done.stdout or done.stderr

    config.write_text(f'policy = "{mine}"\ngrace_ms = 0\npin_share = 0.25\n')
    mine.write_text("def rank(files, gaps):\n    return files.num_pages\n")
    daemon = start_small("--config", str(config))
    assert daemon.stat()["tiers"]["policy"] == str(mine)
    assert reload('policy = "lru"\n') == "changed: policy, grace_ms, pin_share\n"
    assert "nothing is changed: policy" in reload(f'policy = "{mine}"\n', "raise SystemExit('not today')")
    assert "can't become none" in reload('policy = "none"\n')
    assert "No such file" in reload(f'policy = "{tmp_path}/none.py"\n')
    assert daemon.stat()["tiers"]["policy"] == "lru"
    failing = "return files.num_pages if len(files) < 3 else 1 / 0"
    assert reload(f'policy = "{mine}"\n', failing) == "changed: policy\n"
    for number in range(8):
        make(f"{number}.kv")
    assert "ZeroDivisionError" in daemon.symphony("stat").stdout
    assert daemon.log.read_text().count("ZeroDivisionError") == 1
