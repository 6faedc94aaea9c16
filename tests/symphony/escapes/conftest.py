"""Fixtures: a daemon and its users, for all tests of the session."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.symphony.escapes.house import NoPython, opened_house
from tests.workers import worker_number

ANN, BOB = 2001, 2002
"""Users other than root. Each worker has its own, ten more each, because the kernel limits some resources of a user."""


@pytest.fixture(scope="session")
def house():
    if os.getuid() != 0:
        pytest.skip("NO ESCAPES TESTED: only root can make the users that try them")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO ESCAPES TESTED: /dev/fuse is missing or not open to this user")
    # Not below /tmp: a sandbox has a /tmp of its own, whose rules would hold for KV, too.
    kept = tempfile.TemporaryDirectory(prefix="symphony-", dir="/var/lib")
    with kept as directory, opened_house(Path(directory)) as house:
        yield house


@pytest.fixture(scope="session")
def root(house):
    return house.user(0)


@pytest.fixture(scope="session")
def ann(house):
    return _user(house, ANN + 10 * worker_number())


@pytest.fixture(scope="session")
def bob(house):
    return _user(house, BOB + 10 * worker_number())


def _user(house, uid):
    try:
        return house.user(uid)
    except NoPython as reason:
        pytest.skip(f"NO USER BUT ROOT TESTED: {reason}")
