"""Quotas and domains on a real daemon: many users and threads at their limits, connections confined to a domain."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import libsym as sym
from symphony.settings.loading import load

pytestmark = pytest.mark.slow

ANN, BOB = 12345, 12346
AS_USER = "uid = int(sys.argv[1]); os.setgroups([]); os.setgid(uid); os.setuid(uid)\n"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO QUOTAS OF USERS TESTED: other users need root")


@pytest.fixture
def open_to_all(tmp_path):
    """Other users' programs reach the socket."""
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory != Path("/tmp"):
            directory.chmod(0o755)


def page_bytes(daemon):
    return daemon.stat()["page_bytes"]


LIMITS = (
    AS_USER
    + """
def refused(call):
    try:
        call()
    except sym.OverQuota as error:
        return error.errno
kv = sym.kv_create()
per_page = sym.model_info().page_entries
limit = sym.daemon_stat()["quota_bytes"] // sym.daemon_stat()["page_bytes"]
sym.kv_write(kv, [1] * limit * per_page)
said = [refused(lambda: sym.pred(kv, [1])), refused(lambda: sym.kv_write(sym.kv_create(), [1]))]
forks = [sym.kv_fork(kv) for _ in range(3)]
said.append(refused(lambda: sym.kv_fork(kv)))
used = sym.daemon_stat()
sym.kv_truncate(forks[0], 10)
said.append(refused(lambda: sym.kv_write(forks[0], [1])))
del forks, kv
again = sym.kv_create()
length = sym.kv_write(again, [2] * limit * per_page)
print([said, used["used_files"], used["quota_files"], used["used_bytes"] == used["quota_bytes"], length // per_page])
"""
)


