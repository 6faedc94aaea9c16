"""Every attack of the table: without a sandbox it gets somewhere, in one it gets nothing."""

import pytest

from tests.symphony.escapes.house import NONE, STANDARD, table

TABLE = table()
CONTROLLED = [row["name"] for row in TABLE if row["no_control"] is None]
NOT_IN_THIS_KERNEL = {"ENOSYS", "EAFNOSUPPORT"}


@pytest.mark.slow
def test_without_a_sandbox_each_gets_somewhere(root):
    found = root.tries(NONE, *CONTROLLED)
    idle = [row for row in found.values() if row["got"] is None and row["refused"] not in NOT_IN_THIS_KERNEL]
    assert idle == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["root", "ann"])
def test_in_the_sandbox_none_gets_anything_and_what_is_outside_notices_nothing(request, name):
    user = request.getfixturevalue(name)
    before = user.outside.victim()
    found = user.tries(STANDARD, *(row["name"] for row in TABLE))
    assert [row for row in found.values() if row["got"] is not None or "broken" in row] == []
    assert user.outside.victim() == before, "signals, memory and priority of another program"
