import numpy as np

from decoder.cuda.residency import Placement, Residency
from tests.decoder.bench import ints


def placed(residency: Residency, *pages: int, only_if_old: bool = False) -> Placement:
    found = residency.place(ints(*pages), only_if_old=only_if_old)
    assert found is not None
    return found


def test_pages_get_free_frames_first_and_then_those_of_the_pages_that_were_used_the_longest_ago():
    residency = Residency(num_pages=10, num_frames=3)
    for page in (4, 5, 6):
        found = placed(residency, page)
        assert found.arrivals.tolist() == [page]
        assert not found.evicted.size
    assert not placed(residency, 4).arrivals.size  # 4 is used again: 5 is the oldest now
    found = placed(residency, 7, 8)
    assert found.evicted.tolist() == [5, 6]
    assert sorted(found.frames.tolist()) == sorted(found.evicted_frames.tolist())
    assert residency.frame_of[[4, 7, 8]].min() >= 0
    residency.check()


def test_pages_are_placed_all_together_or_not_at_all():
    residency = Residency(num_pages=10, num_frames=3)
    residency.place(ints(1, 2, 3))
    residency.num_pins[residency.frame_of[1]] = 1
    before = residency.frame_of.copy()
    assert residency.place(ints(2, 4, 5)) is None  # 1 is pinned, and 2 is wanted itself
    assert np.array_equal(residency.frame_of, before)
    assert placed(residency, 4, 5).evicted.tolist() == [2, 3]
    residency.check()


def test_a_hint_takes_no_frame_from_the_pages_that_were_used_last():
    residency = Residency(num_pages=10, num_frames=3)
    residency.place(ints(1))
    residency.place(ints(2, 3))
    assert residency.place(ints(4, 5), only_if_old=True) is None
    assert placed(residency, 4, only_if_old=True).evicted.tolist() == [1]
    assert residency.place(ints(5), only_if_old=True) is None, "a second hint would undo the first"
    assert placed(residency, 5).evicted.tolist() == [2]


def test_a_dropped_page_leaves_a_free_frame():
    residency = Residency(num_pages=4, num_frames=1)
    residency.place(ints(0))
    residency.drop(0)
    residency.drop(0)  # it has none any more
    assert residency.num_resident == 0
    assert placed(residency, 3).frames.tolist() == [0]
    residency.check()
