"""A directory that is edited: the computation of each change, and the files on the mount afterwards."""

import re
import signal
from contextlib import ExitStack

import pytest

import libsym as sym
from lips.editor import Document, end_of_change

pytestmark = pytest.mark.slow
CODE = "".join(f"def f{number}(a, b):\n    return a + {number} * b\n\n\n" for number in range(4))
EDITED = CODE.replace("a + 3 * b", "a - 3 * b")
MAX_TOKENS = 2


def states():
    """Return the names of the states on the mount, without the empty text's, with which each file begins."""
    return sorted(entry.name for entry in sym.kv_list("editor") if entry.tokens)


class Editor:
    def __init__(self, directory, output):
        self.directory, self._output = directory, output

    def __call__(self, name, text):
        (self.directory / ".new").write_text(text)
        (self.directory / ".new").replace(self.directory / name)
        return self.said()

    def said(self):
        line = self._output.readline()
        found = re.fullmatch(r"(\S+): (.*) \((\d+) tokens computed\)\n", line)
        return (found[1], int(found[3])) if found else line


@pytest.fixture
def editor(tiny, tmp_path):
    """The program, watching a directory: a call replaces a file as editors do, and gives what is said about it."""
    process = tiny.start("editor", "--max-tokens", str(MAX_TOKENS), "--undo-s", "600", str(tmp_path))
    yield Editor(tmp_path, process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_an_edit_computes_what_comes_after_it_and_undoing_it_computes_nothing(editor):
    """Beside the suggestion: its first token is the text's last, then each that is suggested."""
    num_tokens = len(sym.tokenize(f"File code.py:\n{CODE}", special=False))
    _, first = editor("code.py", CODE)
    assert num_tokens <= first <= num_tokens + MAX_TOKENS
    _, edited = editor("code.py", EDITED)
    assert edited < num_tokens / 3
    assert len(states()) == 2
    before = {name: sym.kv_read(f"editor/{name}") for name in states()}
    _, undone = editor("code.py", CODE)
    assert undone <= 1 + MAX_TOKENS
    _, redone = editor("code.py", EDITED)
    assert redone <= 1 + MAX_TOKENS
    assert {name: sym.kv_read(f"editor/{name}") for name in states()} == before


def test_a_deleted_file_leaves_nothing_on_the_mount_and_others_stay(editor):
    editor("a.py", "a = 1\n")
    editor("b.py", "b = 1\n")
    editor("a.py", "a = 2\n")
    assert [name.partition("-")[0] for name in states()] == ["a.py", "a.py", "b.py"]
    (editor.directory / "a.py").unlink()
    assert editor.said() == "a.py: forgotten\n"
    assert {entry.name.partition("-")[0] for entry in sym.kv_list("editor")} == {"b.py"}


def test_a_file_that_is_longer_than_the_context_is_told_of_and_the_others_are_completed(editor):
    told = editor("long.txt", "word " * 9000)
    assert told[0] == "long.txt"
    assert told[1] == 0
    assert editor("a.py", "a = 1\n")[0] == "a.py"
    (editor.directory / "long.txt").unlink()
    assert editor.said() == "long.txt: forgotten\n"
    assert {entry.name.partition("-")[0] for entry in sym.kv_list("editor")} == {"a.py"}


@pytest.fixture
def open_document(tiny):
    """Gives documents, which are deleted at the end."""
    sym.kv_mkdir("editor", parents=True)
    with ExitStack() as opened:

        def open_document(name="code.py", undo_s=60.0, idle_s=1800.0):
            document = Document(name, undo_s=undo_s, idle_s=idle_s)
            opened.callback(document.delete)
            return document

        yield open_document


def lives_s(*names):
    return [sym.kv_stat(f"editor/{name}").ttl_s for name in names]


def test_what_is_too_long_leaves_nothing_that_stays_for_good(open_document):
    with pytest.raises(sym.Invalid):
        open_document("long.txt").save("x" * 9000, 1)
    found = lives_s(*(entry.name for entry in sym.kv_list("editor")))
    assert (len(found), set(found) <= {60, 1800}) == (2, True)


def test_files_whose_long_names_begin_alike_have_states_of_their_own(open_document):
    for end in "ab":
        open_document("é" * 120 + end).save("x", 1)
    assert len(states()) == 2


def test_what_may_be_undone_is_kept_for_a_moment_and_what_is_edited_for_longer(open_document):
    document = open_document()
    document.save(CODE, 1)
    (old,) = states()
    assert lives_s(old) == [1800]
    document.save(EDITED, 1)
    (new,) = set(states()) - {old}
    assert lives_s(old, new) == [60, 1800]
    for _ in range(2):  # then it is saved, and not changed
        document.save(CODE, 1)
        assert lives_s(old, new) == [1800, 60]


def test_an_untouched_file_is_gone_after_a_while_and_its_next_edit_computes_it_anew(open_document, computed):
    document = open_document(undo_s=0.01, idle_s=0.01)
    text, num_first = computed(document.save, CODE, 1)
    while sym.kv_list("editor"):
        pass
    assert computed(document.save, CODE, 1) == (text, num_first)


def test_the_suggestion_is_that_of_a_text_computed_at_once_as_far_as_to_the_cursor(open_document):
    document = open_document()
    document.save(CODE, 8)
    cursor = CODE.index("a + 2")
    changed = f"{CODE[:cursor]}x * y + {CODE[cursor:]}"
    suggestion = document.save(changed, 8)
    assert end_of_change(CODE, changed) == cursor + len("x * y + ")
    with sym.kv_create() as kv:
        tokens = document.tokens(changed[: cursor + len("x * y + ")])
        assert sym.generate(kv, tokens, stop="\n", max_tokens=8).full_text() == suggestion


CHANGES = [("", "abc", 3), ("abc", "abXc", 3), ("abXc", "abc", 2), ("abc", "abcd", 4), ("a b", "a x b", 4)]


@pytest.mark.parametrize(("old", "new", "end"), [*CHANGES, ("abc", "abc", 3), ("abc", "", 0)])
def test_the_cursor_is_where_the_change_ends(old, new, end):
    assert end_of_change(old, new) == end
