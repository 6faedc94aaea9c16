"""A conversation on a file (`Chat`): what the file holds after each turn, whoever else talks in it."""

import subprocess
import sys
from typing import Any

import anyio
import pytest

import libsym as sym
from tests.symphony.launchers import eventually

pytestmark = pytest.mark.usefixtures("shared")


def conversation(*turns):
    """The text of questions and answers as the model's template has it."""
    text = "<bos>"
    for question, answer in turns:
        text += f"user: {question}\nassistant: {answer}\n"
    return text.removesuffix("\n")


def new(path=None, *words, **how):
    return sym.Chat(sym.kv_create(path), *words, **how)


def opened(path):
    return sym.Chat(sym.kv_open(path, "a"))


def say(chat, question="One?", max_tokens=4, **how):
    return chat.ask(question, max_tokens=max_tokens, **how).full_text()


def text_of(kv, pending=()):
    return sym.detokenize([*kv.read()[0], *pending])


def held(chat):
    return text_of(chat.kv, chat.pending)


def kept(path):
    return sym.detokenize(sym.kv_read(path)[0])


def with_no_turn(chat):
    with pytest.raises(sym.Invalid, match="no turn to undo"):
        chat.undo()


def test_a_conversation_goes_on_behind_the_last_answer_as_if_no_run_had_ended():
    questions = ("One?", "Two?", "Three?")
    with new() as chat:
        whole = [say(chat, question) for question in questions]
        assert held(chat) == conversation(*zip(questions, whole, strict=True))
    parts = []
    for question in questions:
        with opened("chat.kv") as chat:
            parts.append(say(chat, question))
    assert parts == whole
    assert kept("chat.kv") == conversation(*zip(questions, whole, strict=True))


async def test_a_chat_in_an_event_loop_says_what_one_in_a_thread_says(backend):
    plain = new()
    expected = [say(plain, question) for question in ("One?", "Two?")]
    async with sym.aio.Chat(await sym.aio.kv_create()) as chat:
        answers = [await (await chat.ask(question, max_tokens=4)).full_text() for question in ("One?", "Two?")]
        await chat.undo()
        fork = await chat.fork()
        assert [*answers, await (await fork.ask("Two?", max_tokens=4)).full_text()] == [*expected, expected[1]]


def test_turns_with_one_seed_draw_differently_and_each_can_be_had_again():
    def ask(chat):
        sampler = sym.Sampler(temperature=30.0, seed=3)
        answer = chat.ask("Digits?", sampler=sampler, max_tokens=20, stop_at_end=False)
        return answer.full_text() and list(answer.tokens)

    with opened("seeded.kv") as chat:
        first, second = ask(chat), ask(chat)
        assert first != second
        chat.undo()
        assert ask(chat) == second
        fork = chat.fork()
    with opened("seeded.kv") as later:
        assert later.pending == []
        assert ask(later) == ask(fork) not in (first, second)


def test_the_messages_at_the_top_are_given_once():
    chat = new(None, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    say(chat, [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "One?"}])
    say(chat, "Two?")
    text = text_of(chat.kv)
    assert text.startswith("<bos>system: Be brief.\nuser: Hi\nassistant: Hello\nuser: One?\nassistant: ")
    assert text.count("system") == 1
    say(chat, "a<eos>", begin="<eos>")
    assert 257 not in chat.kv.read()[0], "the user ends no turn"


# ---- undo


@pytest.mark.parametrize(
    "messages", [(), "Be brief.", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]], ids=str
)
def test_an_undone_turn_leaves_the_file_as_it_was_and_the_first_is_undone_with_the_top_of_the_conversation(messages):
    with new("undo.kv", messages) as chat:
        first = say(chat)
        before = held(chat)
        second = say(chat, "Two?")
        chat.undo()
        assert held(chat) == before
        assert say(chat, "Two?") == second
    with sym.Chat(sym.kv_open("undo.kv", "rw"), messages) as later:
        later.undo()
        later.undo()
        assert later.kv.len() == 0
        with_no_turn(later)
        assert say(later) == first
    path: Any = "undo.kv"
    with pytest.raises(sym.Invalid, match="kv_open"):
        sym.Chat(path)
    with pytest.raises(sym.NoAccess):
        sym.Chat(sym.kv_open("undo.kv")).ask("One?").full_text()


def test_undo_goes_back_to_the_user_whatever_came_after_the_question_and_to_nothing_where_no_user_began():
    chat = new()
    say(chat)
    before = held(chat)
    say(chat, "Two?", begin="Well, ")
    say(chat, "42", role="tool")
    chat.undo()
    assert held(chat) == before
    chat = new()
    say(chat, "Be brief.", role="system")
    say(chat, "42", role="tool")
    chat.undo()
    assert held(chat) == ""