@needs_root
def test_each_user_has_a_quota_and_root_has_none(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota", "64K", "--quota-files", "4")
    pages = (64 << 10) // page_bytes(daemon)
    first = json.loads(daemon.run(LIMITS, str(ANN)).replace("True", "true").replace("None", "null"))
    assert first == [[errno.EDQUOT, errno.EDQUOT, errno.EDQUOT, errno.EDQUOT], 4, 4, True, pages]
    assert daemon.run(f"kv = sym.kv_create(); print(sym.kv_write(kv, [1] * {pages + 1} * 32))")
    shown = daemon.run(f"from symphony.cli import main\n{AS_USER}main(['stat'])", str(ANN))
    assert "\nyours    0 of 64K, 0 of 4 files\n" in shown
    stat = daemon.stat()
    assert (stat["quota_bytes"], stat["quota_files"]) == (None, None)
    assert stat["num_free_pages"] == stat["num_pages"]
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


STORM = (
    AS_USER
    + """
refusals, errors = [0] * 8, []
def work(number):
    try:
        for turn in range(int(sys.argv[2])):
            kv = sym.kv_create(f"{os.getpid()}-{number}.kv" if turn % 2 else None)
            try:
                for _ in range(6):
                    sym.kv_write(kv, [number] * 100)
                    fork = sym.kv_fork(kv)
                    sym.kv_write(fork, [turn])
            except sym.OverQuota:
                refusals[number] += 1
            sym.kv_remove(kv)
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
print(min(refusals), sum(refusals))
"""
)
NEIGHBOUR = (
    AS_USER
    + """
kv = sym.kv_create()
print("ready", flush=True)
count = 0
while not os.path.exists(sys.argv[2]):
    sym.pred(kv, [1])
    if len(kv) == 64:
        sym.kv_truncate(kv, 0)
    count += 1
print(count)
"""
)


@needs_root
def test_a_storm_of_writers_at_their_quota_is_refused_at_once_and_hurts_nobody_else(
    start_daemon, open_to_all, tmp_path
):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota", "128K", "--quota-files", "20")
    daemon.mount.chmod(0o777)
    over = tmp_path / "over"
    neighbour = daemon.program(NEIGHBOUR, str(BOB), str(over))
    assert neighbour.stdout.readline() == "ready\n"
    storms = [daemon.program(STORM, str(ANN), "40") for _ in range(2)]
    for storm in storms:
        out, err = storm.communicate(timeout=100)
        assert storm.returncode == 0, err
        least, total = map(int, out.split())
        assert least > 0
        assert total > 100
    length = (128 << 10) // page_bytes(daemon) * 32
    assert daemon.run(f"{AS_USER}print(sym.kv_write(sym.kv_create(), [1] * {length}))", str(ANN)) == f"{length}\n"
    over.touch()
    out, err = neighbour.communicate(timeout=60)
    assert neighbour.returncode == 0, err
    assert int(out) > 0
    assert not list(daemon.mount.iterdir())
    stat = daemon.stat()
    assert stat["num_free_pages"] == stat["num_pages"]
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


CONFINED = """
sym.connect(domain=sys.argv[1])
kv = sym.kv_create("a.kv")
sym.kv_write(kv, [1, 2, 3])
print([entry.name for entry in sym.kv_list()])
for path in ("../out.kv", sys.argv[2] + "/out.kv", ".."):
    try:
        sym.kv_stat(path)
    except sym.CrossDevice:
        print("refused")
sym.connect()
print(sym.kv_stat(sys.argv[2] + "/" + sys.argv[1] + "/a.kv").tokens)
anonymous = sym.kv_create()
sym.kv_write(anonymous, [1] * 64)
stat = sym.daemon_stat()
print(stat["used_bytes"] // stat["page_bytes"], stat["used_files"], stat["quota_bytes"])
sys.stdout.flush()
if os.fork() == 0:
    print("child", [entry.name for entry in sym.kv_list()], flush=True)
    os._exit(0)
os.wait()
sym.close()
print("closed", sorted(entry.name for entry in sym.kv_list()))
"""


def domain(daemon, name, size):
    (daemon.mount / name).mkdir()
    subprocess.run(["setfattr", "-n", "user.kv.quota", "-v", size, daemon.mount / name], check=True)


def test_a_program_confines_its_connection_to_a_domain_and_so_does_its_child(daemon):
    domain(daemon, "key1", "1M")
    daemon.run("sym.kv_create('out.kv')")
    assert daemon.run(CONFINED, "key1", str(daemon.mount)).splitlines() == [
        "['a.kv']",
        "refused",
        "refused",
        "refused",
        "3",
        "3 2 1048576",
        "child ['a.kv']",
        "closed ['key1', 'out.kv']",
    ]
    assert os.getxattr(daemon.mount / "key1", "user.kv.used_files") == b"1"
    daemon.shell(f"rm -r {daemon.mount}/key1 {daemon.mount}/out.kv")


REFUSED = """
def why(call):
    try:
        call()
        return "nothing"
    except sym.SymError as error:
        return f"{error.errno} {error}"
if sys.argv[2] != "0":
    uid = int(sys.argv[2]); os.setgroups([]); os.setgid(uid); os.setuid(uid)
print(why(lambda: sym.connect(domain=sys.argv[1])))
print(why(lambda: sym.kv_list()))
"""


def test_why_a_connection_is_not_confined_is_said_and_leaves_none_behind(daemon):
    (daemon.mount / "plain").mkdir()
    domain(daemon, "key1", "1M")
    lips = daemon.stat()["lips"]
    for path, code, reason in (
        ("none", errno.ENOENT, "no such file"),
        ("plain", errno.EINVAL, "is no domain: make it one while it is empty"),
        ("..", errno.EXDEV, "leaves the mount"),
    ):
        first, second = daemon.run(REFUSED, path, "0").splitlines()
        assert first.startswith(f"{code} ")
        assert reason in first
        assert second == "nothing", "the next call makes a connection that is not confined"
    assert daemon.stat()["lips"] == lips
    daemon.shell(f"rmdir {daemon.mount}/plain {daemon.mount}/key1")


@needs_root
def test_only_its_owner_is_confined_to_a_domain(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    domain(daemon, "key1", "1M")
    daemon.mount.chmod(0o755)
    assert daemon.run(REFUSED, "key1", str(ANN)).startswith(f"{errno.EPERM} ")


def test_forks_and_removes_by_many_threads_lose_nothing(pytestconfig):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO SOAK: /dev/fuse is missing or not open to this user")
    script = pytestconfig.rootpath / "scripts/soak/forks.py"
    done = subprocess.run(
        [sys.executable, script, "--json", "--count", "4000"], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["free_pages_after"] == result["free_pages_before"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--quota", "much", "is no size"),
        ("--quota-files", "0", "at least 1"),
        ("--quota", "0", "more than nothing"),
    ],
)
def test_a_quota_that_is_none_is_refused_at_start(tmp_path, option, value, message):
    words = ["serve", "--model", "tiny", "--mount", tmp_path / "kv", "--state", tmp_path / "state", option, value]
    done = subprocess.run(
        [sys.executable, "-m", "symphony", *words], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["2"], "USER=N"),
        (["nobody-of-this-name=2"], "no such user"),
        (["-1=2"], "no such user"),
        ([f"{1 << 32}=2"], "no such user"),
        (["0=much"], "is no weight"),
        (["0="], "is no weight"),
        (["1=1", "0=101"], "0.01 to 100"),
        ({"root": True}, "is no weight"),
        (2, "table of users"),
    ],
    ids=str,
)
def test_a_weight_that_is_none_is_refused_at_start(weights, message):
    with pytest.raises(sym.Invalid, match=message):
        load(None, {"weight": weights})


