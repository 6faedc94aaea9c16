"""Ctrl-C at every moment at which it may come."""

import sys
import traceback
from collections.abc import Callable
from types import FrameType


class Interrupt(Exception):
    """Exception that a signal handler raises."""


def ends_before(moment: int, call: Callable[[], object]) -> bool:
    """Whether a call ends before the so-manieth moment at which a signal could interrupt it; there it is.

    Python looks for signals where a function begins and where one of C has been called. (What they raise in a finalizer
    it drops: the file then stays open as long as the connection.)
    """
    num_left = moment

    def count(frame: FrameType, event: str, _what: object) -> None:
        nonlocal num_left
        names = {each.f_code.co_name for each, _ in traceback.walk_stack(frame)}
        is_here = frame.f_code.co_name in ("ends_before", "<lambda>")  # the second is a finalizer's, too
        if event in ("call", "c_return") and "__del__" not in names and not is_here:
            num_left -= 1
            if num_left == 0:
                raise Interrupt

    sys.setprofile(count)
    try:
        call()
    except Interrupt:
        return False
    finally:
        sys.setprofile(None)
    return True
