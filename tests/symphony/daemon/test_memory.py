"""Memory that the daemon does not need any more is the machine's again."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
from pathlib import Path
from symphony.daemon.daemon import give_back_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

give_back_freed_memory()
before = resident()
large = b"x" * (16 << 20)
del large  # now glibc would keep blocks of up to this size on its heap
requests = [b"x" * (1 << 20) for _ in range(100)]
last = b"x" * 600_000
during = resident()
del requests
print(during - before, resident() - before)
"""


@pytest.mark.slow
def test_large_blocks_that_were_freed_are_given_back_whatever_came_after_them():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60)
    during, after = map(int, done.stdout.split())
    assert during > 100 << 20
    assert after < 10 << 20
