"""The libsym of each older version of the ABI that the daemon speaks, as programs have it when that is upgraded.

`clients/N.tar.xz` has libsym and lips of the last tree with version N: `git archive COMMIT libsym lips`. A new version
gets a new fixture, and the oldest one goes with the version that SYM_ABI_OLDEST leaves behind.
"""

import os
import re
import socket
import subprocess
import sys
import tarfile
import textwrap
import threading
from pathlib import Path

import pytest

from libsym import abi
from libsym.channel.handshake import dial
from libsym.errors import ProtocolError

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).with_name("clients")

pytestmark = pytest.mark.slow  # its C is compiled


@pytest.fixture(scope="module", params=range(abi.ABI_OLDEST, abi.ABI_VERSION))
def older(request, tmp_path_factory):
    """A directory with the older libsym, built, and the programs of its release."""
    directory = tmp_path_factory.mktemp("older")
    with tarfile.open(CLIENTS / f"{request.param}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    for build in ("libsym/abi_build.py", "libsym/channel/channel_build.py"):
        command, environment = [sys.executable, build], clean(CC=str(ROOT / "tests/cc"))
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    header = (directory / "libsym/abi.h").read_text()
    assert re.search(rf"^#define SYM_ABI_VERSION {request.param}u$", header, re.MULTILINE)
    return directory


def clean(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def run(libsym: Path, daemon, *words: object) -> str:
    """Run a program with the libsym of a directory, and return its output."""
    environment = clean(PYTHONPATH=str(libsym), SYMPHONY_SOCKET=str(daemon.socket))
    command = [sys.executable, "-P", *map(str, words)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EVERYTHING = """
    import os, sys
    import anyio
    import libsym as sym
    assert sym.__file__.startswith(sys.argv[1]), sym.__file__

    tokens = sym.chat_tokens([{"role": "user", "content": "Why?"}])
    print(sym.detokenize(tokens), sym.tokenize("abc"), len(sym.vocabulary()))
    info = sym.model_info()  # a field that is new is among `extra` of an older one
    print(info.name, info.vocab_size, info.max_positions, info.eos_ids, info.page_entries, info.dtype, info.backend)
    with sym.kv_create("upgrade.kv") as kv:
        row = sym.pred(kv, tokens)
        print(row.argmax(), row.topk(3), row.entropy())
        print([list(each.topk(1)) for each in sym.pred(kv, [1, 2, 3], rows="all")])
        print(sym.pred(kv, [5], top_k=4, sampler=sym.Sampler.greedy()))
        print(sym.pred(kv, [6], mask=[True] * kv.len()).argmax())
        with sym.kv_fork(kv) as fork:
            print([each.argmax() for each in sym.pred_batch([sym.Pred(kv, [7]), sym.Pred(fork, [8])])])
            generation = sym.generate(fork, [9], sampler=sym.Sampler(presence_penalty=9, temperature=0), max_tokens=40)
            print(list(generation), generation.finish, sym.kv_read(fork))
        warm = sym.Sampler(temperature=20, seed=4)  # by the rule of its version, and so does the daemon
        draws, loop, token = warm.start(), [], 9
        with sym.kv_fork(kv) as fork, sym.kv_fork(kv) as other:
            for _ in range(40):
                token = draws.draw(sym.pred(fork, [token]))
                loop.append(token)
            print(list(sym.generate(other, [9], sampler=warm, max_tokens=40, stop_at_end=False)) == loop)
            rows = sym.pred(fork, [1, 2, 3], rows="all", sampler=warm)
            full, draws = sym.pred(other, loop[-1:] + [1, 2, 3], rows="all"), warm.start()
            print([each.token for each in rows] == [draws.draw(full[i]) for i in range(1, 4)])
        print("".join(sym.generate(kv, [4], grammar=sym.Grammar.regex("[a-c]{5}"), max_tokens=9).text()))
        sym.kv_truncate(kv, 5)
        with sym.kv_extract(kv, [(0, 3)]) as part, sym.kv_merge([kv, part]) as both:
            print(part.len(), sym.kv_read(both))
        sym.kv_advise(kv, sym.TTL(60), sym.PIN)
        with sym.kv_lock(kv):
            pass
        sym.kv_sync(kv)
        print(sym.kv_stat(kv).tokens, [entry.name for entry in sym.kv_list()])
    sym.kv_rename("upgrade.kv", "upgraded.kv")
    with sym.kv_open("upgraded.kv") as kv:
        print(kv.len())
    sym.kv_remove("upgraded.kv")
    sym.kv_mkdir("upgrades")
    os.rmdir(sym.model_info().mount + "/upgrades")

    sym.subscribe("news")
    print(sym.send("news", "extra"), sym.recv("news", timeout=10))
    print(sym.send(sym.getpid(), {"to": 1}), sym.recv(timeout=10))

    async def loops():
        async def loop(seed):
            async with await sym.aio.kv_create() as kv:
                generation = await sym.aio.generate(kv, [seed], max_tokens=20)
                found[seed] = [token async for token in generation]

        found = {}
        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(loop, seed)
        print([found[seed] for seed in range(8)])

    anyio.run(loops)
    try:
        sym.kv_open("no.kv")
    except sym.NotFound as error:
        print(error)
    me = next(each for each in sym.programs() if each.pid == sym.getpid())
    print(me.uid, me.connections, me.state, me.usage.tokens > 0)
    used = sym.getrusage()
    print(used.calls > 0, used.tokens > 0, sorted(sym.daemon_stat())[:3])
    sym.daemon_check()
"""


def test_every_call_gives_an_older_program_what_it_gives_a_new_one(shared, older, tmp_path):
    program = tmp_path / "everything.py"
    program.write_text(textwrap.dedent(EVERYTHING))
    said = {each: run(each, shared, program, each) for each in (older, ROOT)}
    assert said[older] == said[ROOT]
    assert len(said[ROOT].splitlines()) > 15


@pytest.mark.parametrize(
    ("lip", "words"), [("completion", ["Once"]), ("ask", ["Who are you?"]), ("prefix", ["one", "two"])]
)
def test_the_programs_of_the_older_release_say_what_those_of_the_new_one_do(shared, older, lip, words):
    was = lip if (older / f"lips/{lip}.py").exists() else "plain"  # so completion was called
    said = [run(tree, shared, tree / f"lips/{name}.py", *words) for tree, name in ((older, was), (ROOT, lip))]
    assert sorted(said[0].splitlines()) == sorted(said[1].splitlines())
    assert said[0] not in ("", "\n")


def test_the_example_in_C_of_the_older_release_runs(shared, older):
    source = older / "libsym/examples/greedy.c"
    subprocess.run(["gcc", "-std=gnu11", "-I", older / "libsym", "-o", older / "greedy", source], check=True)
    said = [subprocess.check_output([older / "greedy", str(shared.socket), "Once", "20"]) for _ in range(2)]
    assert said[0] == said[1] != b""


OLD_DAEMON = """
    import socket, sys
    from libsym.channel.handshake import GREETING_BYTES, check_greeting, refusal
    from libsym.errors import SymError

    connection = socket.socket(fileno=0)
    try:
        check_greeting(connection.recv(GREETING_BYTES, socket.MSG_WAITALL))
    except SymError as error:
        connection.sendall(refusal(error))
"""


def test_a_newer_program_is_told_in_one_line_that_its_daemon_is_older(older, tmp_path):
    """The older release's own handshake is used."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)

        def serve() -> None:
            with listening.accept()[0] as connection:
                command = [sys.executable, "-P", "-c", textwrap.dedent(OLD_DAEMON)]
                subprocess.run(command, env=clean(PYTHONPATH=str(older)), stdin=connection.fileno(), check=True)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(ProtocolError) as told:
            dial(path)
        serving.join()
    [version] = re.findall(r"SYM_ABI_VERSION (\d+)u", (older / "libsym/abi.h").read_text())
    assert str(told.value) == (
        f"the daemon at {path} is older than this program's libsym (ABI version {version}, here "
        f"{abi.ABI_VERSION}): upgrade the daemon, or install the libsym of its release here"
    )