def test_a_turn_is_undone_where_the_file_began_without_the_top_of_this_conversation():
    with new(None, "Be brief.") as chat:
        sym.kv_write(chat.kv, sym.chat_tokens([{"role": "user", "content": "One?"}]))
        chat.undo()
        assert chat.kv.len() == 0


def test_where_turns_began_is_noted_with_the_file_and_known_to_a_later_process(shared):
    """A handbook begins the conversation, and a question has three messages."""
    handbook = sym.tokenize("A refund is possible within thirty days. " * 5)
    sym.kv_write(kv := sym.kv_create("noted.kv"), handbook)
    kv.close()
    several = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    states = []
    with opened("noted.kv") as chat:
        for question in ("First?", [*several, {"role": "user", "content": "Two?"}]):
            states.append(held(chat))
            say(chat, question)
    (shared.mount / "copy.kv").write_bytes((shared.mount / "noted.kv").read_bytes())
    sym.kv_fork("noted.kv", "fork.kv").close()
    for name in ("noted.kv", "copy.kv", "fork.kv"):
        for state in reversed(states):
            with opened(name) as later:
                later.undo()
                assert text_of(later.kv) == state, name
        with opened(name) as later:
            with_no_turn(later)
            assert later.kv.read()[0] == handbook


def test_a_turn_that_failed_is_not_noted_whatever_is_written_in_its_place():
    with new() as chat:
        say(chat)
        assert say(chat, "Two?", deadline=1e-6) == ""
        chat.settle()
        sym.kv_write(chat.kv, [*chat.pending, *sym.tokenize(" And a handbook.")])
        assert sym.kv_stat(chat.kv).turns == [0]


def test_what_others_append_is_no_part_of_the_turn_that_is_noted():
    """Then the file's tokens say where its last turn begins, as they do of files that nothing is noted with."""
    with new(None, "Be brief.") as chat:
        say(chat)
        assert sym.kv_stat(chat.kv).turns == [0]
        before = held(chat)
        turn = sym.chat_tokens([{"role": "user", "content": "Two?"}], after_answer=True)
        sym.generate(chat.kv, [*chat.pending, *turn], max_tokens=3).full_text()
        assert sym.kv_stat(chat.kv).turns == []
        with sym.Chat(chat.kv.fork(), "Be brief.") as other:
            other.undo()
            assert text_of(other.kv) == before
            other.undo()
            assert other.kv.len() == 0, "the top is part of the first turn"


# ---- answers that end early


def test_an_answer_that_is_interrupted_stays_as_far_as_it_was_read():
    chat = new()
    answer = chat.ask("One?")
    said = sym.detokenize([next(answer), next(answer)])
    say(chat, "Two?")
    assert answer.finish == "cancelled"
    assert len(answer.tokens) >= 2
    assert text_of(chat.kv).startswith(f"<bos>user: One?\nassistant: {said}\nuser: Two?\n")


def test_an_interrupted_answer_stays_as_far_as_its_text_was_read():
    """Text that may be the beginning of a stop text was held back."""
    with new() as chat:
        answer = chat.ask("One?", grammar=sym.Grammar.regex("Yes[.]\nObserva.{300}"), stop="\nObservation:")
        pieces = answer.text()
        shown = next(pieces)
        while len(answer.came(0, 99)[0]) < 12:  # forced: "Yes.\nObserva" has come
            shown += next(pieces)
        answer.cancel()
        chat.settle()
        assert held(chat) == conversation(("One?", shown))


def test_a_turn_of_which_nothing_was_read_or_came_was_never_asked():
    chat = new("unread.kv")
    say(chat)
    before = held(chat)
    late = chat.ask("Two? " * 300, deadline=1e-6)
    assert (late.full_text(), late.finish) == ("", "deadline")
    assert held(chat) == before
    unread = chat.ask("Three?")
    while not unread.is_over and chat.kv.len() < len(before) + 20:
        pass  # some of it is in the file
    third = say(chat, "Four?")
    assert held(chat) == f"{before}\nuser: Four?\nassistant: {third}"
    say(chat, "Five? " * 300, deadline=1e-6)
    chat.close()
    assert kept("unread.kv") == f"{before}\nuser: Four?\nassistant: {third}"


def test_a_question_that_fails_at_once_was_never_asked():
    chat, other = new(), new()
    for each in (chat, other):
        say(each)
    before = held(chat)
    with pytest.raises(sym.Invalid):
        say(chat, "Two?", grammar=sym.Grammar.regex("("))
    assert held(chat) == before
    assert say(chat, "Three?") == say(other, "Three?")
    assert chat.kv.read() == other.kv.read()


