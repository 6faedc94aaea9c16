"""The core does what its model does."""

import pytest

from tests.kvfs.core.walk import Walk


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_walks_over_tables_accounts_and_pages_agree_with_plain_python(seed: int):
    walk = Walk(seed)
    walk.run(3000)
    assert walk.num_refused > 50, "the walk never met a limit"
