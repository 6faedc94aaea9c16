"""Quotas and domains on a real daemon: users at their limits, connections confined to a domain, weights.

`tests/kvfs` proves what counts: test_accounts.py, test_domains.py, test_holdings.py, durable/test_xattrs.py.
"""

import errno
import json
import os
import re
import resource

import pytest

import libsym as sym
from tests.symphony.launchers import eventually
from tests.symphony.services import as_user

ANN, BOB = 12345, 12346

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO QUOTAS OF USERS TESTED: other users need root")


def stat_of(uid):
    return "from symphony.cli import main\n" + as_user(uid, "main(['stat'])")


LIMITS = """
def refused(call):
    try: call()
    except sym.OverQuota as error:
        said.append(str(error))
        return error.errno
kv, said = sym.kv_create(), []
stat, per_page = sym.daemon_stat(), sym.model_info().page_entries
limit = stat["quota_bytes"] // stat["page_bytes"] * per_page
sym.kv_write(kv, [1] * limit)
codes = [refused(lambda: sym.pred(kv, [1])), refused(lambda: sym.kv_write(sym.kv_create(), [1]))]
forks = [sym.kv_fork(kv) for _ in range(3)]
codes.append(refused(lambda: sym.kv_fork(kv)))
used = sym.daemon_stat()
sym.kv_truncate(forks[0], 10)
codes.append(refused(lambda: sym.kv_write(forks[0], [1])))
del forks, kv
again = sym.kv_write(sym.kv_create(), [2] * limit)
whole = used["used_bytes"] == used["quota_bytes"]
print(json.dumps([codes, said, used["used_files"], used["quota_files"], whole, again == limit]))
"""


