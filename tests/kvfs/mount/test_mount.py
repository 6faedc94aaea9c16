"""The mount as the kernel and a user meet it, beyond what tmpfs does alike."""

import ctypes
import mmap
import os
import platform
import struct
from pathlib import Path

import pytest

from kvfs.mount.session import READ_AHEAD_KB
from tests.kvfs.mounted import Mount, needs_mount, opened

pytestmark = needs_mount


def test_a_time_beyond_what_is_kept_becomes_the_nearest(mount: Mount) -> None:
    for date, nearest in (
        ("2300-01-01 UTC", "2262-04-11 23:47:16.854775807"),
        ("@9223372036854775807", "2262-04-11 23:47:16.854775807"),
        ("@-9223372036854775808", "1677-09-21 00:12:43.145224192"),
    ):
        times = mount.sh(f"touch f; touch -d '{date}' f; touch g; touch -a -d '{date}' g; TZ=UTC stat -c '%x' f g")
        assert times.splitlines() == [f"{nearest} +0000"] * 2, date
        assert mount.sh("TZ=UTC stat -c '%y' f").strip() == f"{nearest} +0000"


def test_the_kernel_reads_ahead_in_large_pieces(mount: Mount) -> None:
    device = mount.path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if not os.access(setting, os.W_OK):
        pytest.skip(f"READ-AHEAD NOT TESTED: {setting} can't be written here")
    assert int(setting.read_text()) == READ_AHEAD_KB


@pytest.mark.parametrize("num_bytes", [4096, 1 << 20])
def test_an_asynchronous_direct_write_is_over_when_it_was_submitted(mount: Mount, num_bytes: int) -> None:
    """Only then does the kernel drop the pages that buffered reads brought while the write was on its way."""
    setup, submit, events, destroy = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}[platform.machine()]
    system_call = ctypes.CDLL(None).syscall
    path = mount.path / "direct"
    path.write_bytes(bytes(num_bytes))
    context, event = ctypes.c_ulong(), ctypes.create_string_buffer(32)
    assert system_call(setup, 1, ctypes.byref(context)) == 0
    with opened(path, os.O_WRONLY | os.O_DIRECT) as file, mmap.mmap(-1, num_bytes) as data:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        write = ctypes.create_string_buffer(struct.pack("<QQHhIQQqQQ", 0, 0, 1, 0, file, address, num_bytes, 0, 0, 0))
        writes = ctypes.pointer(ctypes.pointer(write))
        for i in range(1, 51):
            data[:] = bytes([i]) * num_bytes
            assert system_call(submit, context, ctypes.c_long(1), writes) == 1
            assert system_call(events, context, ctypes.c_long(0), ctypes.c_long(1), event, None) == 1
            assert path.read_bytes() == data[:]
    assert system_call(destroy, context) == 0
