"""Pages that advice keeps in memory until some time: their number, beside a model that looks at all of them."""

import numpy as np
import pytest

from kvfs.pages.kept import KeptPages


def test_a_number_that_is_not_that_of_the_pages_is_found_out() -> None:
    kept = KeptPages(np.zeros(10))
    kept.extend(np.array([3], np.int32), 7.0)
    kept.until[2] = 7.0
    with pytest.raises(AssertionError, match="is said to keep"):
        kept.check()
