"""A daemon whose memory holds a part of what its programs have: they finish, and compute what they would with enough.

`scripts/soak/tier_programs.py` is the long form.
"""

import signal

import pytest

from tests.symphony.tier_programs import Crowd, check_what_was_synced

NUM_PROGRAMS = 4
LITTLE = ("--model", "tiny", "--kv-memory", "128K", "--threads", "1")
ENOUGH = ("--model", "tiny", "--kv-memory", "64M", "--threads", "1")


@pytest.mark.slow
def test_programs_with_too_little_memory_compute_the_same_and_survive_what_comes(start_daemon, tmp_path_factory):
    daemon = start_daemon(*ENOUGH)
    wanted = Crowd(daemon, NUM_PROGRAMS, 2, 0.0).wait(60)
    assert all(said.result for said in wanted)
    daemon.shell(f"rm {daemon.mount}/*.kv")
    assert daemon.stop() == 0

    daemon = start_daemon(*LITTLE)
    crowd = Crowd(daemon, NUM_PROGRAMS, 2, 0.2)
    crowd.end(3)
    found = crowd.wait(60)
    assert [said.result for said in found if said.result] == [said.result for n, said in enumerate(wanted) if n != 3]
    daemon.symphony("doctor")
    tiers = daemon.stat()["tiers"]
    assert tiers["num_in"] > 0
    assert (tiers["num_waiting"], tiers["num_computing"]) == (0, 0)
    daemon.shell(f"rm {daemon.mount}/*.kv")

    # Killed in the middle: what was synced is there. Ended in order: all is.
    crowd = Crowd(daemon, NUM_PROGRAMS, 20, 0.2)
    crowd.until_each_has_synced(2)
    daemon.stop(signal.SIGKILL)
    said = crowd.wait(60, may_fail=True)
    daemon = start_daemon(*LITTLE)
    assert check_what_was_synced(daemon, said) == NUM_PROGRAMS
    daemon.symphony("doctor")
    assert daemon.stop() == 0, "it drains"
    daemon = start_daemon(*LITTLE)
    assert check_what_was_synced(daemon, said) == NUM_PROGRAMS
    assert "Traceback" not in daemon.log.read_text()
