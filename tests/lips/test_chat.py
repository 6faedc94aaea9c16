"""A conversation in a file: it outlives the daemon, a turn can be undone, and a copy can be talked to."""

import io
import os
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest

import libsym as sym
from lips.chat import Talk, prompted
from tests.lips.conftest import Lips
from tests.symphony.daemons import Daemon, a_daemon
from tests.symphony.test_run_terminal import Terminal

pytestmark = pytest.mark.slow
TURNS = ["My name is Ada.", "What is my name?"]
FORGOTTEN = "(forgotten)\n"


def answers(output):
    """Return the program's answers, line by line of its user's."""
    return output.split("> ")[1:-1]


def chat(lips, *lines, file="chat.kv", max_tokens=6):
    return answers(lips.run("chat", "--max-tokens", str(max_tokens), file, text="".join(f"{line}\n" for line in lines)))


@pytest.fixture
def said(monkeypatch, capsys):
    """Talks in this process: what the chat answers to lines."""

    def say(conversation, *lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        Talk(conversation, 6).go_on()
        return answers(capsys.readouterr().out)

    return say


def test_a_conversation_goes_on_after_the_daemon_was_restarted_as_if_it_had_not_been(tmp_path):
    """The weights of this model are random: the test is that not one bit of the context is lost."""
    with a_daemon(tmp_path, "--model", "tiny") as daemon:
        whole = chat(Lips(daemon), *TURNS, file="whole.kv")
        first = chat(Lips(daemon), TURNS[0])
        assert daemon.stop() == 0, daemon.log.read_text()
        daemon.process = Daemon(tmp_path, "--model", "tiny").process
        assert first + chat(Lips(daemon), TURNS[1]) == whole
        assert (daemon.mount / "chat.kv").read_bytes() == (daemon.mount / "whole.kv").read_bytes()


def test_undo_leaves_the_file_as_it_was_byte_for_byte_and_computes_nothing(lips, said, computed):
    before = chat(lips, TURNS[0])
    image = (lips.mount / "chat.kv").read_bytes()
    first = chat(lips, TURNS[1])
    assert (lips.mount / "chat.kv").read_bytes() != image
    with sym.Chat(sym.kv_open("chat.kv", "rw")) as conversation:
        assert computed(said, conversation, "/undo") == ([FORGOTTEN], 0)
    assert (lips.mount / "chat.kv").read_bytes() == image
    assert chat(lips, TURNS[1], "/undo", "/undo", TURNS[0]) == [*first, FORGOTTEN, FORGOTTEN, *before]


def test_a_copy_made_in_a_shell_or_by_fork_goes_on_by_itself(lips):
    first = chat(lips, TURNS[0], "/fork fork.kv")
    assert first[1] == "(kept as fork.kv)\n"
    subprocess.run(["cp", lips.mount / "chat.kv", lips.mount / "copy.kv"], check=True)
    image = (lips.mount / "chat.kv").read_bytes()
    assert (lips.mount / "fork.kv").read_bytes() == image
    second = chat(lips, TURNS[1], file="copy.kv")
    assert (lips.mount / "chat.kv").read_bytes() == image
    assert chat(lips, TURNS[1]) == chat(lips, TURNS[1], file="fork.kv") == second


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_shown_of_a_token_is_what_the_conversation_has(lips, whole):
    """The stop text begins within a token of several bytes: what comes before it in that is pending."""
    with sym.Chat(sym.kv_create()) as chat:
        answer = chat.ask("Why?", grammar=sym.Grammar.regex(r"I think\. Observation: yes"), stop="bservation:")
        pieces = answer.text()
        shown = "".join(pieces) if whole else next(pieces)
        answer.cancel()
        chat.settle()
        said = sym.detokenize([*chat.kv.read()[0], *chat.pending])
        assert shown.endswith(" O") or not whole
        assert said.endswith("<|im_start|>assistant\n" + shown)


def test_who_comes_second_goes_on_in_a_fork_if_he_wants(lips):
    chat(lips, TURNS[0], file="busy.kv")
    image = (lips.mount / "busy.kv").read_bytes()
    with sym.kv_open("busy.kv", "rw") as kv, kv.lock():
        lines = [TURNS[1], "busy.kv", "other.kv", "/undo"]
        said = lips.run("chat", "--max-tokens", "6", "busy.kv", text="".join(f"{line}\n" for line in lines))
        assert f"busy.kv is locked by pid {sym.getpid()} (" in said
        assert "choose another" in said
        assert said.endswith("(forgotten)\n> ")
        alone = lips.finish("chat", "busy.kv", text=f"{TURNS[1]}\n")
        assert (alone.returncode, "busy.kv is locked by pid" in alone.stderr) == (1, True)
        assert (lips.mount / "busy.kv").read_bytes() == (lips.mount / "other.kv").read_bytes() == image


def test_what_cannot_be_done_is_told_and_the_conversation_goes_on(lips, said):
    names = ["a.kv", "a.kv", "no/dir.kv", "x" * 300]
    lines = ["/undo", "/fork", "/forget", TURNS[0], *(f"/fork {name}" for name in names), TURNS[1]]
    with sym.Chat(sym.kv_create("chat.kv")) as conversation, sym.Chat(sym.kv_create()) as plain:
        told = said(conversation, *lines)
        assert [told[3], told[8]] == said(plain, *TURNS, "/quit", "never read")
    assert told[0] == "(chat.kv: there is no turn to undo)\n"
    assert told[1].startswith("(/undo forgets the last question")
    assert told[2] == f"(/forget is no command: {told[1][1:]}"
    assert [told[5][:7], told[6][:12], "255 bytes" in told[7]] == ["(a.kv: ", "(no/dir.kv: ", True]


def test_a_chat_on_a_terminal_can_be_interrupted_and_shows_what_was_said_before(lips, tmp_path):
    place = SimpleNamespace(directory=tmp_path, environment=lips.daemon.environment)
    terminal = Terminal(place, "run", "chat", "long.kv")

    def types(line, *shown):
        terminal.types(line)
        for text in shown:
            terminal.shows(text)

    terminal.shows("> ")
    types(b"Write a long tale of the sea.\r", "\n", " ")
    types(b"\x03", "> ")
    for _ in range(20):  # what is typed while the program changes the terminal's mode is discarded
        terminal.types(b"half a line\x03")
        while select.select([terminal.master], [], [], 1)[0]:
            terminal.shown += os.read(terminal.master, 4096).decode()
        if "> " in terminal.shown:
            break
    terminal.shows("> ")
    types(b"/stats\r", "tokens of the context are used", "> ")
    types(b"/system You are a pirate.\r", "next question", "> ")
    types(b"/quit\r")
    assert terminal.status() == 0
    with sym.Chat(sym.kv_open("long.kv", "rw")) as chat:
        first = sym.detokenize(chat.kv.read()[0]).rpartition("assistant\n")[2].split()[0]
    terminal = Terminal(place, "run", "chat", "long.kv")
    for text in ("Write a long tale of the sea.", first, "> "):
        terminal.shows(text)
    types(b"\x1b[A", "Write a long tale of the sea.")
    types(b"\x15\x04")
    assert terminal.status() == 0


def test_ctrl_c_can_be_held_down_at_the_prompt(monkeypatch, capsys):
    keys = iter([*[KeyboardInterrupt] * 2 * sys.getrecursionlimit(), EOFError])

    def interrupted(_prompt):
        raise next(keys)

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert prompted("> ", at_end="/quit") == "/quit"


def test_a_system_message_and_a_full_context_are_part_of_the_conversation(lips, said):
    with sym.Chat(sym.kv_create()) as conversation:
        said(conversation, TURNS[0], "/system You are a pirate.", TURNS[1], "/undo", TURNS[1], TURNS[0])
        text = sym.detokenize(conversation.kv.read()[0])
        assert text.count("<|im_start|>system\nYou are a pirate.") == 1, "also for a question in place of the first"
        told = said(conversation, "word " * 9000, "/undo")
    assert "beyond the model's context of" in told[0]
    assert "piece by piece" in told[0]
    assert told[1] == FORGOTTEN
    command, goes_on = ("chat", "--max-tokens", "4", "--system", "You are a pirate."), "(the conversation goes on as it"
    assert not lips.run(*command, text=f"{TURNS[0]}\n").startswith(goes_on)
    assert lips.run(*command, text="").startswith(goes_on)


def test_a_conversation_that_fills_the_context_goes_on_by_the_command_that_chat_names(tiny):
    whole, cut, told, stats = chat(tiny, "Who?", "And I?", "What?", "/stats", max_tokens=2500)
    assert [answer.endswith("\n(the context is full: /undo makes room)\n") for answer in (whole, cut)] == [False, True]
    assert "(symphony run compact FILE NEW)" in told
    assert stats == "(4,096 of 4,096 tokens of the context are used)\n"
    done = tiny.run("compact", "chat.kv", "new.kv", "--keep", "1", "--max-tokens", "9")
    assert done.startswith("chat.kv has 4096 tokens, new.kv ")
    (answer,) = chat(tiny, "Who?", file="new.kv")
    assert not answer.startswith("(")


def test_ask_takes_a_question_from_its_input_a_system_message_and_a_temperature(lips):
    spoken = lips.run("ask", "--kv", "a.kv", "--system", "Be brief.", "--max-tokens", "4", "-", text=TURNS[0])
    assert spoken == lips.run("ask", "--system", "Be brief.", "--max-tokens", "4", TURNS[0])
    assert "Be brief." in sym.detokenize(sym.kv_read("a.kv")[0])
    assert "the conversation in it by --resume" in lips.refused("ask", "--kv", "a.kv", TURNS[1])
    assert len({lips.run("ask", "--temperature", "2", "--max-tokens", "8", TURNS[1]) for _ in range(4)}) > 1
    assert "piece by piece" in lips.refused("ask", "--kv", "none.kv", "word " * 9000)
    assert not (lips.mount / "none.kv").exists()
