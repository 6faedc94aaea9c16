"""`.symphony` on the mount of a real daemon, as a shell sees it."""

import os
import random
import re
import shutil
import signal
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

import libsym as sym

HANDBOOK = "".join(f"Rule {number}: refunds take {number % 7} days. Grüße, 世界 🙂<eos>\n" for number in range(30))


@pytest.fixture
def kv(daemon):
    """The mount, for a shell: emptied afterwards."""
    yield daemon.mount
    daemon.shell(f"rm -rf -- {daemon.mount}/*")


@pytest.fixture
def text(kv):
    return kv / ".symphony" / "text"


@pytest.fixture
def connected(daemon, kv, monkeypatch):
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    sym.connect(str(daemon.socket))
    yield daemon
    sym.close()


@pytest.fixture
def handbook(tmp_path):
    path = tmp_path / "handbook.md"
    path.write_text(HANDBOOK)
    return path


def wait_for(condition):
    """Poll for a change by another process; the test's own timeout bounds the wait."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


# ---- the text view


@pytest.mark.slow
def test_a_document_becomes_a_context_by_cat_and_comes_back_by_cat(connected, text, handbook):
    connected.shell(f"cat {handbook} > {text}/handbook.kv")
    with sym.kv_open("handbook.kv") as kv:
        assert kv.read()[0] == sym.tokenize(HANDBOOK)
    assert connected.shell(f"cat {text}/handbook.kv").stdout == HANDBOOK
    assert (connected.mount / "handbook.kv").stat().st_mode & 0o7777 == 0o600


def test_a_written_context_answers_as_one_that_a_program_made(connected, text, handbook):
    connected.shell(f"cp {handbook} {text}/handbook.kv")
    question = sym.tokenize("How long?")
    with sym.kv_open("handbook.kv") as base, sym.kv_fork(base) as written, sym.kv_create() as made:
        sym.kv_write(made, sym.tokenize(HANDBOOK))
        ours, theirs = sym.pred(written, question), sym.pred(made, question)
        assert bytes(memoryview(ours.logits)) == bytes(memoryview(theirs.logits))


def test_the_usual_tools_read_texts(connected, text, handbook, tmp_path):
    (connected.mount / "docs").mkdir()
    (connected.mount / "plain.txt").write_text("refunds")
    connected.shell(f"cat {handbook} > {text}/docs/handbook.kv; echo nothing > {text}/other.kv")
    assert connected.shell(f"grep -rl refunds {text}").stdout.split() == [f"{text}/docs/handbook.kv"]
    assert connected.shell(f"wc -c < {text}/docs/handbook.kv").stdout.strip() == str(len(HANDBOOK.encode()))
    assert connected.shell(f"tail -n 1 {text}/docs/handbook.kv").stdout == HANDBOOK.splitlines(keepends=True)[-1]
    connected.shell(f"cp -r {text} {tmp_path}/out; cmp {tmp_path}/out/docs/handbook.kv {handbook}")
    connected.shell(f"tar cf {tmp_path}/text.tar -C {text} .")
    with tarfile.open(tmp_path / "text.tar") as archive:
        assert archive.extractfile("./docs/handbook.kv").read() == HANDBOOK.encode()
        assert "./plain.txt" not in archive.getnames()


def test_tail_follows_a_context_that_a_program_appends_to(connected, text):
    with sym.kv_create("log.kv") as kv:
        kv.write(sym.tokenize("first\n"))
        tail = subprocess.Popen(["tail", "-s", "0.01", "-f", text / "log.kv"], stdout=subprocess.PIPE)
        assert tail.stdout.readline() == b"first\n"
        kv.write(sym.tokenize("second\n"))
        assert tail.stdout.readline() == b"second\n"
        tail.kill()
        tail.communicate()


def test_text_is_computed_while_it_is_still_being_written(connected, text):
    writer = subprocess.Popen(["tee", text / "slow.kv"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    writer.stdin.write(b"so far so good\n")
    writer.stdin.flush()
    slow = connected.mount / "slow.kv"
    wait_for(lambda: slow.exists() and int(os.getxattr(slow, "user.kv.tokens")) >= 10)
    assert (text / "slow.kv").read_bytes().startswith(b"so far")
    writer.communicate(b"and on\n")
    assert writer.returncode == 0
    assert (text / "slow.kv").read_bytes() == b"so far so good\nand on\n"


def test_several_writers_of_one_redirection_make_one_text(connected, text):
    connected.shell(f"(printf 'one <b'; printf 'os> two'; cat /dev/null) > {text}/a.kv")
    with sym.kv_open("a.kv") as kv:
        assert kv.read()[0] == sym.tokenize("one <bos> two")


def test_two_redirections_append_and_one_replaces(connected, text):
    connected.shell(f"printf one > {text}/a.kv; printf ' two' >> {text}/a.kv")
    assert (text / "a.kv").read_bytes() == b"one two"
    before = (connected.mount / "a.kv").stat().st_ino
    connected.shell(f"printf three > {text}/a.kv")
    assert (text / "a.kv").read_bytes() == b"three"
    assert (connected.mount / "a.kv").stat().st_ino == before


def test_a_text_longer_than_the_context_fails_and_leaves_nothing(connected, kv, text, tmp_path):
    (tmp_path / "long.md").write_text("word " * 2000)
    failed = connected.shell(f"cp {tmp_path}/long.md {text}/long.kv", check=False)
    assert failed.returncode == 1
    assert "File too large" in failed.stderr
    assert os.listdir(kv) == []  # noqa: PTH208 - what a user sees
    assert connected.stat()["num_free_pages"] == connected.stat()["num_pages"]


def test_what_is_no_text_fails_and_leaves_nothing(connected, kv, text, tmp_path):
    for data in (b"a\xff", b"a\xc3"):
        (tmp_path / "data").write_bytes(data)
        failed = connected.shell(f"cat {tmp_path}/data > {text}/a.kv", check=False)
        assert failed.returncode != 0
        assert "Invalid argument" in failed.stderr
        assert not (kv / "a.kv").exists()
    assert "not UTF-8" in connected.log.read_text()


@pytest.mark.slow
def test_a_full_pool_fails_the_close(start_daemon):
    daemon = start_daemon("--model", "tiny:positions=20000", "--kv-memory", "1M", "--policy", "none")
    daemon.shell(f"head -c 2000 /dev/zero | tr '\\0' x > {daemon.mount}/plain")
    text = daemon.mount / ".symphony" / "text"
    daemon.shell(f"cat {daemon.mount}/plain > {text}/a.kv")
    failed = daemon.shell(f"cat {daemon.mount}/plain {daemon.mount}/plain > {text}/b.kv", check=False)
    assert failed.returncode != 0
    assert "No space left" in failed.stderr
    failed = daemon.shell(f"cat {daemon.mount}/plain {daemon.mount}/plain >> {text}/a.kv", check=False)
    assert "No space left" in failed.stderr
    assert (text / "a.kv").stat().st_size == 2000
    assert sorted(path.name for path in daemon.mount.iterdir()) == ["a.kv", "plain"]
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_writer_that_is_interrupted_leaves_nothing(connected, text, number):
    writer = subprocess.Popen(["tee", text / "a.kv"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    writer.stdin.write(b"half of the text")
    writer.stdin.flush()
    wait_for(lambda: (text / "a.kv").exists() and (text / "a.kv").stat().st_size > 5)
    writer.send_signal(number)
    writer.wait()
    writer.stdin.close()
    wait_for(lambda: not (connected.mount / "a.kv").exists())
    wait_for(lambda: connected.stat()["num_free_pages"] == connected.stat()["num_pages"])


@pytest.mark.slow
def test_a_cat_that_is_killed_around_its_open_leaves_nothing(connected, kv, text):
    """Standard input stays open, so no `cat` ever ends by itself: whatever has a name at the end is a fragment."""
    waits, keeps_open = os.pipe()
    chance = random.Random(4)
    spread_s = 0.012
    for number in range(300):
        child = os.fork()
        if not child:  # as a shell does it
            try:
                os.dup2(waits, 0)
                opened = os.open(text / f"{number}.kv", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(opened, 1)
                os.close(opened)
                os.execv("/bin/cat", ["cat"])
            finally:
                os._exit(1)
        threading.Event().wait(chance.random() * spread_s)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(waits)
    os.close(keeps_open)
    wait_for(lambda: not list(kv.iterdir()))


def test_a_program_keeps_what_a_redirection_replaces(connected, text):
    with sym.kv_create("a.kv") as kv:
        kv.write(sym.tokenize("old"))
        connected.shell(f"printf new > {text}/a.kv")
        assert kv.read()[0] == sym.tokenize("old")
        assert (text / "a.kv").read_bytes() == b"new"


def test_another_user_sees_and_writes_what_the_modes_allow(connected, kv, text):
    if os.geteuid() != 0:
        pytest.skip("other users need root")
    for directory in (kv.parent, *kv.parent.parents[:2]):
        directory.chmod(0o755)
    (kv / "shared").mkdir(mode=0o777)
    (kv / "shared").chmod(0o777)
    connected.shell(f"printf secret > {text}/shared/a.kv; printf public > {text}/shared/b.kv")
    (kv / "shared/b.kv").chmod(0o644)

    def run(command):
        return subprocess.run(
            ["sh", "-c", command], user=1234, group=1234, capture_output=True, text=True, check=False, cwd="/"
        )

    assert "Permission denied" in run(f"cat {text}/shared/a.kv").stderr
    assert run(f"cat {text}/shared/b.kv").stdout == "public"
    assert "Permission denied" in run(f"echo more >> {text}/shared/b.kv").stderr
    assert "Permission denied" in run(f"echo mine > {text}/mine.kv").stderr
    assert run(f"printf mine > {text}/shared/mine.kv").returncode == 0
    made = (kv / "shared/mine.kv").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (1234, 1234, 0o600)


# ---- what can't be done


def test_the_control_files_are_found_but_not_listed(connected, kv, tmp_path):
    assert (kv / ".symphony").is_dir()
    assert ".symphony" not in os.listdir(kv)  # noqa: PTH208 - as `ls -a` does
    assert connected.shell(f"find {kv}").stdout.split() == [str(kv)]


VIM = "vim -Nes -u NONE -c 'set swapfile directory=.,/tmp backupdir=.,/tmp {}' -c '%s/two/2/' -c wq a.kv"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("vim") is None, reason="NOT TESTED: there is no vim here")
@pytest.mark.parametrize("options", ["", "backup", "backupcopy=yes", "backupcopy=no"])
def test_vim_edits_a_text(connected, kv, text, options):
    connected.shell(f"printf 'one\ntwo\nthree\n' > {text}/a.kv")
    said = connected.shell(f"cd {text} && {VIM.format(options)} 2>&1")
    assert "failed" not in said.stdout, said.stdout
    assert (text / "a.kv").read_text() == "one\n2\nthree\n"
    assert [each.name for each in kv.iterdir()] == ["a.kv"]


def test_sed_is_told_at_once_that_it_cant_edit_a_text_in_place(connected, kv, text):
    connected.shell(f"printf 'one' > {text}/a.kv")
    refused = connected.shell(f"cd {text} && sed -i s/one/two/ a.kv", check=False)
    assert refused.returncode != 0
    assert "couldn't open temporary file" in refused.stderr
    assert (text / "a.kv").read_text() == "one"
    assert [each.name for each in kv.iterdir()] == ["a.kv"]
    connected.shell(f'cd {text} && new=$(sed s/one/two/ a.kv) && printf %s "$new" > a.kv && sync a.kv')
    assert (text / "a.kv").read_text() == "two"


@pytest.mark.parametrize(
    "command",
    [
        "mkdir .symphony/x",
        "mkdir .symphony/text/x",
        "touch .symphony/x",
        "ln -s x .symphony/text/x",
        "mkfifo .symphony/text/x",
        "rm .symphony/text/a.kv",
        "mv .symphony/text/a.kv .symphony/text/b.kv",
        "mv .symphony/text/a.kv b.kv",
        "mv a.kv .symphony/text/b.kv",
        "ln a.kv .symphony/text/b.kv",
        "rmdir .symphony/text",
        "rmdir .symphony",
        "mv .symphony x",
        "mkdir d && mv -T d .symphony",
        "echo x > .symphony/model",
        "chmod 777 .symphony",
        "chmod 666 .symphony/metrics",
        "truncate -s 0 .symphony/metrics",
    ],
)
def test_what_cant_be_changed_is_refused(connected, kv, text, command):
    connected.shell(f"printf one > {text}/a.kv")
    refused = connected.shell(f"cd {kv} && {command}", check=False)
    assert refused.returncode != 0
    assert "Operation not permitted" in refused.stderr
    assert (text / "a.kv").read_bytes() == b"one"


def test_programs_do_not_reach_the_control_files(connected):
    with pytest.raises(sym.NotFound):
        sym.kv_open(".symphony/text/a.kv")
    with pytest.raises(sym.NotFound):
        sym.kv_stat(f"{connected.mount}/.symphony")
    with pytest.raises(sym.NotPermitted):
        sym.kv_create(".symphony")
    with sym.kv_create("a.kv"), pytest.raises(sym.NotPermitted):
        sym.kv_rename("a.kv", ".symphony")


def test_the_mode_and_the_attributes_of_a_text_are_those_of_its_file(connected, kv, text):
    connected.shell(f"printf one > {text}/a.kv; chmod 640 {text}/a.kv; setfattr -n user.note -v hi {text}/a.kv")
    assert (kv / "a.kv").stat().st_mode & 0o7777 == 0o640
    assert os.getxattr(kv / "a.kv", "user.note") == b"hi"
    assert os.getxattr(text / "a.kv", "user.kv.tokens") == b"3"
    connected.shell(f"touch -d 2001-01-01 {text}/a.kv; truncate -s 2 {text}/a.kv")
    assert (text / "a.kv").read_bytes() == b"on"


# ---- what is shown


def test_model_is_lines_of_keys_and_values(connected, kv):
    lines = (kv / ".symphony/model").read_text().splitlines()
    facts = dict(re.fullmatch(r"(\w+): +(.+)", line).groups() for line in lines)
    info = sym.model_info()
    assert facts["name"] == info.name
    assert int(facts["vocabulary"]) == info.vocab_size
    assert int(facts["context"]) == info.max_positions
    assert int(facts["page_entries"]) == 32
    assert int(facts["page_bytes"]) == 32 * int(facts["kv_bytes_per_token"])
    assert facts["precision"] == "bf16"
    assert re.fullmatch("[0-9a-f]{64}", facts["model_fingerprint"])


def metrics(kv):
    """Samples by name and labels; every one has HELP and TYPE before it."""
    described, samples = set(), {}
    for line in (kv / ".symphony/metrics").read_text().splitlines():
        if line.startswith("#"):
            _, keyword, name, rest = line.split(" ", 3)
            assert keyword in {"HELP", "TYPE"}
            assert keyword == "HELP" or rest in {"counter", "gauge", "histogram"}
            assert keyword == "HELP" or (rest == "counter") == name.endswith("_total")
            described.add((name, keyword))
            continue
        name, labels, value = re.fullmatch(r"(\w+)(\{[^ ]*\})? (\S+)", line).groups()
        family = re.sub("_(bucket|sum|count)$", "", name)
        family = family if (family, "TYPE") in described else name
        assert {(family, "HELP"), (family, "TYPE")} <= described
        samples[name + (labels or "")] = float(value)
    return samples


def test_metrics_count_what_happens(connected, kv):
    before = metrics(kv)
    with sym.kv_create("a.kv") as file:
        file.write(list(range(40)))
        sym.pred(file, [1])
        file.truncate(41)  # waits until the decode loop has given back what it had reserved ahead
        after = metrics(kv)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['symphony_tokens_total{phase="prefill"}'] == 40
    assert grown['symphony_tokens_total{phase="decode"}'] == 1
    assert grown['symphony_pred_calls_total{result="ok"}'] == 2
    assert grown['symphony_system_calls_total{op="kv_create"}'] == 1
    assert grown["symphony_pages_free"] == -2
    assert grown["symphony_files"] == 1
    assert grown["symphony_steps_total"] == grown["symphony_step_calls_count"] == 2
    assert after["symphony_lips"] == 1
    assert after["symphony_weights_loaded"] == 1
    assert grown["symphony_trio_held_seconds_count"] > 0
    assert grown["symphony_trio_held_seconds_sum"] > 0


def test_each_program_has_a_status_of_its_own(connected, kv):
    own = kv / ".symphony/proc" / str(os.getpid())

    def read():
        facts = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
        return {key: value.strip() for key, value in facts.items()}

    before = sym.getrusage()
    with sym.kv_create("a.kv") as file, sym.kv_fork(file):
        file.write(list(range(40)))
        facts = read()
        assert int(facts["pid"]) == os.getpid()
        assert int(facts["uid"]) == os.getuid()
        assert facts["name"] == Path("/proc/self/comm").read_text().strip()
        assert (int(facts["handles"]), int(facts["pages"])) == (2, 2)
        assert int(facts["tokens"]) == before.tokens + 40
        assert int(facts["connections"]) == 1
        assert facts["state"] == "idle"
        assert float(facts["compute_seconds"]) > 0
    assert (own.stat().st_mode & 0o7777, (own / "status").stat().st_mode & 0o7777) == (0o500, 0o400)
    sym.close()
    wait_for(lambda: read()["connections"] == "0")
    assert int(read()["tokens"]) == before.tokens + 40


def test_a_status_goes_with_its_process(connected, kv):
    program = connected.program("sym.getpid()\nprint(flush=True)\ninput()")
    program.stdout.readline()
    own = kv / ".symphony/proc" / str(program.pid)
    assert re.search(r"^connections: +1$", (own / "status").read_text(), re.MULTILINE)
    program.communicate("\n")
    wait_for(lambda: not own.exists())


def test_the_status_of_a_users_program_is_that_users_affair(connected, kv):
    if os.geteuid() != 0:
        pytest.skip("other users need root")
    for directory in (kv.parent, *kv.parent.parents[:2]):
        directory.chmod(0o755)
    own = kv / ".symphony/proc" / str(os.getpid())
    denied = subprocess.run(
        ["cat", own / "status"], user=1234, group=1234, capture_output=True, text=True, check=False, cwd="/"
    )
    assert "Permission denied" in denied.stderr


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_long_prefill_leaves_nothing(start_daemon, tmp_path):
    daemon = start_daemon("--model", "tiny:layers=8,hidden=256,ffn=1024,positions=20000", "--kv-memory", "64M")
    (tmp_path / "long.md").write_text("word " * 3900)
    text = daemon.mount / ".symphony/text"
    writer = subprocess.Popen(["cp", tmp_path / "long.md", text / "long.kv"], stderr=subprocess.DEVNULL)
    wait_for(lambda: (text / "long.kv").exists() and (text / "long.kv").stat().st_size > 0)
    assert daemon.stat()["num_free_pages"] < daemon.stat()["num_pages"]
    writer.send_signal(signal.SIGINT)
    assert writer.wait() == -signal.SIGINT
    wait_for(lambda: daemon.stat()["num_free_pages"] == daemon.stat()["num_pages"])
    assert os.listdir(daemon.mount) == []  # noqa: PTH208 - what a user sees
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()
