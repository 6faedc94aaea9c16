"""Tiers in the view of users and programs, on a daemon with little memory: attributes, advice, pressure, figures."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
import time

import anyio
import pytest

import libsym as sym
from tests.symphony.daemons import Daemon

NUM_FRAMES = 128
"""Pages of the tiny model that fit into 1 MiB."""
LARGE = 1000
"""Tokens, in 32 pages: four such files fill memory."""
WITHIN_S = 20


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
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    daemon = Daemon(tmp_path_factory.mktemp("daemon"), "--model", "tiny", "--kv-memory", "1M")
    try:
        daemon.mount.chmod(0o777)
        for directory in (daemon.mount.parent, *daemon.mount.parent.parents[:2]):
            directory.chmod(0o755)
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()
    finally:
        daemon.clean_up()


@pytest.fixture
def small(shared, monkeypatch):
    """The daemon of the module, without any file."""
    monkeypatch.setenv("SYMPHONY_SOCKET", str(shared.socket))
    sym.connect(str(shared.socket))
    yield shared
    for path in shared.mount.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    sym.daemon_check()
    sym.close()


def make(name, num_tokens=LARGE):
    with sym.kv_create(name) as kv:
        sym.kv_write(kv, [1 + number % 200 for number in range(num_tokens)])


def get(daemon, name, attribute):
    return os.getxattr(daemon.mount / name, f"user.kv.{attribute}").decode()


def put(daemon, name, attribute, value):
    os.setxattr(daemon.mount / name, f"user.kv.{attribute}", value.encode())


def tier(daemon, name):
    return get(daemon, name, "tier")


def until(check):
    """Poll for a change that the daemon makes after a call."""
    end_s = time.monotonic() + WITHIN_S
    while not check():
        assert time.monotonic() < end_s, "it does not come about"
        time.sleep(0.01)


def next_row(name):
    with sym.kv_open(name) as kv, kv.fork() as fork:
        return list(sym.pred(fork, [5]).logits)


# ---- the attribute


def test_a_file_goes_to_disk_and_comes_back_as_its_attribute_says(small):
    make("a.kv")
    before = next_row("a.kv")
    assert tier(small, "a.kv") == "memory"
    small.shell(f"setfattr -n user.kv.tier -v disk {small.mount}/a.kv")
    assert tier(small, "a.kv") == "disk"
    stat = sym.kv_stat("a.kv")
    assert (stat.tier, stat.memory_pages, stat.pages) == ("disk", 0, 32)
    put(small, "a.kv", "tier", "memory")
    assert sym.kv_stat("a.kv").memory_pages == 32
    put(small, "a.kv", "tier", "disk")
    assert next_row("a.kv") == before
    assert tier(small, "a.kv") == "memory", "what computes with it has brought it"
    shown = small.shell(f"getfattr -d {small.mount}/a.kv").stdout
    assert 'user.kv.tier="memory"' in shown


def test_reading_an_image_or_a_text_brings_nothing_into_memory(small):
    make("a.kv")
    put(small, "a.kv", "tier", "disk")
    assert len((small.mount / "a.kv").read_bytes()) == sym.kv_stat("a.kv").size
    assert (small.mount / ".symphony" / "text" / "a.kv").read_bytes()
    assert tier(small, "a.kv") == "disk"


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
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        put(small, name, "tier", value)
    assert caught.value.errno == code
    assert tier(small, "a.kv") == "memory"


def test_a_file_larger_than_memory_can_not_come_into_it(start_small):
    daemon = start_small(kv_memory="1M")
    make("large.kv", 3200)
    sym.close()
    assert daemon.stop() == 0
    small = start_small(kv_memory="512K")
    with pytest.raises(OSError, match="No space") as caught:
        put(small, "large.kv", "tier", "memory")
    assert caught.value.errno == errno.ENOSPC


def test_a_signal_ends_the_wait_for_a_file_that_is_computed_with(small):
    make("a.kv", 100)
    with sym.kv_open("a.kv", "rw") as kv, sym.generate(kv, [1], max_tokens=3900, stop_at_end=False) as generation:
        next(generation)
        process = subprocess.Popen(
            ["setfattr", "-n", "user.kv.tier", "-v", "disk", str(small.mount / "a.kv")], stderr=subprocess.PIPE
        )
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(5)
        process.stderr.close()
        generation.cancel()
    put(small, "a.kv", "tier", "disk")
    assert tier(small, "a.kv") == "disk"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user has to try")
def test_only_the_owner_sets_it(small):
    with sym.kv_create("a.kv", mode=0o666) as kv:
        sym.kv_write(kv, [1] * 40)
    done = small.shell(["setpriv", "--reuid=1234", "--clear-groups", "setfattr", "-n", "user.kv.tier", "-v", "disk",
                        str(small.mount / "a.kv")], check=False)  # fmt: skip
    assert "not permitted" in done.stderr
    assert tier(small, "a.kv") == "memory"


# ---- advice


def test_cold_goes_first_and_the_pinned_stays(small):
    for name in ("pinned.kv", "cold.kv", "other.kv"):
        make(name)
    sym.kv_advise("pinned.kv", sym.PIN)
    make("last.kv", 800)
    sym.kv_advise("cold.kv", sym.COLD)
    until(lambda: tier(small, "cold.kv") == "disk")
    for number in range(6):
        make(f"{number}.kv")
    assert tier(small, "pinned.kv") == "memory"
    assert tier(small, "other.kv") == "disk"
    assert int(get(small, "pinned.kv", "pinned")) == 1


def test_willneed_brings_what_is_on_disk(small):
    make("a.kv")
    put(small, "a.kv", "tier", "disk")
    sym.kv_advise("a.kv", sym.WILLNEED)
    until(lambda: tier(small, "a.kv") == "memory")


def test_what_has_a_lower_priority_goes_first(small):
    for name, priority in (("low.kv", -5), ("high.kv", 5)):
        make(name)
        sym.kv_advise(name, sym.PRIORITY(priority))
    next_row("low.kv")  # which was used last
    for number in range(2):
        make(f"{number}.kv")
    until(lambda: tier(small, "low.kv") != "memory")
    assert tier(small, "high.kv") == "memory"


def test_a_lease_ends_by_itself(small):
    make("a.kv", 40)
    sym.kv_advise("a.kv", sym.TTL(0.1), sym.PIN(2.5))
    stat = sym.kv_stat("a.kv")
    assert stat.pinned
    assert 0 < stat.lease_s <= 2.5
    time.sleep(0.3)
    assert sym.kv_stat("a.kv").pinned
    until(lambda: not sym.kv_list())


def test_a_lease_can_become_a_pin_for_good_and_be_taken_back(small):
    make("a.kv", 40)
    sym.kv_advise("a.kv", sym.PIN(0.2))
    sym.kv_advise("a.kv", sym.PIN)
    time.sleep(0.3)
    assert sym.kv_stat("a.kv").pinned
    assert sym.kv_stat("a.kv").lease_s == 0
    sym.kv_advise("a.kv", sym.UNPIN)
    assert not sym.kv_stat("a.kv").pinned
    put(small, "a.kv", "tier", "disk")


def test_no_more_may_be_pinned_than_the_daemon_says(start_small):
    daemon = start_small("--pin-share", "0.5")
    for name in ("a.kv", "b.kv", "c.kv"):
        make(name)
    sym.kv_advise("a.kv", sym.PIN)
    sym.kv_advise("b.kv", sym.PIN)
    with pytest.raises(sym.NoSpace, match="pinned"):
        sym.kv_advise("c.kv", sym.PIN)
    assert not sym.kv_stat("c.kv").pinned
    sym.kv_advise("b.kv", sym.UNPIN)
    sym.kv_advise("c.kv", sym.PIN)
    assert daemon.stat()["tiers"]["num_kept"] == 64


@pytest.mark.skipif(os.geteuid() != 0, reason="another user has to pin")
def test_one_user_may_pin_half_of_that(small):
    said = small.run(
        """
        os.setuid(1234)
        for name in ("x.kv", "y.kv"):
            with sym.kv_create(name) as kv:
                sym.kv_write(kv, [1] * 1000)
        sym.kv_advise("x.kv", sym.PIN)
        try:
            sym.kv_advise("y.kv", sym.PIN)
        except sym.OverQuota as error:
            print(error)
        """
    )
    assert "uid 1234 would have 64 pages pinned, and 32 is the most" in said


def test_a_pinned_file_that_grows_does_not_keep_others_out_for_ever(small):
    """Pages that the file has grown by beyond the share may go down as any other page."""
    with sym.kv_create("grows.kv") as kv:
        sym.kv_write(kv, [1] * 100)
        sym.kv_advise(kv, sym.PIN)
        sym.kv_write(kv, [1] * 3000)
    for number in range(4):
        make(f"{number}.kv", 1500)
    assert tier(small, "grows.kv") in {"mixed", "disk"}
    assert sym.kv_stat("grows.kv").memory_pages >= 4, "what was pinned"


def test_advice_that_is_kept_has_its_effect_after_a_restart(start_small):
    daemon = start_small()
    make("pinned.kv")
    make("leased.kv")
    sym.kv_advise("pinned.kv", sym.PIN, sym.PRIORITY(7))
    sym.kv_advise("leased.kv", sym.PIN(1000))
    sym.close()
    assert daemon.stop() == 0
    daemon = start_small()
    until(lambda: tier(daemon, "pinned.kv") == "memory")
    assert (sym.kv_stat("pinned.kv").pinned, sym.kv_stat("pinned.kv").priority) == (True, 7)
    assert not sym.kv_stat("leased.kv").pinned
    for number in range(6):
        make(f"{number}.kv")
    assert tier(daemon, "pinned.kv") == "memory"
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        put(daemon, "pinned.kv", "tier", "disk")


# ---- pressure


def test_a_program_hears_what_is_about_to_go_and_what_it_removes_is_enough(start_small):
    daemon = start_small("--grace-ms", "20000")
    for name in ("old.kv", "new.kv", "newest.kv"):
        make(name)
    removed = []

    def make_room():
        pressure = sym.kv_pressure(timeout=WITHIN_S)
        removed.append(pressure)
        sym.kv_remove("new.kv")

    thread = threading.Thread(target=make_room)
    thread.start()
    until(lambda: "waiting for pressure" in daemon.symphony("ps").stdout)
    began_s = time.monotonic()
    make("more.kv", 1500)
    took_s = time.monotonic() - began_s
    thread.join()
    (pressure,) = removed
    assert pressure.kind == "memory"
    assert 0 < pressure.grace_s <= 20
    assert pressure.wanted_bytes > 0
    first = pressure.candidates[0]
    assert (first.path, first.tokens, first.pinned, first.priority) == ("old.kv", LARGE, False, 0)
    assert first.memory_bytes == first.freed_bytes > 0
    assert first.bring_s > 0
    assert first.idle_s > 0
    assert tier(daemon, "old.kv") == "memory", "the program has made room in another way"
    assert took_s < 15, "nobody waits for longer than it takes"
    sym.daemon_check()


def test_a_file_can_be_shrunk_within_the_grace_although_memory_is_full(start_small):
    daemon = start_small("--grace-ms", "20000")
    make("large.kv", 2 * LARGE)
    make("other.kv")
    shrunk = []

    def shrink():
        assert sym.kv_pressure(timeout=WITHIN_S).kind == "memory"
        with sym.kv_open("large.kv") as kv, sym.kv_extract(kv, [(0, 32), (40, 2 * LARGE - 100)]) as part:
            shrunk.append(len(part))  # 60 pages, and fewer are free
        sym.kv_remove("large.kv")

    thread = threading.Thread(target=shrink)
    thread.start()
    until(lambda: "waiting for pressure" in daemon.symphony("ps").stdout)
    began_s = time.monotonic()
    make("more.kv", 1500)
    took_s = time.monotonic() - began_s
    thread.join()
    assert shrunk == [2 * LARGE - 108]
    assert took_s < 15, "an extract that waits behind who needs the room ends with the grace"
    sym.daemon_check()


def test_who_does_not_react_costs_others_one_grace(start_small):
    daemon = start_small("--grace-ms", "1000")
    for number in range(3):
        make(f"{number}.kv")
    graces_s = []

    def listen():
        with contextlib.suppress(sym.NotConnected):
            while True:
                graces_s.append(sym.kv_pressure().grace_s)

    thread = threading.Thread(target=listen)
    thread.start()
    until(lambda: "waiting for pressure" in daemon.symphony("ps").stdout)
    began_s = time.monotonic()
    make("more.kv", 1500)
    first_s = time.monotonic() - began_s
    began_s = time.monotonic()
    for number in range(3, 6):
        make(f"{number}.kv")
        time.sleep(0.3)  # another event
    others_s = time.monotonic() - began_s - 3 * 0.3
    sym.close()
    thread.join()
    assert first_s >= 0.9
    assert others_s < 2.5, "three graces would be three seconds"
    assert graces_s[0] > 0.9
    assert graces_s[1:]
    assert not any(graces_s[1:]), "it is told, and not waited for"


def test_a_loop_of_tasks_hears_it_too(start_small):
    start_small("--grace-ms", "100")
    for number in range(3):
        make(f"{number}.kv")

    async def main():
        heard = []

        async def listen():
            heard.append(await sym.aio.kv_pressure(timeout=WITHIN_S))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.sleep(0.1)
            async with await sym.aio.kv_create("more.kv") as kv:
                await sym.aio.kv_write(kv, [1] * 1500)
        assert heard[0].kind == "memory"
        with pytest.raises(sym.WouldBlock):
            await sym.aio.kv_pressure(timeout=0)

    anyio.run(main)


def test_a_quota_that_is_nearly_full_is_told_of(small):
    (small.mount / "key").mkdir()
    os.setxattr(small.mount / "key", "user.kv.quota", b"100K")  # twelve pages
    said = small.run(
        """
        sym.connect(domain="key")
        with sym.kv_create("a.kv") as kv:
            sym.kv_write(kv, [1] * 32 * 9)
            try:
                sym.kv_pressure(timeout=0)
            except sym.WouldBlock:
                print("room")
            threading.Timer(0.2, sym.kv_write, (kv, [1] * 96)).start()
            pressure = sym.kv_pressure(timeout=20)
            print(pressure.kind, [(each.path, kv.handle in each.handles) for each in pressure.candidates])
        """
    )
    assert said == "room\nquota [('a.kv', True)]\n"


# ---- figures and configuration


def test_a_call_on_a_cold_file_is_counted(small):
    make("a.kv")
    put(small, "a.kv", "tier", "disk")
    before = small.stat()["tiers"]
    next_row("a.kv")
    after = small.stat()["tiers"]
    assert after["num_in"] - before["num_in"] == 32
    told = dict(
        line.rsplit(" ", 1)
        for line in (small.mount / ".symphony" / "metrics").read_text().splitlines()
        if not line.startswith("#")
    )
    assert int(told["symphony_frames"]) == NUM_FRAMES
    assert int(told['symphony_pages_moved_total{way="in"}']) == after["num_in"]
    assert "memory   " in small.symphony("stat").stdout
    assert "in use" in small.symphony("stat").stdout


def test_the_policy_is_a_file_of_the_operators_and_changes_with_the_configuration(start_small, tmp_path):
    mine, config = tmp_path / "mine.py", tmp_path / "symphony.toml"
    mine.write_text("def rank(files, gaps):\n    return files.num_pages\n")
    config.write_text(f'policy = "{mine}"\ngrace_ms = 0\npin_share = 0.25\n')
    daemon = start_small("--config", str(config))
    assert daemon.stat()["tiers"]["policy"] == str(mine)
    config.write_text('policy = "lru"\n')
    assert daemon.symphony("reload").stdout == "changed: policy, grace_ms, pin_share\n"
    assert daemon.stat()["tiers"]["policy"] == "lru"
    mine.write_text("def rank(files):\n    return 1\n")
    config.write_text(f'policy = "{mine}"\n')
    assert "nothing is changed: policy" in daemon.symphony("reload", check=False).stderr
    config.write_text('policy = "none"\n')
    assert "can't become none" in daemon.symphony("reload", check=False).stderr
    assert daemon.stat()["tiers"]["policy"] == "lru"


def test_a_reload_reads_the_file_of_a_policy_again(start_small, tmp_path):
    mine, config = tmp_path / "mine.py", tmp_path / "symphony.toml"
    mine.write_text("def rank(files, gaps):\n    return files.num_pages\n")
    config.write_text(f'policy = "{mine}"\n')
    daemon = start_small("--config", str(config))
    assert daemon.symphony("reload").stdout == "changed: nothing\n"
    mine.write_text("raise SystemExit('not today')\n")
    config.write_text(f'policy = "{mine}"\ngrace_ms = 7\n')
    refused = daemon.symphony("reload", check=False).stderr
    assert "nothing is changed: policy" in refused
    assert ":1: SystemExit: not today" in refused
    mine.write_text("def rank(files, gaps):\n    return files.num_uses\n")
    assert daemon.symphony("reload").stdout == "changed: policy, grace_ms\n"


def test_a_reload_to_a_policy_that_is_not_there_leaves_the_one_whose_file_has_gone(start_small, tmp_path):
    mine, config = tmp_path / "mine.py", tmp_path / "symphony.toml"
    mine.write_text("def rank(files, gaps):\n    return files.num_pages\n")
    config.write_text(f'policy = "{mine}"\n')
    daemon = start_small("--config", str(config))
    mine.unlink()
    config.write_text(f'policy = "{tmp_path}/none.py"\n')
    assert "No such file" in daemon.symphony("reload", check=False).stderr
    assert daemon.stat()["tiers"]["policy"] == str(mine)


def test_a_policy_that_fails_is_replaced_and_told_of(start_small, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def rank(files, gaps):\n    return files.num_pages if len(files) < 3 else 1 / 0\n")
    daemon = start_small("--policy", str(mine))
    for number in range(8):
        make(f"{number}.kv")
    assert "ZeroDivisionError" in daemon.symphony("stat").stdout
    assert daemon.log.read_text().count("ZeroDivisionError") == 1
