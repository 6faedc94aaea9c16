"""Files that an operator names."""

import errno
import os
from pathlib import Path

import pytest

from kvfs.base.operators_file import read_operators_file
from kvfs.tiers import loading
from libsym.errors import Invalid


def test_what_is_no_file_or_has_no_end_is_refused_and_nobody_waits(tmp_path):
    fifo, zero = tmp_path / "fifo.py", tmp_path / "zero.py"
    os.mkfifo(fifo)
    zero.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a FIFO") as caught:
        read_operators_file(fifo, 10)
    assert caught.value.errno == errno.EINVAL
    assert read_operators_file(zero, 10) == bytes(11), "one byte more than there may be"
    assert read_operators_file(Path("/dev/null"), 10) == b""
    for path, reason in ((fifo, "it is a FIFO"), (zero, "it is no policy")):
        with pytest.raises(Invalid, match=reason):
            loading.load(str(path))


def test_a_file_that_everybody_may_change_or_replace_is_refused(tmp_path):
    directory = tmp_path / "of_root"
    directory.mkdir()
    file, link = directory / "file", tmp_path / "link"
    file.write_text("quota = 1\n")
    link.symlink_to(file)
    for file_mode, directory_mode, reason in (
        (0o644, 0o755, None),
        (0o666, 0o755, f"all may write to {file}"),
        (0o664, 0o777, f"all may write to {directory},"),
        (0o664, 0o1777, None),
    ):
        file.chmod(file_mode)
        directory.chmod(directory_mode)
        if reason is None:
            assert read_operators_file(link, 100) == b"quota = 1\n"
        else:
            with pytest.raises(Invalid, match=reason):
                read_operators_file(link, 100)
