"""Quick forms of the scripts that try and measure: each fails when what it looks at is broken."""

import re
import signal
import sys
from dataclasses import dataclass, field

import pytest

from tests.scripts.quick_forms import LIMIT_S, MARKS, ROOT, STREAMS, a_place, skip_without_commands  # noqa: F401 - a fixture

pytestmark = MARKS


@dataclass(frozen=True)
class Broken:
    says: str
    plant: str = ""
    """Python that runs first, in the script's process. Nothing: the daemon is killed in the middle."""
    words: tuple[str, ...] = field(default=("--quick",))


GONE = (
    r"NotConnected|NoDaemon|no daemon listens|does the daemon live|(ended|with) status -9"
    "|Transport endpoint is not connected|caused connection abort|Connection reset|Broken pipe"
)
"""Words of a script whose daemon was killed; where the script was at that moment decides which."""
BROKEN = {
    "bench/ceiling.py": Broken(
        "the decoder does not sleep",
        "import branching as it\nserved = it.served\nit.served = lambda *a, tree, symphony: served(*a, tree=tree)",
    ),
    "bench/steps.py": Broken(GONE, words=STREAMS),
    "fuzz/frames.py": Broken("the daemon ended"),
    "fuzz/core.py": Broken("FAILED seed 1", "from tests.kvfs.core.model import Model\nModel.leave = lambda *_: None"),
    "fuzz/image_bytes.py": Broken(
        "FAILED seed 1: AssertionError",
        "from kvfs.images.importer import ImageImport\nImageImport.abandon = lambda self: None",
    ),
    "fuzz/recorded.py": Broken(
        "FAILED seed 1",
        "from scheduler.connection.under_way import UnderWay\nUnderWay.end = lambda *_: None\n"
        "from tests.scheduler import hostile\nhostile.SETTLED_S = 5",
    ),
    "mutants/mutants.py": Broken(
        "survived",
        "import changes as it\nit.Mutant.text = lambda self: Path(self.file).read_bytes()",
        ("--quick", "scheduler/batch/deadlines.py"),
    ),
    "soak/attacks.py": Broken(r"metrics +\S"),
    "soak/crashes.py": Broken(
        r"after \d+ kills:\nclient",
        "import crash_seen as it\nfrom crash_model import State\nseen = it.seen_in\n"
        "it.seen_in = lambda *a: {n: State(s.kind, tuple(1 + e for e in s.content)) for n, s in seen(*a).items()}",
    ),
    "soak/fairness.py": Broken(
        "nothing is withheld",
        "from scheduler.batch.policy import Policy\nplan = Policy.plan\nPolicy.plan = lambda *a: 0 * plan(*a)",
    ),
    "soak/fleet.py": Broken(
        "has tokens that nobody wrote",
        "import libsym as it\nread = it.kv_read\nit.kv_read = lambda kv: (read(kv)[0][:-1], [])",
    ),
    "soak/powercuts.py": Broken(
        r"--first 0 --steps 60, \d+: cut at",
        "import shutil\nfrom tests.disk import powercut as it\nmake = it.materialize\n"
        "it.materialize = lambda state, where: [make(state, where), shutil.rmtree(where / 'state', True)]",
    ),
    "soak/service.py": Broken(GONE),
    "soak/tier_programs.py": Broken("wrong: "),
    "soak/tiers.py": Broken(
        "seed 0: Lost",
        "from kvfs.pages.table import PageTable\ncut = PageTable.truncate\n"
        "PageTable.truncate = lambda self, length: cut(self, min(self.length, length + 1))",
    ),
}
PLANTED = """
import runpy, sys
from pathlib import Path
sys.argv[:] = sys.argv[1:]
sys.path[:0] = [{root!r}, str(Path(sys.argv[0]).parent)]
{plant}
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", BROKEN)
def test_a_quick_form_fails_when_what_it_looks_at_is_broken(place, name):
    skip_without_commands(name)
    broken, path = BROKEN[name], ROOT / "scripts" / name
    if broken.plant:
        planted = place.path / "planted.py"
        planted.write_text(PLANTED.format(root=str(ROOT), plant=broken.plant))
        command = [sys.executable, planted, path, *broken.words]
    else:
        command = [sys.executable, path, *broken.words]
    with place.start(command) as script:
        if not broken.plant:
            place.kill_daemon(script)
        said = "".join(script.communicate(timeout=LIMIT_S))
    assert script.returncode not in (0, -signal.SIGKILL), said
    assert re.search(broken.says, said), said
