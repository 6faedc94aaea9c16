"""Files that an operator names."""

import errno
import os
from pathlib import Path

import pytest

from kvfs.base.operators_file import read_operators_file
from kvfs.tiers import loading
from libsym.errors import Invalid


def test_a_fifo_is_refused_and_nobody_waits_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "fifo.py")
    with pytest.raises(OSError, match="it is a FIFO") as caught:
        read_operators_file(tmp_path / "fifo.py", 10)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(Invalid, match="it is a FIFO"):
        loading.load(str(tmp_path / "fifo.py"))


def test_a_file_without_end_is_read_to_one_byte_more_than_there_may_be():
    assert read_operators_file(Path("/dev/zero"), 10) == bytes(11)
    assert read_operators_file(Path("/dev/null"), 10) == b""


def test_a_policy_without_end_is_refused(tmp_path):
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    with pytest.raises(Invalid, match="it is no policy"):
        loading.load(str(tmp_path / "zero.py"))


def test_a_file_that_everybody_may_change_or_replace_is_refused(tmp_path):
    directory = tmp_path / "of_root"
    directory.mkdir()
    file, link = directory / "file", tmp_path / "link"
    file.write_text("quota = 1\n")
    link.symlink_to(file)
    assert read_operators_file(link, 100) == b"quota = 1\n"
    file.chmod(0o666)
    with pytest.raises(Invalid, match=f"all may write to {file}"):
        read_operators_file(link, 100)
    file.chmod(0o664)
    directory.chmod(0o777)
    with pytest.raises(Invalid, match=f"all may write to {directory},"):
        read_operators_file(link, 100)
    directory.chmod(0o1777)
    assert read_operators_file(link, 100) == b"quota = 1\n"
