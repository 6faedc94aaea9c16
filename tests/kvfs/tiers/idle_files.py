"""Files as policies see them."""

import numpy as np

from kvfs.tiers.policy import Files, Gaps


def files(idle_s, **others) -> Files:
    """Alike, but for what is said."""
    count = len(idle_s)
    values = {
        "num_pages": 10,
        "idle_s": idle_s,
        "num_uses": 5,
        "gap_s": np.nan,
        "gap_spread_s": np.nan,
        "bring_s": 0.1,
        "compute_s": np.nan,
    } | others
    columns = {name: np.broadcast_to(np.asarray(value, float), count).copy() for name, value in values.items()}
    return Files(**columns, is_open=np.ones(count, np.bool_))


def first_to_go(rank, of: Files, gaps: Gaps) -> int:
    return int(np.argmin(rank(of, gaps)))
