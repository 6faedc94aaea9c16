"""Calls of programs: the gate gives them what the kernel would, to every user, for every path."""

import pytest

from tests.kvfs.conformance.kinds import USERS, modes_of
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]  # root alone may mount the tmpfs, and become others


@pytest.mark.parametrize("user", USERS)
def test_the_mode_of_a_file(gate_twins: Twins, user: str) -> None:
    script = "make regular f\n chown f {owner} {group}\n chmod f {mode}\n symlink f l\n" + f"{user}: {{line}} -> *"
    lines = "open {p} O_RDONLY; open {p} O_RDWR; stat {p}; chmod {p} 02755; chmod {p} 06711"
    for path in ("f", "l"):
        gate_twins.compare(script, owner="ann", group="ann", mode=modes_of(user), line=lines.replace("{p}", path))
    gate_twins.compare(script, owner="ann; root", group="bob", mode="0644", line=lines.replace("{p}", "f"))


IN_A_DIRECTORY = """
    open d/f O_RDONLY; open d/f O_RDWR; stat d/f; open d/f O_RDONLY,O_CREAT 0600; open d/f O_RDWR,O_CREAT,O_EXCL;
    unlink d/f; open d/n O_RDWR,O_CREAT,O_EXCL 0600; open d/n O_RDONLY,O_CREAT 0600; open d/s O_RDWR,O_CREAT,O_EXCL;
    unlink d/s; stat d/none; unlink d/none; ls d; mkdir d/n 0755; mkdir d/f 0755; mkdir d/s 0755; chmod d/f 0640;
    chmod d 0750; rename d/f d/n; rename d/f e/n; rename d/f e/x; rename d/f e/s; rename e/x d/n; rename e/x d/f;
    rename e/x d/s; rename e/s d/n; rename e/s d/s; rename d/s e/n; rename d/none e/n"""


@pytest.mark.parametrize("user", USERS)
def test_the_mode_of_a_directory(gate_twins: Twins, user: str) -> None:
    script = """mkdir d 0777
        make regular d/f
        chmod d/f 0666
        mkdir d/s 0777
        chown d ann ann
        mkdir e 0777
        make regular e/x
        mkdir e/s 0777
        chmod d {mode}
        """
    found = gate_twins.compare(
        script + f"{user}: {{line}} -> *", mode=modes_of(user, (1, 3, 5, 6)), line=IN_A_DIRECTORY
    )
    assert {"ok", "ENOENT"} < set(found)


def test_sticky_directories(gate_twins: Twins) -> None:
    script = """mkdir d 01777
        chown d {d} {d}
        mkdir d/s 0755
        chown d/s {f} {f}
        make regular d/f
        chown d/f {f} {f}
        mkdir e 01777
        chown e {d} {d}
        mkdir e/s 0755
        chown e/s ann ann
        make regular e/g
        chown e/g {g} {g}
        make regular own
        chown own ann ann
        chmod . 0777
        {user}: {line} -> *"""
    lines = "unlink d/f; rename d/f d/n; rename d/f e/g; rename own e/g; rename d/s e/s"
    who = ("ann", "bob")
    found = gate_twins.compare(script, d=who, f=who, g=who, user="ann; root", line=lines)
    assert {"ok", "EPERM"} <= set(found)


PATHS = """to_d/f; to_f; to_d/../d/f; round; round/x; nowhere; nowhere/x; deep; into; d/f/; d/f/x; d/e/; d/e/.; d/e/..;
    to_f/; to_d/; closed/../d/f; d/none/x; ./d/./f; d//f; d/f/..; %255; %256; d/%256"""


@pytest.mark.parametrize("user", ["bob", "root"])
def test_paths(gate_twins: Twins, user: str) -> None:
    script = """mkdir d 0777
        make regular d/f
        chown d/f bob bob
        mkdir d/e 0777
        mkdir closed 0700
        chown closed ann ann
        make regular closed/f
        symlink d to_d
        symlink d/f to_f
        symlink round round
        symlink none nowhere
        symlink to_d/e/../f deep
        symlink closed/f into
        chmod . 0777
        """
    lines = "stat {p}; open {p} O_RDWR,O_CREAT,O_EXCL; unlink {p}; mkdir {p} 0700; chmod {p} 0640; rename {p} new"
    for line in (*lines.split("; "), "rename d/f {p}", "rename d/e {p}"):
        gate_twins.compare(script + f"{user}: {line} -> *", p=PATHS)


def test_new_files(gate_twins: Twins) -> None:
    lines = "open d/n O_RDWR,O_CREAT,O_EXCL {m}; open d/n O_RDONLY,O_CREAT {m}; mkdir d/n {m}"
    script = "mkdir d 0777\n chown d ann 65531\n chmod d {mode}\n {user}: {line} -> *"
    gate_twins.compare(script, mode="0777; 02777", user="ann; bob; root", line=lines, m="0644; 02755; 04711; 01777; 0")
