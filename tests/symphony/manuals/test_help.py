"""`symphony help`: the pages of the Symphony that is asked, listed and shown by the pager that is here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from libsym.errors import NotFound
from symphony.cli import main
from symphony.manuals import manual
from symphony.manuals.manual import directories, find_page, find_pages
from symphony.manuals.manual_entries import EntryKind, entries
from symphony.manuals.manual_text import plain_text

PAGES = find_pages(directories())


def not_bold(text: str) -> str:
    """Letters are overstruck to be bold, or underlined."""
    return re.sub(".\b", "", text)


@pytest.fixture
def asked(capfd):
    """Return a function that asks for help, and gives the status and what was shown."""

    def ask(*words: str) -> tuple[int, str, str]:
        status = main(["help", *words])
        return (status, *capfd.readouterr())

    return ask


def test_it_lists_commands_and_topics_with_what_they_are(asked):
    lines = asked()[1].splitlines()
    commands, topics = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert [commands[0], topics[0]] == ["Commands:", "Other topics:"]
    assert any(" ".join(line.split()) == "run run a program beside the model" for line in commands)
    assert any(line.startswith("  ps, kill, logs, wait, attach ") for line in commands)
    assert {"libsym", "kv", "kvfs", "trace.5", "sandbox"} <= {line.split()[0] for line in topics[1:]}


@pytest.mark.parametrize("command", ["man", "mandoc", "none"])
def test_a_page_is_shown_with_what_there_is(command, asked, tmp_path, monkeypatch):
    """A PATH has one command, which has the programs that it needs."""
    if command != "none":
        if not (found := shutil.which(command)):
            pytest.skip(f"HELP NOT TESTED WITH {command}: it is not installed")
        (tmp_path / command).write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec {Path(found).resolve()} "$@"\n')
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, shown, errors = asked("kvfs")
    assert status == 0, errors
    assert "PROMISES" in not_bold(shown)
    assert "state directory" in " ".join(not_bold(shown).split())


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        ("run", "symphony-run.1"),
        ("kill", "symphony-ps.1"),
        ("kv(5)", "kv.5"),
        ("trace", "symphony-trace.1"),
        ("trace.5", "symphony-trace.5"),
        ("symphony", "symphony.1"),
        ("symphony.7", "symphony.7"),
        ("tutorial", "symphony-tutorial.7"),
        ("symphony-run", "symphony-run.1"),
    ],
)
def test_a_topic_is_a_command_or_another_page_and_may_name_its_section(topic, name):
    assert [page.file.name for page in (find_page(PAGES, topic),) if page] == [name]


@pytest.mark.parametrize(
    ("topic", "first", "says"),
    [
        ("sym.pred", "libsym-pred(3): pred(kv, tokens, ", "Appends tokens to kv, runs the model"),
        ("Dist.argmax", "libsym.Dist.argmax(*, allowed", "Return the likeliest token"),
        ("react", "symphony run react", "ReAct: the model thinks"),
        ("quota", "symphony-serve(1): --quota SIZE", "setfattr -n user.kv.quota -v 512M DIR"),
        ("tools", "libsym-chat(3): TOOLS", "libsym itself calls no tool: the program reads what the model says"),
        ("chat", "symphony run chat", "libsym-chat(3): Chat(kv"),
        ("disk full", "kvfs(7): A full disk", "syncs fail with ENOSPC"),
        ("user.kv.lost", "kvfs(7): user.kv.lost", "setfattr -x user.kv.lost FILE"),
        ("install", "symphony-service(7): Install", "# scripts/install"),
    ],
)
def test_a_word_without_a_page_has_entries_of_manuals_and_docstrings(topic, first, says, asked):
    shown = asked(*topic.split())[1]
    assert shown.startswith(first)
    assert says in " ".join(shown.split())


def test_members_of_libsym_that_are_private_or_not_documented_have_no_entry():
    calls = [each for each in entries([]) if each.kind == EntryKind.CALL]
    assert any(each.heading.startswith("libsym.Chat.undo(") for each in calls)
    assert not [each.heading for each in calls if "._" in each.heading.partition("(")[0] or not each.text.strip()]


def test_a_page_of_libsym_is_found_by_its_subject(asked):
    assert "libsym in event loops, notebooks, threads and forks" in " ".join(not_bold(asked("async")[1]).split())


@pytest.mark.parametrize(("topic", "hint"), [("rnu", "did you mean run?"), ("", "symphony help")])
def test_an_unknown_topic_names_what_is_near(topic, hint, asked):
    status, shown, said = asked(topic)
    assert (status, shown) == (1, "")
    assert said.startswith(f"symphony: the manual has nothing on {topic!r}: ")
    assert hint in said


def test_an_installation_has_its_pages_in_share_man_among_those_of_others(tmp_path, monkeypatch):
    share = tmp_path / "share" / "man"
    for page in [*Path(directories()[0]).glob("*.[1-8]")]:
        (share / f"man{page.suffix[1:]}").mkdir(parents=True, exist_ok=True)
        shutil.copy(page, share / f"man{page.suffix[1:]}")
    (share / "man1" / "kvm.1").write_text(".TH KVM 1\n")
    monkeypatch.setattr(manual, "__file__", str(tmp_path / "lib" / "symphony" / "manual.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = find_pages(directories())
    assert [(page.name, page.section) for page in found] == [(page.name, page.section) for page in PAGES]
    assert share / "man1" / "symphony-ps.1" in {each.file for each in (find_page(found, "kill"),) if each}


def test_without_pages_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(manual, "__file__", str(tmp_path / "lib" / "symphony" / "manual.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(NotFound, match="the manual is not installed"):
        find_pages(directories())


@pytest.mark.parametrize("page", [page for page in PAGES if not page.is_alias], ids=lambda page: page.file.name)
def test_plain_text_has_all_words_and_no_macro(page):
    text = plain_text(page.text())
    assert not [line for line in text.splitlines() if "\\f" in line or "\\(" in line or line.startswith(".")]
    if not shutil.which("mandoc"):
        pytest.skip("PLAIN TEXT NOT COMPARED: mandoc is not installed")
    command = ["mandoc", "-T", "utf8", "-O", "width=300", page.file]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    shown = not_bold(done.stdout)
    assert text.split() == shown.split("\n", 2)[2].rpartition("\nSymphony ")[0].split()