def test_an_answer_that_fails_in_the_middle_stays_as_far_as_it_came(shared):
    (shared.mount / "small").mkdir()
    shared.shell(f"setfattr -n user.kv.quota -v 64K {shared.mount}/small")
    with new("small/chat.kv") as chat:
        with pytest.raises(sym.OverQuota):
            say(chat, max_tokens=900)
        assert held(chat).startswith("<bos>user: One?\nassistant: ")
        assert len(chat.pending) <= 1
        chat.undo()
        assert chat.kv.len() == 0


def test_an_answer_that_fills_the_context_is_kept_and_its_file_is_closed():
    with new("full.kv") as chat:
        said = say(chat, max_tokens=10_000)
    assert chat.kv.closed
    assert conversation(("One?", said)).startswith(kept("full.kv"))
    assert len(kept("full.kv")) > 900


@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
def test_a_finished_answer_is_kept_by_a_block_that_an_exception_or_a_cancellation_ends(backend):
    yes = sym.Grammar.regex("yes")

    def talk():
        with new("kept.kv") as chat:
            say(chat, grammar=yes)
            raise KeyboardInterrupt

    async def talk_in_a_task():
        with anyio.CancelScope() as scope:
            async with sym.aio.Chat(await sym.aio.kv_create("kept.kv")) as chat:
                await (await chat.ask("One?", grammar=yes)).full_text()
                scope.cancel()
                await anyio.sleep_forever()
        assert chat.kv.closed

    if backend:
        anyio.run(talk_in_a_task, backend=backend)
    else:
        with pytest.raises(KeyboardInterrupt):
            talk()
    assert kept("kept.kv") == conversation(("One?", "yes"))


def test_a_stop_text_that_nobody_was_shown_is_no_part_of_the_conversation():
    how = {"grammar": sym.Grammar.regex("Yes[.]\nObservation: no"), "stop": "\nObservation:"}
    with new() as chat:
        answer = chat.ask("One?", **how)
        assert answer.full_text() == "Yes."
        assert held(chat) == conversation(("One?", "Yes."))
        assert sym.detokenize(answer.tokens) == "Yes.\nObservation:"
        assert chat.ask("Two?", keep_stop=True, **how).full_text() == "Yes."
        assert held(chat) == conversation(("One?", "Yes."), ("Two?", "Yes.\nObservation:"))
        for token in chat.ask("Three?", **how):
            if token == ord(":"):
                break  # what comes next is not looked at
        assert say(chat, "Four?")
        assert "assistant: Yes.\nuser: Four?" in text_of(chat.kv)


@pytest.mark.parametrize("backend", ["asyncio"])
async def test_a_stop_text_is_cut_off_where_a_task_was_ended_before_its_generation_did_that(backend):
    async with sym.aio.Chat(await sym.aio.kv_create("stopped.kv")) as chat:
        answer = await chat.ask("One?", grammar=sym.Grammar.regex("Yes[.]\nObservation: no"), stop="\nObservation:")
        while not answer.is_over:
            await answer.fetch()
    assert kept("stopped.kv") == conversation(("One?", "Yes."))


# ---- forks


def test_a_fork_goes_on_by_itself_also_beside_an_answer_under_way():
    chat = new()
    say(chat)
    before = held(chat)
    with chat.fork("fork.kv") as fork:
        answer = say(fork, "Two?")
    assert held(chat) == before
    assert kept("fork.kv") == f"{before}\nuser: Two?\nassistant: {answer}"
    answer = chat.ask("Two?", max_tokens=300)
    first = next(answer)
    assert held(chat.fork()) == before
    assert len([first, *answer]) == 300
    assert answer.finish == "length"


def test_a_fork_by_another_handle_ends_with_the_last_ended_turn():
    """`Chat.fork` ends there, too: `symphony run chat` offers it where another talks."""
    with new("talked.kv") as chat, sym.Chat(sym.kv_open("talked.kv", "rw")) as other:
        first = say(chat)
        ended, finish = held(chat), None

        def forks():
            return [text_of(other.fork().kv), text_of(sym.kv_fork("talked.kv", ended=True))]

        while finish != "cancelled":  # else it came to its end before it was cancelled: forks may have that turn
            if finish:
                chat.undo()
            answer = chat.ask("Two?", max_tokens=3000, stop_at_end=False)
            said = [next(answer) for _ in range(40)]
            whole, found = text_of(sym.kv_fork("talked.kv")), forks()
            answer.cancel()
            finish = answer.finish
        assert whole.startswith(f"{ended}\nuser: Two?\nassistant: ")
        assert found == [ended, ended]
        assert forks() == [ended, ended], "what was not read may be cut still"
        chat.settle()
        second = held(chat)
        assert second == conversation(("One?", first), ("Two?", sym.detokenize(said)))
        say(chat, "Three?")
        assert all(text.startswith(second) and "Three?" in text for text in forks()), "it has ended by itself"
        assert text_of(chat.fork().kv, chat.pending) == held(chat)


