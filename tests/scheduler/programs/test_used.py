"""The daemon's counts of a program and the counts that libsym gives to it are one list."""

from dataclasses import asdict

from libsym.calls.usage import Usage
from scheduler.programs.used import Used


def test_all_that_is_counted_is_told_and_nothing_else():
    assert Used().facts() == asdict(Usage())
