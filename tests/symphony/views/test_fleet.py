"""Texts of commands about a fleet."""

from symphony.views.fleet import holding_text


def fleet(*machines, drained=("east",), copies=1, **held):
    """The state of a fleet in which east holds something."""
    holding = {"versions": 0, "alone": 0, "stuck": 0, "writing": 0, "paths": [], **held}
    holdings = {"east": holding} if held else {}
    return {"machines": dict.fromkeys(machines), "drained": list(drained), "copies": copies, "holdings": holdings}


def test_a_drain_says_what_it_waits_for():
    both = "east", "west"
    assert holding_text(fleet(*both), "east") == "east can go: the fleet needs none of its files"
    assert holding_text(fleet(*both, versions=2, writing=1), "east") == "east has 2 versions, and writes 1 file"
    assert "no machine of this model stays to copy 2 of them" in holding_text(fleet(*both, versions=2, stuck=2), "east")
    assert "it is away, and no other machine has 2" in holding_text(fleet("west", versions=2, alone=2), "east")


def test_a_drain_says_that_too_few_machines_stay_to_sync_what_is_written():
    text = "east has 0 versions, and writes 1 file; syncs fail, because `copies` is 2, and only 1 of the machines stay"
    assert holding_text(fleet("east", "west", copies=2, writing=1), "east") == text
    three = "east", "west", "north"
    assert "syncs" not in holding_text(fleet(*three, copies=2, writing=1), "east")
    assert "syncs" in holding_text(fleet(*three, drained=("east", "north"), copies=2, writing=1), "east")
    assert "syncs" not in holding_text(fleet("east", "west", copies=2, versions=1), "east")
