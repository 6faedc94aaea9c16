"""Every attack of the table: without a sandbox it gets somewhere, in one it gets nothing."""

import pytest

from tests.symphony.escapes.house import NONE, STANDARD, table

TABLE = table()
NAMES = [row["name"] for row in TABLE]
CONTROLLED = [row["name"] for row in TABLE if row["no_control"] is None]
NOT_IN_THIS_KERNEL = {"ENOSYS", "EAFNOSUPPORT"}
USERS = ("root", "ann")


@pytest.fixture(scope="module")
def outside(root):
    return root.tries(NONE, *CONTROLLED)


@pytest.fixture(scope="module")
def inside():
    """Results of each user's attacks, kept so that they run once."""
    return {}


@pytest.fixture(params=USERS)
def found(request, inside):
    if request.param not in inside:
        user = request.getfixturevalue(request.param)
        before = user.outside.victim()
        user.outside.typed()  # what a control has typed
        inside[request.param] = user.tries(STANDARD, *NAMES)
        inside[request.param]["victim"] = before, user.outside.victim(), user.outside.typed()
    return inside[request.param]


@pytest.mark.parametrize("name", CONTROLLED)
def test_without_a_sandbox_it_gets_somewhere(outside, name):
    row = outside[name]
    assert "broken" not in row, row["broken"]
    if row["refused"] in NOT_IN_THIS_KERNEL:
        pytest.skip(f"this kernel has it not: {row['refused']}")
    assert row["got"] is not None, row["refused"]


@pytest.mark.parametrize("name", NAMES)
def test_in_the_sandbox_it_gets_nothing(found, name):
    row = found[name]
    assert "broken" not in row, row["broken"]
    assert row["got"] is None, row["got"]


def test_what_is_outside_of_the_sandbox_has_noticed_nothing(found):
    before, after, typed = found["victim"]
    assert after == before, "signals, memory and priority of another program"
    assert typed == b"", "the user's terminal"
