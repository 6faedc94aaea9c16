"""Pages that advice keeps in memory until some time: their number, beside a model that looks at all of them."""

import random

import numpy as np
import pytest

from kvfs.pages.kept import KeptPages


def test_the_number_of_kept_pages_agrees_with_the_model_over_random_advice() -> None:
    rng, kept, model, now_s = random.Random(5), KeptPages(np.zeros(100)), np.zeros(100), 1.0
    for _ in range(2000):
        pages = np.array(rng.choices(range(100), k=rng.randrange(12)), np.int32)
        if rng.random() < 0.5:
            kept.clear(pages)
            model[pages] = 0
        else:
            until_s = rng.choice([now_s + 3, now_s + 40, float("inf")])
            kept.extend(pages, until_s)
            model[pages] = np.maximum(model[pages], until_s)
        now_s += rng.choice([0, 0, 1, 5])
        assert kept.num(now_s) == int((model > now_s).sum())
        assert ((kept.until > now_s) == (model > now_s)).all()
        kept.check()


def test_a_number_that_is_not_that_of_the_pages_is_found_out() -> None:
    kept = KeptPages(np.zeros(10))
    kept.extend(np.array([3], np.int32), 7.0)
    kept.until[2] = 7.0
    with pytest.raises(AssertionError, match="is said to keep"):
        kept.check()
