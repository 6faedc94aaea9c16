# ruff: noqa: E501 - a script reads best on one line
"""Making and removing: the attributes of a new file and of its directory, and the calls that may remove each kind."""

import pytest

from tests.kvfs.conformance.kinds import ALL, DEVICES, FILES, MAKES, on
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

MODES = "0755; 07777; 02745; 06000"
MAKE_WITH_MODE = ("open d/n O_CREAT,O_WRONLY {m}", "mkdir d/n {m}", "mkfifo d/n {m}", "mknod d/n socket {m}")


def test_a_new_file_has_the_mode_less_the_mask_and_its_makers_ids(twins: Twins) -> None:
    script = "mkdir d 0777\n chmod d 0777\n umask {umask}\n {user}: {line} -> *\n umask 0 -> ok"
    lines = (*MAKE_WITH_MODE, "mknod d/n regular {m}")
    twins.compare(script, user="ann; root", umask="0; 0143", line=lines, m=MODES)


def test_a_new_file_in_a_setgid_directory_has_its_group(twins: Twins) -> None:
    script = "mkdir d 0777\n chown d bob {group}\n chmod d 02777\n {user}: {line} -> *"
    twins.compare(script, user="ann; bob; root", group="ann; bob", line=(*MAKE_WITH_MODE, "symlink test d/n"), m=MODES)


def test_a_link_into_a_setgid_directory_changes_nothing_of_the_file(twins: Twins) -> None:
    script = "mkdir d 02777\n chown d bob bob\n chmod d 02777\n make {kind} f\n {line} f d/g -> ok"
    twins.compare(script, kind="regular; fifo", line="link; rename")
    twins.compare(script, kind="dir", line="rename")


def test_a_new_device_has_its_number(twins: Twins) -> None:
    script = "mkdir d 0777\n mknod d/n {kind} {m} {major} {minor} -> ok\n stat d/n -> ok"
    twins.compare(script, kind=DEVICES, m="0644; 04755", major="1; 4095", minor="3; 1048575")
    twins.compare("mkdir d 0777\n ann: mknod d/n {kind} 0644 1 3 -> EPERM", kind=DEVICES)


def test_a_name_that_is_taken(twins: Twins) -> None:
    twins.compare(
        "make regular f\n make {kind} n\n {line} -> EEXIST", kind="regular; dir; symlink", line=on(MAKES, "n")
    )


def test_links(twins: Twins) -> None:
    """A second name: the count, the file's ctime, the directory's times; and the same when names go."""
    twins.compare(
        """make {kind} f
        mkdir d 0755
        link f d/g -> ok
        link d/g h -> ok
        chown d/g 123 456 -> *
        chmod h 0640 -> *
        unlink f -> ok
        rename d/g d/i -> ok
        unlink h -> ok
        unlink d/i -> ok
        lstat d/i -> ENOENT""",
        kind=[kind for kind in ALL if kind != "dir"],
    )
    twins.compare(
        "make {kind} f\n lchown f ann ann\n chmod . 0777\n {user}: link f g -> *", kind=FILES, user="ann; kim; root"
    )
    twins.compare("mkdir d 0777\n chmod . 0777\n chown d ann ann\n {user}: link d e -> EPERM", user="root; ann")


def test_removing(twins: Twins) -> None:
    """unlink takes everything but directories, rmdir directories; what fails changes nothing."""
    twins.compare("make {kind} f\n unlink f -> *\n rmdir f -> *\n lstat f -> ENOENT", kind=ALL)
    twins.compare("mkdir d 0755\n make {kind} d/f\n rmdir d -> ENOTEMPTY\n unlink d -> EISDIR", kind=ALL)


def test_directories_count_their_subdirectories(twins: Twins) -> None:
    twins.compare(
        """mkdir d 0755
        mkdir d/e 0755 -> ok
        mkdir d/e/f 0755 -> ok
        mkdir d/e/g 0755 -> ok
        rename d/e/f d/f -> ok
        rename d/f d/e/g -> ok
        rmdir d/e/g -> ok
        rmdir d/e -> ok""",
        "mkdir d 0755\n mkdir d/e 0755\n mkdir x 0755\n renameat2 d/e x EXCHANGE -> ok",
    )


def test_a_symbolic_link_is_its_target(twins: Twins) -> None:
    targets = "a; %path4095; d/./../x; %bytes"
    twins.compare("symlink {target} l -> ok\n readlink l -> *\n lstat l -> ok", target=targets)
    twins.compare("symlink %path4096 l -> ENAMETOOLONG", "symlink %empty l -> ENOENT")
    twins.compare("make {kind} f\n readlink f -> EINVAL", kind="regular; dir; fifo; socket")


def test_handles_outlive_names(twins: Twins) -> None:
    twins.compare(
        """make regular f
        hold h f O_RDWR
        pwrite h 0 hello -> 5
        rename f g -> ok
        pread h 9 0 -> b'hello'
        unlink g -> ok
        fstat h -> ok
        pwrite h 5 world -> 5
        pread h 20 0 -> *
        ftruncate h 3 -> ok
        fchmod h 0600 -> ok
        fchown h ann bob -> ok
        futimens h 5 6 -> ok
        fstat h -> ok
        fsync h -> ok
        release h -> ok""",
        """mkdir d 0755
        make regular d/f
        hold h d O_RDONLY
        rename d e -> ok
        flist h -> ok
        unlink e/f -> ok
        rmdir e -> ok
        fstat h -> ok
        flist h -> ok
        fchmod h 0700 -> ok
        fsync h -> ok""",
        "make regular f\n make regular g\n hold h g O_RDWR\n rename f g -> ok\n fstat h -> ok\n pwrite h 0 old -> 3\n read g -> b''",
        "mkdir d 0755\n mkdir e 0755\n hold h e O_RDONLY\n rename d e -> ok\n fstat h -> ok\n flist h -> []",
        "mkdir d 0755\n hold h d O_RDONLY\n rmdir d -> ok\n mkdir d 0755 -> ok\n fstat h -> ok\n flist h -> []",
    )


def test_the_directory_of_what_is_made_and_removed_has_new_times_and_no_other(twins: Twins) -> None:
    start = "mkdir d 0755\n mkdir d/e 0755\n utimens d 5 6\n utimens . 5 6\n make {kind} d/e/f -> ok\n stat d -> ok\n"
    end = "utimens d/e 7 8 -> ok\n {remove} d/e/f -> ok\n stat d/e -> ok"
    twins.compare(start + end, kind=[kind for kind in FILES if kind != "dir"], remove="unlink")
    twins.compare(start + end, kind="dir", remove="rmdir")
