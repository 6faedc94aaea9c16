"""More decode loops than a step has seats: everything else is answered while they go on."""

import pytest

CROWD = """
kvs = [sym.kv_create() for _ in range(300)]
going = [sym.generate(kv, [5, 6], max_tokens=4000, stop_at_end=False, priority=100) for kv in kvs]
for generation in going:
    next(generation)
print("all of them decode", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def crowd(daemon):
    """300 generations, 256 of which fit a step."""
    crowd = daemon.program(CROWD)
    assert crowd.stdout.readline() == "all of them decode\n", crowd.stderr.read()
    yield crowd
    crowd.kill()
    crowd.communicate()


@pytest.mark.slow
@pytest.mark.usefixtures("crowd")
def test_a_prefill_a_generation_and_a_text_are_answered_while_a_crowd_decodes(daemon):
    out = daemon.run(
        """
        with sym.kv_create() as kv:
            print(sym.pred(kv, [1, 2, 3], priority=-100).argmax() < 259)
            print(len(list(sym.generate(kv, [4], max_tokens=3, stop_at_end=False, priority=100))))
            print(sym.kv_write(kv, list(range(200))))
        """
    )
    assert out == "True\n3\n206\n"
    (daemon.mount / ".symphony/text/crowded.kv").write_text("a text")
    assert (daemon.mount / ".symphony/text/crowded.kv").read_text() == "a text"
    (daemon.mount / "crowded.kv").unlink()
    assert daemon.stat()["waiting_calls"] >= 300, "all of the crowd go on"
