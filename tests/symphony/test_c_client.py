"""A client in another language, against the header alone."""

import subprocess
from pathlib import Path

import pytest

import libsym as sym

HOUSE = Path(sym.__file__).parent
PROMPT = "Once upon a time, 世界"
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    program = tmp_path_factory.mktemp("greedy") / "greedy"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{HOUSE}"]
    subprocess.run(["cc", *flags, "-o", program, HOUSE / "examples" / "greedy.c"], check=True)
    return program


@pytest.mark.slow
def test_the_example_in_c_says_what_the_same_loop_in_python_says(daemon, greedy):
    sym.connect(str(daemon.socket))
    try:
        tokens, text = sym.tokenize(PROMPT), ""
        with sym.kv_create() as kv:
            for _ in range(NUM_TOKENS):
                tokens = [sym.pred(kv, tokens).argmax()]
                text += sym.detokenize(tokens)
    finally:
        sym.close()
    done = subprocess.run([greedy, daemon.socket, PROMPT, str(NUM_TOKENS)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == text + "\n"


def test_the_example_in_c_tells_what_went_wrong(daemon, greedy, tmp_path):
    done = subprocess.run([greedy, tmp_path / "none.sock", PROMPT, "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "greedy: no daemon listens there\n")
    done = subprocess.run([greedy, daemon.socket, "", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "at least one token" in done.stderr
