"""Random scripts: long ones over a few names, where everything meets everything."""

import random

import pytest

from tests.kvfs.conformance.kinds import EVERY_PATH_OPERATION, FILES, on
from tests.kvfs.conformance.script import USERS, Case, case
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

PATHS = on("a; b; d; e; d/a; d/b; d/e; e/a; e/d; d/e/a; l; l/a; d/l; d/../a; d/.; missing/x", "")
MODES = on("0755; 0777; 01777; 02777; 0700; 0; 0644; 06755; 0311; 0466", "")
FLAGS = on("O_RDONLY; O_RDWR; O_WRONLY; O_RDWR,O_CREAT; O_WRONLY,O_CREAT,O_EXCL; O_RDONLY,O_DIRECTORY", "")
OFTEN = """rename {p} {q}; renameat2 {p} {q} EXCHANGE; renameat2 {p} {q} NOREPLACE; link {p} {q}; symlink {q} {p};
    mkdir {p} {mode}; open {p} {flags},O_NONBLOCK {mode}; make {kind} {p}"""
MORE = """chmod {p} {mode}; lchown {p} {user} {group}; chown {p} -1 {group}; write {p} hello; append {p} more; read {p};
    truncate {p} 3; list {p}; getxattr {p} user.x; utimens {p} now omit"""
LINES = [*on(EVERY_PATH_OPERATION, "{p}"), *4 * on(OFTEN, "{p}"), *2 * on(MORE, "{p}")]


def script(seed: int, num_steps: int) -> Case:
    """Root opens the place to all; then anybody does anything. What a fifo would block is left out: see O_NONBLOCK."""
    dice = random.Random(seed)
    lines = ["chmod . 0777", "mkdir d 0777", "make regular a", "symlink d l"]
    names = list(USERS)
    choices = {"p": PATHS, "q": PATHS, "mode": MODES, "flags": FLAGS, "kind": FILES, "user": names}
    choices["group"] = [*names, "65531", "-1"]
    for _ in range(num_steps):
        line = dice.choice(LINES)
        for name, words in choices.items():
            line = line.replace("{" + name + "}", dice.choice(words))
        lines.append(f"{dice.choice((*names, 'root', 'ann'))}: {line} -> *")
    return case("\n".join(lines))


@pytest.mark.parametrize("seed", range(3))
def test_a_random_script_goes_alike(twins: Twins, seed: int) -> None:
    twins.compare(*(script(seed * 1000 + i, 25) for i in range(12)))