def test_weights_of_users_are_told_and_those_of_domains_outlive_the_daemon(start_daemon, tmp_path):
    config = tmp_path / "symphony.toml"
    config.write_text('model = "tiny"\nkv_memory = "8M"\n[weight]\n1000 = 4\nroot = 0.5\n')
    me = f"{os.geteuid()}=2.5"
    daemon = start_daemon("--config", str(config), "--weight", me, "--weight", "1001=3")
    assert daemon.stat()["weight"] == 2.5, "the command line's words are over the file's"
    domain(daemon, "key1", "1M")
    subprocess.run(["setfattr", "-n", "user.kv.weight", "-v", "0.25", daemon.mount / "key1"], check=True)
    ask = "sym.connect(domain='key1'); print(sym.daemon_stat()['weight'])"
    assert daemon.run(ask) == "0.25\n"
    assert daemon.stop() == 0
    daemon = start_daemon("--config", str(config))
    assert daemon.run(ask) == "0.25\n"
    assert daemon.stat()["weight"] == (0.5 if os.geteuid() == 0 else 1)


@needs_root
def test_attributes_and_names_count_and_large_ones_are_read_from_disk(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota", "256K")
    daemon.mount.chmod(0o1777)
    code = """
os.chdir(sys.argv[2])
def code_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
large, found = os.urandom(60_000), []
for number in range(8):
    open(f"f{number}", "w").close()
    found.append(code_of(os.setxattr, f"f{number}", "user.x", large))
print(found)
os.setxattr("f0", "user.y", b"1")
descriptor = os.open("f0", os.O_RDONLY)
print("ready", flush=True)
sys.stdin.readline()
assert os.getxattr("f0", "user.x") == large and os.getxattr(descriptor, "user.y") == b"1"
assert os.listxattr("f0") == ["user.x", "user.y"]
print([code_of(os.setxattr, "f0", "user.y", b"2", os.XATTR_CREATE), code_of(os.getxattr, "f0", "user.z")])
os.setxattr("f0", "user.y", b"2", os.XATTR_REPLACE)
assert os.getxattr("f0", "user.y") == b"2"
os.unlink("f0")
print("ready", flush=True)
sys.stdin.readline()
assert os.getxattr(descriptor, "user.x") == large
os.close(descriptor)
os.setxattr("f7", "user.x", large)
os.removexattr("f7", "user.x")
print(code_of(os.getxattr, "f7", "user.x"), code_of(os.symlink, "t" * 4000, "link"), os.readlink("link") == "t" * 4000)
"""
    command = [sys.executable, "-c", "import errno, os, sys\n" + AS_USER + code, str(ANN), daemon.mount]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/") as process:
        assert process.stdout.readline() == f"{[None] * 4 + ['EDQUOT'] * 4}\n"
        for _ in range(2):
            while (line := process.stdout.readline()) != "ready\n":
                assert line == "['EEXIST', 'ENODATA']\n"
            daemon.symphony("sync")
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.readline() == "ENODATA None True\n"
    assert process.returncode == 0
    sym.connect(str(daemon.socket))
    sym.daemon_check()
    sym.close()


@needs_root
def test_attributes_fill_no_quota_of_memory_beyond_the_next_commit(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota-memory", "1M")
    daemon.mount.chmod(0o1777)
    code = """
os.chdir(sys.argv[2])
for number in range(32):
    open(f"f{number}", "w").close()
for number in range(32):
    os.setxattr(f"f{number}", "user.x", bytes(60_000))
"""
    subprocess.run([sys.executable, "-c", "import os, sys\n" + AS_USER + code, str(ANN), daemon.mount], check=True)


FILLS = (
    AS_USER
    + """
import errno
mine, said = sys.argv[2] + "/mine", []
os.mkdir(mine)
sym.kv_create("mine/a.kv").close()

def until_refused(one):
    kept = []
    try:
        while True:
            kept.append(one())
    except OSError as error:
        assert error.errno == errno.EDQUOT, error
        said.append(str(error))
    return kept

handles = until_refused(lambda: sym.kv_open("mine/a.kv"))
stat = sym.daemon_stat()
[user] = stat["users"]
assert user["uid"] == uid and user["holds"]["handles"] == len(handles) > 100, user
assert user["quota_memory"] - 8192 < user["memory_bytes"] <= user["quota_memory"], user
for each in handles:
    each.close()
readers = until_refused(lambda: open(mine + "/a.kv", "rb"))
scans = until_refused(lambda: os.scandir(mine))
topics = until_refused(lambda: sym.subscribe(os.urandom(8).hex()))
texts = until_refused(lambda: open(f"{sys.argv[2]}/.symphony/text/mine/{os.urandom(8).hex()}.kv", "w"))
found = len(scans), len(topics), len(texts)
assert len(readers) > 200 and not scans and len(topics) < 4 and not texts, (len(readers), *found)
for each in readers:
    each.close()
names = until_refused(lambda: os.mknod(f"{mine}/{os.urandom(8).hex()}"))
for name in os.listdir(mine):
    os.unlink(f"{mine}/{name}")
print(said[0].partition(":")[0], len(names) > 50, flush=True)
plain = until_refused(lambda: open(f"{mine}/{os.urandom(8).hex()}", "w"))
assert len(plain) == int(sys.argv[3]) // 8, len(plain)
plain.clear()
readers = [os.open(mine, os.O_RDONLY) for _ in range(3)]
print("held", flush=True)
sys.stdin.readline()
"""
)


@needs_root
def test_each_user_fills_so_much_memory_can_clean_up_and_is_named_to_root_alone(start_daemon, open_to_all):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M", "--quota-memory", "1M", "--allow-other")
    daemon.mount.chmod(0o1777)
    most = 400
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (most, most))
    held = daemon.program(FILLS, str(ANN), str(daemon.mount), str(most))
    try:
        said = held.stdout.readline()
        assert said == f"uid {ANN} is at its quota of 1048576 bytes of the daemon's memory True\n", held.stderr.read()
        assert held.stdout.readline() == "held\n"
        users = {user["uid"]: user for user in daemon.stat()["users"]}
        assert users[ANN]["holds"]["opens"] == 3
        assert users[ANN]["quota_memory"] == 1 << 20
        assert users[0]["quota_memory"] is None
        seen = f"from symphony.cli import main\n{AS_USER}main(['stat'])"
        shown = [line for line in daemon.run(seen, str(BOB)).splitlines() if line.startswith("user ")]
        assert len(shown) == 1
        assert shown[0].startswith(f"user     {BOB}: 0 of files, 128K of 1.0M of memory (1 connections")
        assert f"\nuser     {ANN}: 0 of files" in daemon.run(seen, "0")
    finally:
        held.communicate()
    assert ANN not in {user["uid"] for user in daemon.stat()["users"] if user["holds"].keys() - {"files"}}
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()
