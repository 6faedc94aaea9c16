"""What the daemon counts of a program, and what libsym tells the program of it, are one list."""

from dataclasses import asdict

from libsym.usage import Usage
from scheduler.programs.used import Used


def test_all_that_is_counted_is_told_and_nothing_else():
    assert Used().facts() == asdict(Usage())