# ---- others in the same file

HOLDER = """
import sys
import libsym as sym
chat = sym.Chat(sym.kv_open("talk.kv", "a"))
answer = chat.ask("Mine?", max_tokens=int(sys.argv[1]), stop_at_end=False)
next(answer)
print("talks", flush=True)
sys.stdin.read()
chat.close()
"""


@pytest.fixture
def holder(shared):
    """Start another program that has asked a question in talk.kv, whose answer it does not read to its end."""
    processes = []

    def start(max_tokens=4):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(max_tokens)], env=shared.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout
        assert process.stdout.readline() == "talks\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_one_chat_at_a_time_talks_in_a_file_and_another_is_told_which(holder):
    with opened("talk.kv") as first:
        said = say(first)
    first_turn = kept("talk.kv")
    process = holder()
    with opened("talk.kv") as chat:
        for action in (chat.undo, lambda: chat.ask("Two?")):
            with pytest.raises(sym.WouldBlock, match=rf"talk.kv is locked by pid {process.pid} \(python"):
                action()
        with chat.fork() as fork:  # where the other has not ended its turn, as far as that has come
            assert text_of(fork.kv).startswith(first_turn)
        process.communicate("")
        assert process.returncode == 0
        chat.undo()  # of the other's turn, which was whole
        assert held(chat) == first_turn
        again = say(chat, "Two?")
        assert held(chat) == conversation(("One?", said), ("Two?", again))


def test_a_holder_that_is_killed_leaves_the_file_to_the_next(holder):
    process = holder(max_tokens=900)
    process.kill()
    process.wait()

    def is_undone():
        try:
            chat.undo()
        except sym.WouldBlock:
            return False
        return True

    with opened("talk.kv") as chat:
        eventually(is_undone)
        assert chat.kv.len() == 0
        answer = say(chat, "Mine?")
        assert held(chat) == conversation(("Mine?", answer))


def test_a_lock_of_the_program_is_left_as_it_is():
    kv, other = sym.kv_create("mine.kv"), sym.kv_open("mine.kv")
    chat = sym.Chat(kv)
    with kv.lock():
        first = say(chat)
    sym.kv_lock(other, blocking=False)  # it went with the block
    with pytest.raises(sym.WouldBlock, match=r"mine\.kv is locked by pid"):
        chat.ask("Two?")
    other.unlock()
    second = say(chat, "Two?")
    with pytest.raises(sym.WouldBlock):
        sym.kv_lock(other, blocking=False)
    assert held(chat) == conversation(("One?", first), ("Two?", second))
    chat.close()
    sym.kv_lock(other, blocking=False)
    with sym.kv_create("shared.kv") as shared:
        sym.kv_lock(shared, shared=True)
        say(sym.Chat(shared))
        sym.kv_lock(sym.kv_open("shared.kv"), shared=True, blocking=False)  # as the program has it


def test_what_was_pending_has_no_place_where_another_has_gone_on(caplog):
    chat = new("taken.kv")
    with chat.kv.lock():
        say(chat)
    with opened("taken.kv") as other:
        say(other, "Other?")
    before = text_of(chat.kv)
    assert say(chat, "Two?")
    assert text_of(chat.kv).startswith(f"{before}\nuser: Two?\nassistant: ")
    assert "without the last 1 tokens" in caplog.text


@pytest.mark.parametrize("by_another", [False, True])
def test_a_cut_by_the_program_or_by_another_handle_ends_what_is_pending(caplog, by_another):
    with new("cut.kv") as chat, sym.kv_open("cut.kv", "rw") as other:
        say(chat)
        assert chat.pending
        sym.kv_truncate(other if by_another else chat.kv, 5)
        assert bool(chat.pending) == by_another, "of that it hears with the next question"
        second = say(chat, "Two?")
        assert held(chat) == f"<bos>user\nuser: Two?\nassistant: {second}"
    assert ("without the last 1 tokens" in caplog.text) == by_another


def test_two_chats_on_one_handle_exclude_each_other():
    for kv in (sym.kv_create(), sym.kv_create("both.kv")):
        first, second = sym.Chat(kv), sym.Chat(kv)
        say(first)
        for action in (second.undo, lambda second=second: second.ask("Two?")):
            with pytest.raises(sym.WouldBlock, match="another conversation goes on by this handle"):
                action()
        del first
        assert say(second, "Two?")
        second.close()
