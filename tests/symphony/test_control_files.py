"""`.symphony` on the mount of a real daemon, as a shell sees it."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

import libsym as sym
from tests.symphony.launchers import eventually


def own_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


NAME = own_name()

HANDBOOK = "".join(f"Rule {number}: refunds take {number % 7} days. Grüße, 世界 🙂<eos>\n" for number in range(30))


@pytest.fixture
def kv(shared):
    return shared.mount


@pytest.fixture
def text(kv):
    return kv / ".symphony" / "text"


def as_another_user(command):
    if os.geteuid() != 0:
        pytest.skip("other users need root")
    return subprocess.run(
        ["sh", "-c", command], check=False, user=1234, group=1234, capture_output=True, text=True, cwd="/"
    )


# ---- the text view


def test_the_usual_tools_write_and_read_texts_that_answer_as_those_of_programs(shared, kv, text, tmp_path):
    handbook = tmp_path / "handbook.md"
    handbook.write_text(HANDBOOK)
    (kv / "docs").mkdir()
    (kv / "plain.txt").write_text("refunds")
    shared.shell(f"cat {handbook} > {text}/docs/a.kv; cp {handbook} {text}/copy; echo nothing > {text}/other.kv")
    assert (kv / "docs/a.kv").stat().st_mode & 0o7777 == 0o600
    made = sym.kv_create()
    sym.kv_write(made, sym.tokenize(HANDBOOK))
    for name in ("docs/a.kv", "copy"):
        assert sym.kv_read(name) == made.read()
        assert bytes(sym.pred(sym.kv_fork(name), [7]).logits) == bytes(sym.pred(made.fork(), [7]).logits)
    assert shared.shell(f"cat {text}/docs/a.kv").stdout == HANDBOOK
    assert sorted(shared.shell(f"grep -rl refunds {text}").stdout.split()) == [f"{text}/copy", f"{text}/docs/a.kv"]
    assert shared.shell(f"wc -c < {text}/docs/a.kv").stdout.strip() == str(len(HANDBOOK.encode()))
    assert shared.shell(f"tail -n 1 {text}/docs/a.kv").stdout == HANDBOOK.splitlines(keepends=True)[-1]
    shared.shell(f"cp -r {text} {tmp_path}/out; cmp {tmp_path}/out/docs/a.kv {handbook}")
    shared.shell(f"tar cf {tmp_path}/text.tar -C {text} .")
    with tarfile.open(tmp_path / "text.tar") as archive:
        assert (member := archive.extractfile("./docs/a.kv"))
        assert member.read() == HANDBOOK.encode()
        assert "./plain.txt" not in archive.getnames()


def test_tail_follows_a_context_that_a_program_appends_to(text):
    kv = sym.kv_create("log.kv")
    kv.write(sym.tokenize("first\n"))
    with subprocess.Popen(["tail", "-s", "0.01", "-f", text / "log.kv"], stdout=subprocess.PIPE) as tail:
        assert tail.stdout
        assert tail.stdout.readline() == b"first\n"
        kv.write(sym.tokenize("second\n"))
        assert tail.stdout.readline() == b"second\n"
        tail.kill()


def test_redirections_replace_and_append_whoever_writes(shared, text):
    for command, found in (
        ("(printf 'one <b'; printf 'os> two'; cat /dev/null) > a.kv", "one <bos> two"),
        ("printf one > a.kv; printf ' two' >> a.kv", "one two"),
        ("printf three > a.kv", "three"),
        ('new=$(sed s/three/four/ a.kv) && printf %s "$new" > a.kv && sync a.kv', "four"),
    ):
        shared.shell(f"cd {text} && {command}")
        assert (text / "a.kv").read_text() == found
        assert sym.kv_read("a.kv")[0] == sym.tokenize(found)


@pytest.mark.slow
def test_another_user_sees_and_writes_what_the_modes_allow(shared, kv, text):
    for directory in (kv.parent, *kv.parent.parents[:2]):
        directory.chmod(0o755)
    (kv / "open").mkdir()
    (kv / "open").chmod(0o777)
    shared.shell(f"printf secret > {text}/open/a.kv; printf public > {text}/open/b.kv; chmod 644 {kv}/open/b.kv")
    for command in (
        f"cat {text}/open/a.kv",
        f"echo more >> {text}/open/b.kv",
        f"echo mine > {text}/mine.kv",
        f"cat {kv}/.symphony/proc/{os.getpid()}/status",
    ):
        assert "Permission denied" in as_another_user(command).stderr
    assert as_another_user(f"cat {text}/open/b.kv; printf mine > {text}/open/mine.kv").stdout == "public"
    made = (kv / "open/mine.kv").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (1234, 1234, 0o600)


def test_the_mode_and_the_attributes_of_a_text_are_those_of_its_file(shared, kv, text):
    shared.shell(f"printf one > {text}/a.kv; chmod 640 {text}/a.kv; setfattr -n user.note -v hi {text}/a.kv")
    assert (kv / "a.kv").stat().st_mode & 0o7777 == 0o640
    assert os.getxattr(kv / "a.kv", "user.note") == b"hi"
    assert os.getxattr(text / "a.kv", "user.kv.tokens") == b"3"
    shared.shell(f"touch -d 2001-01-01 {text}/a.kv; truncate -s 2 {text}/a.kv")
    assert (text / "a.kv").read_bytes() == b"on"


# ---- what is shown


def facts_of(path):
    return {key: value.strip() for key, value in (line.split(":", 1) for line in path.read_text().splitlines())}


def test_model_is_lines_of_keys_and_values(kv):
    facts, info = facts_of(kv / ".symphony/model"), sym.model_info()
    assert facts["name"] == info.name
    assert int(facts["vocabulary"]) == info.vocab_size
    assert int(facts["context"]) == info.max_positions
    assert int(facts["page_entries"]) == 32
    assert int(facts["page_bytes"]) == 32 * int(facts["kv_bytes_per_token"])
    assert facts["precision"] == "bf16"
    assert re.fullmatch("[0-9a-f]{64}", facts["model_fingerprint"])


def test_metrics_count_what_happens(kv):
    def metrics():
        text = (kv / ".symphony/metrics").read_text()
        return {name: float(value) for name, value in re.findall(r"^([a-z]\S+) (\S+)$", text, re.MULTILINE)}

    before, file = metrics(), sym.kv_create("a.kv")
    file.write(list(range(40)))
    sym.pred(file, [1])
    file.truncate(41)  # waits until the decode loop has given back what it had reserved ahead
    after = metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    expected = {
        'symphony_tokens_total{phase="prefill"}': 40,
        'symphony_tokens_total{phase="decode"}': 1,
        'symphony_pred_calls_total{result="ok"}': 2,
        'symphony_system_calls_total{op="kv_create"}': 1,
        "symphony_pages_free": -2,
        "symphony_files": 1,
        "symphony_steps_total": 2,
        "symphony_step_calls_count": 2,
    }
    assert {name: grown[name] for name in expected} == expected
    assert (after["symphony_lips"], after["symphony_weights_loaded"]) == (1, 1)
    assert grown["symphony_trio_held_seconds_count"] > 0
    assert grown["symphony_trio_held_seconds_sum"] > 0


@pytest.mark.slow
def test_each_program_has_a_status_of_its_own_that_goes_with_it(shared, kv):
    own, before = kv / ".symphony/proc" / str(os.getpid()), sym.getrusage()
    with sym.kv_create("a.kv") as file, sym.kv_fork(file):
        file.write(list(range(40)))
        facts = facts_of(own / "status")
        expected = {
            "pid": str(os.getpid()),
            "uid": str(os.getuid()),
            "handles": "2",
            "pages": "2",
            "tokens": str(before.tokens + 40),
            "connections": "1",
            "state": "idle",
        }
        assert {key: facts[key] for key in expected} == expected
        assert facts["name"] in {NAME, own_name()}, "a test may have renamed this process since it connected"
        assert float(facts["compute_seconds"]) > 0
    assert (own.stat().st_mode & 0o7777, (own / "status").stat().st_mode & 0o7777) == (0o500, 0o400)
    sym.close()
    eventually(lambda: facts_of(own / "status")["connections"] == "0")
    assert int(facts_of(own / "status")["tokens"]) == before.tokens + 40
    program = shared.program("sym.getpid()\nprint(flush=True)\ninput()")
    program.stdout.readline()
    theirs = kv / ".symphony/proc" / str(program.pid)
    assert facts_of(theirs / "status")["connections"] == "1"
    program.communicate("\n")
    eventually(lambda: not theirs.exists())
