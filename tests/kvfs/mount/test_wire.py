"""Answers as the kernel wants them: against the structures of this machine's own linux/fuse.h."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from kvfs.mount import wire

TIMES_NS = (-1, (1 << 33) * 10**9 + 7, 1_700_000_000_123_456_789)  # the first is a nanosecond before 1970
ATTRIBUTES = wire.attributes((1 << 40) + 5, stat.S_IFCHR | 0o4755, 3, 1001, 1002, 513, *TIMES_NS, 0x80000001, 1 << 20)
STRUCTURES = {
    "fuse_entry_out": lambda answers: answers.entry(ATTRIBUTES, ATTRIBUTES[0]),
    "fuse_attr_out": lambda answers: answers.attr(ATTRIBUTES),
    "fuse_open_out": lambda answers: answers.opened(7),
    "fuse_write_out": lambda answers: answers.count(9),
    "fuse_getxattr_out": lambda answers: answers.count(9),
    "fuse_statfs_out": lambda answers: answers.statfs(
        block_bytes=1, num_blocks=2, num_free=3, num_available=3, num_files=4, num_free_files=5, name_bytes=6
    ),
}

PRINT_FIELDS = r"""
    struct fuse_entry_out out;
    if (read(0, &out, sizeof out) != sizeof out)
        return 1;
    printf("nodeid=%lld\n", (long long)out.nodeid);
    printf("valid=%lld\n", (long long)(out.entry_valid | out.attr_valid | out.entry_valid_nsec | out.attr_valid_nsec));
    SHOW(ino); SHOW(size); SHOW(blocks); SHOW(atime); SHOW(mtime); SHOW(ctime); SHOW(atimensec); SHOW(mtimensec);
    SHOW(ctimensec); SHOW(mode); SHOW(nlink); SHOW(uid); SHOW(gid); SHOW(rdev); SHOW(blksize);
"""


def run_c(base: Path, source: str, stdin: bytes = b"") -> dict[str, int]:
    if not Path("/usr/include/linux/fuse.h").exists():
        pytest.skip("ANSWERS NOT COMPARED: no linux/fuse.h here (apt-get install linux-libc-dev)")
    head = "#include <linux/fuse.h>\n#include <stdio.h>\n#include <unistd.h>\n"
    show = r'#define SHOW(field) printf(#field "=%lld\n", (long long)out.attr.field)'
    (base / "p.c").write_text(f"{head}{show}\nint main(void) {{ {source} return 0; }}")
    subprocess.run(["cc", "-o", base / "p", base / "p.c"], check=True)
    out = subprocess.run([base / "p"], input=stdin, capture_output=True, check=True).stdout.decode()
    return {name: int(value) for name, _, value in (line.partition("=") for line in out.split())}


@pytest.fixture
def out() -> bytearray:
    return bytearray(4096)


@pytest.fixture
def answers(out: bytearray) -> wire.Answers:
    return wire.Answers(memoryview(out), len)


def test_every_answer_is_as_long_as_its_structure(tmp_path: Path, answers: wire.Answers) -> None:
    names = (*STRUCTURES, "fuse_direntplus")
    sizes = run_c(tmp_path, "".join(f'printf("{n}=%zu\\n", sizeof(struct {n}));' for n in names))
    assert {name: pack(answers) for name, pack in STRUCTURES.items()} | {"fuse_direntplus": 152} == sizes
    assert answers.created(ATTRIBUTES, 1, 0) == sizes["fuse_entry_out"] + sizes["fuse_open_out"]
    for name in (b"a", b"seven77", b"eight888", b"n" * 255):
        packed = wire.listing_entry(name, ATTRIBUTES, ATTRIBUTES[0], 4)
        assert len(packed) == wire.listing_entry_bytes(name)
        assert len(packed) % 8 == 0
        assert packed[sizes["fuse_direntplus"] :].rstrip(b"\0") == name


def test_every_attribute_is_where_the_kernel_looks(tmp_path: Path, answers: wire.Answers, out: bytearray) -> None:
    shown = run_c(tmp_path, PRINT_FIELDS, bytes(out[: answers.entry(ATTRIBUTES, ATTRIBUTES[0])]))
    assert shown == {
        "nodeid": (1 << 40) + 5,
        "valid": 0,
        "ino": (1 << 40) + 5,
        "size": 513,
        "blocks": 2,
        "atime": -1,
        "atimensec": 10**9 - 1,
        "mtime": 1 << 33,
        "mtimensec": 7,
        "ctime": 1_700_000_000,
        "ctimensec": 123_456_789,
        "mode": stat.S_IFCHR | 0o4755,
        "nlink": 3,
        "uid": 1001,
        "gid": 1002,
        "rdev": 0x80000001,
        "blksize": 1 << 20,
    }


def test_a_names_type_is_the_one_of_getdents() -> None:
    packed = wire.listing_entry(b"d", wire.attributes(5, stat.S_IFDIR | 0o755, 2, 0, 0, 4096, 0, 0, 0), 5, 3)
    dirent = packed[128:]
    assert int.from_bytes(dirent[:8], "little") == 5
    assert int.from_bytes(dirent[8:16], "little") == 3, "where the next name is asked for"
    assert int.from_bytes(dirent[20:24], "little") == 4, "DT_DIR"
