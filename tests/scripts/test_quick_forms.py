"""Quick forms of the scripts that try and measure: each prints its whole table."""

import re
import sys

import pytest

from tests.scripts.quick_forms import FORMS, LIMIT_S, MARKS, ROOT, a_place, skip_without_commands  # noqa: F401 - a fixture

pytestmark = MARKS


@pytest.mark.parametrize("name", FORMS)
def test_a_quick_form_prints_its_whole_table(place, name):
    skip_without_commands(name)
    form = FORMS[name]
    with place.start([sys.executable, ROOT / "scripts" / name, *form.words]) as script:
        said, errors = script.communicate(timeout=LIMIT_S)
    assert script.returncode == 0, said + errors
    assert [wanted for wanted in form.table if not re.search(wanted, said)] == [], said
    for allowed in form.may_be_empty:
        said = re.sub(allowed, "", said)
    assert re.findall(r".*(?<![\w.:-])(?:0(?:\.0+)?(?![\w.:-])|{}|\[\]|nan\b|null\b|None\b).*", said) == []
    assert place.mounts() == []


def test_every_script_has_a_quick_form():
    folders = ("soak", "fuzz", "mutants", "bench", "bench/workloads")
    paths = [path for folder in folders for path in (ROOT / "scripts" / folder).glob("*.py")]
    scripts = {str(path.relative_to(ROOT / "scripts")) for path in paths if path.read_text().startswith("#!")}
    elsewhere = {"soak/attacks.py", "soak/conversations.py", "soak/conversation_mutants.py", "fuzz/recorded.py"}
    elsewhere |= {"bench/gpu.py", "bench/gpu_tests.py"}
    beside = {name for name in FORMS if name.startswith("conformance/")}
    assert scripts == (FORMS.keys() | elsewhere) - beside