@needs_root
def test_each_user_has_a_quota_is_told_of_it_and_root_has_none(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota", "64K", "--quota-files", "4")
    codes, said, *facts = json.loads(daemon.run("import json\n" + as_user(ANN, LIMITS)))
    assert (codes, facts) == ([errno.EDQUOT] * 4, [4, 4, True, True])
    assert re.match(rf"uid {ANN} is at its quota of 65536 bytes: \d+ are used .*, \d+ more are wanted; ", said[0])
    assert "or have --quota raised" in said[0]
    assert daemon.run("print(sym.kv_write(sym.kv_create(), [1] * 4000))") == "4000\n"
    assert "\nyours    0 of 64K, 0 of 4 files\n" in daemon.run(stat_of(ANN))
    stat = daemon.stat()
    assert (stat["quota_bytes"], stat["quota_files"]) == (None, None)
    assert stat["num_free_pages"] == stat["num_pages"]


def domain(daemon, name, size):
    (daemon.mount / name).mkdir()
    os.setxattr(daemon.mount / name, "user.kv.quota", size)


CHILD = """
    sym.connect(domain="key1")
    sym.kv_list()
    if os.fork() == 0:
        print([entry.name for entry in sym.kv_list()], flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_program_confines_its_connection_to_a_domain_and_so_does_its_child(emptied):
    domain(emptied, "key1", b"1M")
    sym.kv_create("out.kv").close()
    sym.connect(domain="key1")
    with sym.kv_create("a.kv") as kv, sym.kv_create() as anonymous:
        sym.kv_write(kv, [1, 2, 3])
        for path in ("../out.kv", f"{emptied.mount}/out.kv", ".."):
            with pytest.raises(sym.CrossDevice):
                sym.kv_stat(path)
        sym.connect()  # and keeps what is there
        assert sym.kv_stat(f"{emptied.mount}/key1/a.kv").tokens == 3
        sym.kv_write(anonymous, [1] * 64)
        stat = sym.daemon_stat()
        assert (stat["used_bytes"] // stat["page_bytes"], stat["used_files"], stat["quota_bytes"]) == (3, 2, 1 << 20)
    assert emptied.run(CHILD) == "['a.kv']\n"
    sym.close()
    assert sorted(entry.name for entry in sym.kv_list()) == ["key1", "out.kv"]
    assert os.getxattr(emptied.mount / "key1", "user.kv.used_files") == b"1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "error", "reason"),
    [
        ("none", sym.NotFound, "no such file"),
        ("plain", sym.Invalid, "is no domain: make it one while it is empty"),
        ("..", sym.CrossDevice, "leaves the mount"),
    ],
)
def test_why_a_connection_is_not_confined_is_said_and_leaves_none_behind(emptied, path, error, reason):
    (emptied.mount / "plain").mkdir()
    sym.close()
    with pytest.raises(error, match=reason):
        sym.connect(domain=path)
    assert [entry.name for entry in sym.kv_list()] == ["plain"], "the next call's connection is not confined"
    assert eventually(lambda: sym.daemon_stat()["lips"] == 1)


def test_weights_of_users_are_told_and_those_of_domains_outlive_the_daemon(start_daemon, tmp_path):
    config = tmp_path / "symphony.toml"
    config.write_text('model = "tiny"\nkv_memory = "8M"\n[weight]\n1000 = 4\nroot = 0.5\n')
    daemon = start_daemon("--config", str(config), "--weight", f"{os.geteuid()}=2.5", "--weight", "1001=3")
    assert daemon.stat()["weight"] == 2.5, "the command line's words are over the file's"
    domain(daemon, "key1", b"1M")
    os.setxattr(daemon.mount / "key1", "user.kv.weight", b"0.25")
    ask = "sym.connect(domain='key1'); print(sym.daemon_stat()['weight'])"
    assert daemon.run(ask) == "0.25\n"
    assert daemon.stop() == 0
    daemon = start_daemon("--config", str(config))
    assert daemon.run(ask) == "0.25\n"
    assert daemon.stat()["weight"] == (0.5 if os.geteuid() == 0 else 1)


FILLS = """
import errno
mine, said = sys.argv[1] + "/mine", []
os.mkdir(mine)
sym.kv_create("mine/a.kv").close()

def until_refused(one):
    kept = []
    try:
        while True: kept.append(one())
    except OSError as error:
        assert error.errno == errno.EDQUOT, error
        said.append(str(error))
    return kept

handles = until_refused(lambda: sym.kv_open("mine/a.kv"))
[user] = sym.daemon_stat()["users"]
assert user["uid"] == os.getuid() and user["holds"]["handles"] == len(handles) > 100, user
assert user["quota_memory"] - 8192 < user["memory_bytes"] <= user["quota_memory"], user
for each in handles: each.close()
readers = until_refused(lambda: open(mine + "/a.kv", "rb"))
scans = until_refused(lambda: os.scandir(mine))
topics = until_refused(lambda: sym.subscribe(os.urandom(8).hex()))
texts = until_refused(lambda: open(f"{sys.argv[1]}/.symphony/text/mine/{os.urandom(8).hex()}.kv", "w"))
found = len(readers), len(scans), len(topics), len(texts)
assert found[0] > 200 and not scans and found[2] < 4 and not texts, found
for each in readers: each.close()
names = until_refused(lambda: os.mknod(f"{mine}/{os.urandom(8).hex()}"))
for name in os.listdir(mine): os.unlink(f"{mine}/{name}")
print(said[0].partition(":")[0], len(names) > 50, flush=True)
plain = until_refused(lambda: open(f"{mine}/{os.urandom(8).hex()}", "w"))
assert len(plain) == int(sys.argv[2]) // 8, len(plain)
plain.clear()
readers = [os.open(mine, os.O_RDONLY) for _ in range(3)]
print("held", flush=True)
sys.stdin.readline()
"""


@needs_root
def test_each_user_fills_so_much_memory_can_clean_up_and_is_named_to_root_alone(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota-memory", "1M", "--allow-other")
    daemon.mount.chmod(0o1777)
    most = 400
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (most, most))
    held = daemon.program(as_user(ANN, FILLS), str(daemon.mount), str(most))
    try:
        said = held.stdout.readline()
        assert said == f"uid {ANN} is at its quota of 1048576 bytes of the daemon's memory True\n", held.stderr.read()
        assert held.stdout.readline() == "held\n"
        users = {user["uid"]: user for user in daemon.stat()["users"]}
        assert (users[ANN]["holds"]["opens"], users[ANN]["quota_memory"]) == (3, 1 << 20)
        assert users[0]["quota_memory"] is None
        (shown,) = [line for line in daemon.run(stat_of(BOB)).splitlines() if line.startswith("user ")]
        assert shown.startswith(f"user     {BOB}: 0 of files, 128K of 1.0M of memory (1 connections")
        assert f"\nuser     {ANN}: 0 of files" in daemon.symphony("stat").stdout
    finally:
        held.communicate()
    assert ANN not in {user["uid"] for user in daemon.stat()["users"] if user["holds"].keys() - {"files"}}
