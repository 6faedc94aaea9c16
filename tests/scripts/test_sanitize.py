"""The C without Python, under sanitizers. The long form of scripts/sanitize has every kernel, and takes minutes."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
CC = os.environ | {"CC": str(ROOT / "tests/cc")}
OTHER_PROGRAM = """#!/bin/bash
words=("$@")
for number in "${!words[@]}"; do
    case ${words[number]} in
    tests/*.c) words[number]=$PLACE/program.c ;;
    *.c)
        for last; do :; done
        exec cp "$PLACE/empty.o" "$last"
        ;;
    esac
done
exec cc "${words[@]}"
"""
"""A compiler that takes another program in place of each, and nothing in place of what it is linked with."""
HEAD = "#include <pthread.h>\n#include <stdlib.h>\nstatic int shared;\n"
OVERFLOW = "int main(void) { volatile char *room = malloc(1); room[shared + 1] = 1; return 0; }"
OVERRUN = "int main(int n, char **words) { volatile int most = 0x7fffffff; return !words || most + n == shared; }"
LEAK = "int main(void) { volatile char *room = malloc(9); room = NULL; return room != NULL; }"
RACE = """static void *work(void *none) { shared++; return none; }
int main(void) {
    pthread_t other;
    pthread_create(&other, NULL, work, NULL);
    shared++;
    return pthread_join(other, NULL);
}"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["memory", "threads"])
def test_the_channel_the_samplers_the_loop_and_the_step_survive_sanitizers(what):
    command = [SCRIPTS / "sanitize", "--quick", what]
    done = subprocess.run(command, env=CC, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" ran in ") == 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fuzzer_of_calls_finds_nothing_in_some_seconds():
    done = subprocess.run([SCRIPTS / "fuzz/calls", "--quick"], env=CC, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("Done ").split()[0]) > 100


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "program", "says"),
    [
        ("memory", OVERFLOW, "heap-buffer-overflow"),
        ("memory", OVERRUN, "signed integer overflow"),
        ("memory", LEAK, "detected memory leaks"),
        ("threads", RACE, "data race"),
    ],
    ids=["overflow", "overrun", "leak", "race"],
)
def test_a_fault_in_a_program_ends_the_sanitizers_with_a_status(tmp_path, what, program, says):
    (tmp_path / "program.c").write_text(HEAD + program)
    (tmp_path / "empty.c").touch()
    subprocess.run(["cc", "-c", "empty.c"], cwd=tmp_path, check=True)
    compiler = tmp_path / "cc"
    compiler.write_text(OTHER_PROGRAM)
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "PLACE": str(tmp_path)}
    command = [SCRIPTS / "sanitize", "--quick", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout + done.stderr
    assert says in done.stderr
