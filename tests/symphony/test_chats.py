"""A conversation on a file (`Chat`), the loop of a program's own (`decode`), how likely a text is (`score`)."""

import math
import subprocess
import sys
import time

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import libsym as sym


def conversation(*turns):
    """The text of questions and answers as the model's template has it."""
    text = "<bos>"
    for question, answer in turns:
        text += f"user: {question}\nassistant: {answer}\n"
    return text.removesuffix("\n")


def text_of(kv, pending=()):
    return sym.detokenize([*kv.read()[0], *pending])


def test_each_question_goes_on_behind_the_last_answer(connected):
    with sym.kv_create() as kv:
        chat = sym.Chat(kv)
        answers = [chat.ask(question, max_tokens=5).full_text() for question in ("One?", "Two?", "Three?")]
        expected = conversation(*zip(("One?", "Two?", "Three?"), answers, strict=True))
        assert text_of(kv, chat.pending) == expected


def test_a_conversation_of_an_earlier_run_goes_on_as_if_it_had_never_ended(connected):
    with sym.Chat(sym.kv_create()) as chat:
        whole = [chat.ask(question, max_tokens=6).full_text() for question in ("One?", "Two?")]
    with sym.Chat(sym.kv_open("chat.kv", "a")) as first:
        parts = [first.ask("One?", max_tokens=6).full_text()]
    with sym.Chat(sym.kv_open("chat.kv", "a")) as second:
        parts.append(second.ask("Two?", max_tokens=6).full_text())
    assert parts == whole
    assert sym.detokenize(sym.kv_read("chat.kv")[0]) == conversation(("One?", whole[0]), ("Two?", whole[1]))


def test_turns_with_one_seed_draw_differently_and_each_can_be_had_again(connected):
    warm = sym.Sampler(temperature=30.0, seed=3)

    def ask(chat):
        answer = chat.ask("Digits?", sampler=warm, max_tokens=20, stop_at_end=False)
        return answer.full_text() and list(answer.tokens)

    with sym.Chat(sym.kv_open("seeded.kv", "a")) as chat:
        first, second = ask(chat), ask(chat)
        assert first != second
        chat.undo()
        assert ask(chat) == second
        fork = chat.fork()
    with sym.Chat(sym.kv_open("seeded.kv", "a")) as later:
        assert later.pending == []
        assert ask(later) == ask(fork) not in (first, second)
    sym.kv_remove("seeded.kv")


def test_the_messages_at_the_top_are_given_once(connected):
    chat = sym.Chat(sym.kv_create(), [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    chat.ask([{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "One?"}], max_tokens=2).full_text()
    chat.ask("Two?", max_tokens=2).full_text()
    text = text_of(chat.kv)
    assert text.startswith("<bos>system: Be brief.\nuser: Hi\nassistant: Hello\nuser: One?\nassistant: ")
    assert text.count("system") == 1


def test_an_undone_turn_leaves_the_file_as_it_was(connected):
    with sym.Chat(sym.kv_create("undo.kv")) as chat:
        chat.ask("One?", max_tokens=5).full_text()
        before = chat.kv.read(), chat.pending
        second = chat.ask("Two?", max_tokens=5).full_text()
        chat.undo()
        assert text_of(chat.kv, chat.pending) == sym.detokenize([*before[0][0], *before[1]])
        assert chat.ask("Two?", max_tokens=5).full_text() == second
    with sym.Chat(sym.kv_open("undo.kv", "rw")) as later:
        later.undo()
        later.undo()
        assert later.kv.len() == 0
        with pytest.raises(sym.Invalid, match="no turn to undo"):
            later.undo()
        assert later.ask("One?", max_tokens=5).full_text()


@pytest.mark.parametrize(
    "messages", ["Be brief.", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]]
)
def test_undoing_the_first_turn_undoes_the_top_of_the_conversation_with_it(connected, messages):
    chat = sym.Chat(sym.kv_create(), messages)
    first = chat.ask("One?", max_tokens=4).full_text()
    chat.ask("Two?", max_tokens=4).full_text()
    chat.undo()
    chat.undo()
    assert chat.kv.len() == 0
    assert chat.ask("One?", max_tokens=4).full_text() == first


def test_undo_goes_back_to_the_user_whatever_came_after_the_question(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("One?", max_tokens=2).full_text()
    before = text_of(chat.kv, chat.pending)
    chat.ask("Two?", begin="Well, ", max_tokens=2).full_text()
    chat.ask("42", role="tool", max_tokens=2).full_text()
    chat.undo()
    assert text_of(chat.kv, chat.pending) == before


def test_where_turns_began_is_noted_with_the_file_and_known_to_a_later_process(connected, daemon):
    """A handbook begins the conversation, and a question has three messages."""
    handbook = sym.tokenize("A refund is possible within thirty days. " * 5)
    sym.kv_write(kv := sym.kv_create("noted.kv"), handbook)
    kv.close()
    several = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    states = []
    with sym.Chat(sym.kv_open("noted.kv", "rw")) as chat:
        for question in ("First?", [*several, {"role": "user", "content": "Two?"}]):
            states.append(text_of(chat.kv, chat.pending))
            chat.ask(question, max_tokens=4).full_text()
    image = (daemon.mount / "noted.kv").read_bytes()
    (daemon.mount / "copy.kv").write_bytes(image)
    sym.kv_fork("noted.kv", "fork.kv").close()
    for name in ("noted.kv", "copy.kv", "fork.kv"):
        for state in reversed(states):
            with sym.Chat(sym.kv_open(name, "rw")) as later:
                later.undo()
                assert text_of(later.kv) == state, name
        with sym.Chat(sym.kv_open(name, "rw")) as later:
            with pytest.raises(sym.Invalid, match="no turn to undo"):
                later.undo()
            assert later.kv.read()[0] == handbook
        sym.kv_remove(name)


def test_a_conversation_that_no_user_begins_has_a_turn_all_the_same(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("Be brief.", role="system", max_tokens=3).full_text()
    chat.ask("42", role="tool", max_tokens=3).full_text()
    chat.undo()
    assert (chat.kv.len(), chat.pending) == (0, [])


def test_a_turn_that_failed_is_not_noted_whatever_is_written_in_its_place(connected):
    with sym.Chat(sym.kv_create()) as chat:
        chat.ask("One?", max_tokens=4).full_text()
        assert chat.ask("Two?", deadline=1e-6).full_text() == ""
        chat.settle()
        sym.kv_write(chat.kv, [*chat.pending, *sym.tokenize(" And a handbook.")])
        assert sym.kv_stat(chat.kv).turns == [0]


def test_what_others_append_is_no_part_of_the_turn_that_is_noted(connected):
    """Then the file's tokens say where its last turn begins, as they do of files that nothing is noted with."""
    with sym.Chat(sym.kv_create()) as chat:
        chat.ask("One?", max_tokens=4).full_text()
        assert sym.kv_stat(chat.kv).turns == [0]
        before = text_of(chat.kv, chat.pending)
        turn = sym.chat_tokens([{"role": "user", "content": "Two?"}], after_answer=True)
        sym.generate(chat.kv, [*chat.pending, *turn], max_tokens=3).full_text()
        assert sym.kv_stat(chat.kv).turns == []
        with sym.Chat(chat.kv.fork()) as other:
            other.undo()
            assert text_of(other.kv) == before


def test_a_file_without_a_turn_stays_as_it_is_when_the_last_turn_is_undone(connected):
    handbook = sym.tokenize("A refund is possible within thirty days.")
    sym.kv_write(sym.kv_create("handbook.kv"), handbook)
    for questions in ((), ("One?", "Two?")):
        with sym.Chat(sym.kv_open("handbook.kv", "rw"), "Be brief.") as chat:
            for question in questions:
                chat.ask(question, max_tokens=3).full_text()
            for _ in questions:
                chat.undo()
            with pytest.raises(sym.Invalid, match="no turn to undo"):
                chat.undo()
        assert sym.kv_read("handbook.kv")[0] == handbook
    sym.kv_remove("handbook.kv")


def test_a_fork_goes_on_by_itself(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("One?", max_tokens=3).full_text()
    before = text_of(chat.kv, chat.pending)
    fork = chat.fork("fork.kv")
    answer = fork.ask("Two?", max_tokens=3).full_text()
    fork.close()
    assert text_of(chat.kv, chat.pending) == before
    assert sym.detokenize(sym.kv_read("fork.kv")[0]) == f"{before}\nuser: Two?\nassistant: {answer}"


def test_an_answer_that_is_interrupted_stays_as_far_as_it_was_read(connected):
    chat = sym.Chat(sym.kv_create())
    answer = chat.ask("One?")
    said = sym.detokenize([next(answer), next(answer)])
    chat.ask("Two?", max_tokens=2).full_text()
    assert answer.finish == "cancelled"
    assert len(answer.tokens) >= 2
    assert text_of(chat.kv).startswith(f"<bos>user: One?\nassistant: {said}\nuser: Two?\n")


def test_a_turn_of_which_nothing_was_read_or_came_was_never_asked(connected):
    chat = sym.Chat(sym.kv_create("unread.kv"))
    chat.ask("One?", max_tokens=4).full_text()
    before = text_of(chat.kv, chat.pending)
    late = chat.ask("Two? " * 300, deadline=1e-6)
    assert (late.full_text(), late.finish) == ("", "deadline")
    assert text_of(chat.kv, chat.pending) == before
    unread = chat.ask("Three?")
    while not unread.is_over and chat.kv.len() < len(before) + 20:
        pass  # some of it is in the file
    third = chat.ask("Four?", max_tokens=3).full_text()
    assert text_of(chat.kv, chat.pending) == f"{before}\nuser: Four?\nassistant: {third}"
    chat.ask("Five? " * 300, deadline=1e-6).full_text()
    chat.close()
    assert sym.detokenize(sym.kv_read("unread.kv")[0]) == f"{before}\nuser: Four?\nassistant: {third}"
    sym.kv_remove("unread.kv")


def test_a_program_s_own_cut_ends_what_is_pending(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("One?", max_tokens=4).full_text()
    sym.kv_truncate(chat.kv, 5)
    assert chat.pending == []
    second = chat.ask("Two?", max_tokens=2).full_text()
    assert text_of(chat.kv, chat.pending) == f"<bos>user\nuser: Two?\nassistant: {second}"


def test_a_fork_leaves_an_answer_under_way_alone_and_is_as_the_conversation_was_before(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("One?", max_tokens=4).full_text()
    before = text_of(chat.kv, chat.pending)
    answer = chat.ask("Two?", max_tokens=300)
    first = next(answer)
    fork = chat.fork()
    assert text_of(fork.kv, fork.pending) == before
    assert len([first, *answer]) == 300
    assert answer.finish == "length"


def test_a_fork_by_another_handle_ends_with_the_last_ended_turn(connected):
    """`Chat.fork` ends there, too: `symphony run chat` offers it where another talks."""
    with sym.Chat(sym.kv_create("talked.kv")) as chat, sym.Chat(sym.kv_open("talked.kv", "rw")) as other:
        first = chat.ask("One?", max_tokens=4).full_text()
        ended = text_of(chat.kv, chat.pending)

        def forks():
            return [text_of(other.fork().kv), text_of(sym.kv_fork("talked.kv", ended=True))]

        answer = chat.ask("Two?", max_tokens=900, stop_at_end=False)
        said = [next(answer) for _ in range(40)]
        assert text_of(sym.kv_fork("talked.kv")).startswith(f"{ended}\nuser: Two?\nassistant: ")
        assert forks() == [ended, ended]
        answer.cancel()
        assert forks() == [ended, ended], "what was not read may be cut still"
        chat.settle()
        second = text_of(chat.kv, chat.pending)
        assert second == conversation(("One?", first), ("Two?", sym.detokenize(said)))
        chat.ask("Three?", max_tokens=4).full_text()
        assert all(text.startswith(second) and "Three?" in text for text in forks()), "it has ended by itself"
        assert text_of(chat.fork().kv, chat.pending) == text_of(chat.kv, chat.pending)
    sym.kv_remove("talked.kv")


def test_an_answer_that_fills_the_context_is_kept_and_its_file_is_closed(connected):
    with sym.Chat(sym.kv_create("full.kv")) as chat:
        said = chat.ask("One?", max_tokens=10_000).full_text()
    assert chat.kv.closed
    held = sym.detokenize(sym.kv_read("full.kv")[0])
    assert f"<bos>user: One?\nassistant: {said}".startswith(held)
    assert len(held) > 900
    sym.kv_remove("full.kv")


def test_a_finished_answer_is_kept_by_a_block_that_an_exception_ends(connected):
    def talk():
        with sym.Chat(sym.kv_create("kept.kv")) as chat:
            chat.ask("One?", grammar=sym.Grammar.regex("yes")).full_text()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk()
    assert sym.detokenize(sym.kv_read("kept.kv")[0]) == "<bos>user: One?\nassistant: yes"
    sym.kv_remove("kept.kv")


def test_a_task_that_is_cancelled_keeps_its_finished_answer(connected):
    async def talk():
        with anyio.CancelScope() as scope:
            async with sym.aio.Chat(await sym.aio.kv_create("task.kv")) as chat:
                answer = await chat.ask("One?", grammar=sym.Grammar.regex("yes"))
                await answer.full_text()
                scope.cancel()
                await anyio.sleep_forever()
        assert chat.kv.closed

    anyio.run(talk)
    assert sym.detokenize(sym.kv_read("task.kv")[0]) == "<bos>user: One?\nassistant: yes"
    sym.kv_remove("task.kv")


def test_a_question_that_fails_at_once_was_never_asked(connected):
    chat, other = sym.Chat(sym.kv_create()), sym.Chat(sym.kv_create())
    for each in (chat, other):
        each.ask("One?", max_tokens=4).full_text()
    before = chat.kv.read(), chat.pending
    with pytest.raises(sym.Invalid):
        chat.ask("Two?", grammar=sym.Grammar.regex("(")).full_text()
    assert (chat.kv.read(), chat.pending) == before
    third = chat.ask("Three?", max_tokens=4).full_text()
    assert third == other.ask("Three?", max_tokens=4).full_text()
    assert chat.kv.read() == other.kv.read()


def test_an_answer_that_fails_in_the_middle_stays_as_far_as_it_came(daemon, connected):
    (daemon.mount / "small").mkdir()
    connected.shell(f"setfattr -n user.kv.quota -v 64K {daemon.mount}/small")
    with sym.Chat(sym.kv_create("small/chat.kv")) as chat:
        with pytest.raises(sym.OverQuota):
            chat.ask("One?", max_tokens=900).full_text()
        said = sym.detokenize([*chat.kv.read()[0], *chat.pending])
        assert said.startswith("<bos>user: One?\nassistant: ")
        assert len(chat.pending) <= 1
        chat.undo()
        assert chat.kv.len() == 0
    connected.shell(f"rm -r {daemon.mount}/small")


def test_a_stop_text_that_nobody_was_shown_is_no_part_of_the_conversation(connected):
    form = sym.Grammar.regex("Yes[.]\nObservation: no")
    with sym.Chat(sym.kv_create()) as chat:
        answer = chat.ask("One?", grammar=form, stop="\nObservation:")
        assert answer.full_text() == "Yes."
        assert text_of(chat.kv, chat.pending) == conversation(("One?", "Yes."))
        assert sym.detokenize(answer.tokens) == "Yes.\nObservation:"
        second = chat.ask("Two?", grammar=form, stop="\nObservation:", keep_stop=True)
        assert second.full_text() == "Yes."
        assert text_of(chat.kv, chat.pending) == conversation(("One?", "Yes."), ("Two?", "Yes.\nObservation:"))
        for token in chat.ask("Three?", grammar=form, stop=["\nObservation:", "none"]):
            if token == ord(":"):
                break  # what comes next is not looked at
        assert chat.ask("Four?", max_tokens=3).full_text()
        assert "assistant: Yes.\nuser: Four?" in text_of(chat.kv)


def test_an_interrupted_answer_stays_as_far_as_its_text_was_read(connected):
    """Text that may be the beginning of a stop text was held back."""
    with sym.Chat(sym.kv_create()) as chat:
        form = sym.Grammar.regex("Yes[.]\nObserva.{300}")
        answer = chat.ask("One?", grammar=form, stop="\nObservation:")
        pieces = answer.text()
        shown = next(pieces)
        while len(answer.came(0, 99)[0]) < 12:  # forced: "Yes.\nObserva" has come
            shown += next(pieces)
        answer.cancel()
        chat.settle()
        assert text_of(chat.kv, chat.pending) == conversation(("One?", shown))


HOLDER = """
import sys, time
import libsym as sym
chat = sym.Chat(sym.kv_open("talk.kv", "a"))
answer = chat.ask("Mine?", max_tokens=int(sys.argv[1]), stop_at_end=False)
next(answer)
print("talks", flush=True)
sys.stdin.read()
chat.close()
"""


@pytest.fixture
def holder(connected, daemon):
    """Start another program that has asked a question in talk.kv, whose answer it does not read to its end."""
    processes = []

    def start(max_tokens=4):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(max_tokens)], env=daemon.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == "talks\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    sym.kv_remove("talk.kv")


def test_one_chat_at_a_time_talks_in_a_file_and_another_is_told_which(holder):
    with sym.Chat(sym.kv_open("talk.kv", "a")) as first:
        said = first.ask("One?", max_tokens=4).full_text()
    first_turn = text_of(sym.kv_open("talk.kv"))
    process = holder()
    with sym.Chat(sym.kv_open("talk.kv", "rw")) as chat:
        for action in (chat.undo, lambda: chat.ask("Two?", max_tokens=4)):
            with pytest.raises(sym.WouldBlock, match=rf"talk.kv is locked by pid {process.pid} \(python"):
                action()
        with chat.fork() as fork:  # where the other has not ended its turn, as far as that has come
            assert text_of(fork.kv).startswith(first_turn)
        process.communicate("")
        assert process.returncode == 0
        chat.undo()  # of the other's turn, which was whole
        assert text_of(chat.kv) == first_turn
        again = chat.ask("Two?", max_tokens=4).full_text()
        assert text_of(chat.kv, chat.pending) == conversation(("One?", said), ("Two?", again))


def test_a_holder_that_is_killed_leaves_the_file_to_the_next(holder):
    process = holder(max_tokens=900)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    with sym.Chat(sym.kv_open("talk.kv", "a")) as chat:
        while True:
            try:
                chat.undo()
                break
            except sym.WouldBlock:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert chat.kv.len() == 0
        answer = chat.ask("Mine?", max_tokens=4).full_text()
        assert text_of(chat.kv, chat.pending) == conversation(("Mine?", answer))


def test_a_lock_of_the_program_is_left_as_it_is(connected):
    kv, other = sym.kv_create("mine.kv"), sym.kv_open("mine.kv")
    chat = sym.Chat(kv)
    with kv.lock():
        first = chat.ask("One?", max_tokens=4).full_text()
    sym.kv_lock(other, blocking=False)  # it went with the block
    with pytest.raises(sym.WouldBlock, match=r"mine\.kv is locked by pid"):
        chat.ask("Two?")
    other.unlock()
    second = chat.ask("Two?", max_tokens=4).full_text()
    with pytest.raises(sym.WouldBlock):
        sym.kv_lock(other, blocking=False)
    assert text_of(kv, chat.pending) == conversation(("One?", first), ("Two?", second))
    chat.close()
    sym.kv_lock(other, blocking=False)
    with sym.kv_create("shared.kv") as shared:
        sym.kv_lock(shared, shared=True)
        sym.Chat(shared).ask("One?", max_tokens=2).full_text()
        sym.kv_lock(sym.kv_open("shared.kv"), shared=True, blocking=False)  # as the program has it


def test_what_was_pending_has_no_place_where_another_has_gone_on(connected, caplog):
    kv = sym.kv_create("taken.kv")
    chat = sym.Chat(kv)
    with kv.lock():
        chat.ask("One?", max_tokens=4).full_text()
    with sym.Chat(sym.kv_open("taken.kv", "rw")) as other:
        other.ask("Other?", max_tokens=4).full_text()
    before = text_of(kv)
    assert chat.ask("Two?", max_tokens=4).full_text()
    assert text_of(kv).startswith(f"{before}\nuser: Two?\nassistant: ")
    assert "without the last 1 tokens" in caplog.text
    chat.close()


def test_a_cut_by_another_handle_ends_what_is_pending(connected, caplog):
    with sym.Chat(sym.kv_create("cut.kv")) as chat, sym.kv_open("cut.kv", "rw") as other:
        chat.ask("One?", max_tokens=4).full_text()
        assert chat.pending
        sym.kv_truncate(other, 5)
        second = chat.ask("Two?", max_tokens=2).full_text()
        assert text_of(chat.kv, chat.pending) == f"<bos>user\nuser: Two?\nassistant: {second}"
    assert "without the last 1 tokens" in caplog.text
    sym.kv_remove("cut.kv")


def test_two_chats_on_one_handle_exclude_each_other(connected):
    for kv in (sym.kv_create(), sym.kv_create("both.kv")):
        first, second = sym.Chat(kv), sym.Chat(kv)
        first.ask("One?", max_tokens=2).full_text()
        for action in (second.undo, lambda second=second: second.ask("Two?")):
            with pytest.raises(sym.WouldBlock, match="another conversation goes on by this handle"):
                action()
        del first
        assert second.ask("Two?", max_tokens=2).full_text()
        second.close()


def test_the_user_ends_no_turn(connected):
    chat = sym.Chat(sym.kv_create())
    chat.ask("a<eos>", begin="<eos>", max_tokens=2).full_text()
    assert 257 not in chat.kv.read()[0]


def test_a_chat_needs_an_open_file(connected):
    with pytest.raises(sym.Invalid, match="kv_open"):
        sym.Chat("chat.kv")
    sym.kv_create("read.kv").close()
    with pytest.raises(sym.NoAccess):
        sym.Chat(sym.kv_open("read.kv")).ask("One?").full_text()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_chat_in_an_event_loop_says_what_one_in_a_thread_says(connected, backend):
    questions = ("One?", "Two?")
    chat = sym.Chat(sym.kv_create())
    expected = [chat.ask(question, max_tokens=4).full_text() for question in questions]

    async def converse():
        async with sym.aio.Chat(await sym.aio.kv_create()) as chat:
            answers = [await (await chat.ask(question, max_tokens=4)).full_text() for question in questions]
            await chat.undo()
            fork = await chat.fork()
            return answers, await (await fork.ask(questions[1], max_tokens=4)).full_text()

    answers, again = anyio.run(converse, backend=backend)
    assert (answers, again) == (expected, expected[1])


def test_a_loop_that_takes_the_likeliest_is_generate(connected):
    tokens = sym.tokenize("Once upon")
    generation = sym.generate(sym.kv_create(), tokens, max_tokens=20)
    kv = sym.kv_create()
    decoding = sym.decode(kv, tokens, sym.Dist.argmax, max_tokens=20)
    assert (list(decoding), decoding.finish) == (list(generation), generation.finish)
    assert decoding.pending == generation.pending
    assert kv.read()[0] == [*tokens, *decoding.tokens[:-1]]


def test_a_loop_ends_where_generate_ends(connected):
    def drawing(tokens):
        left = iter(tokens)
        return lambda dist: next(left)

    kv = sym.kv_create()
    decoding = sym.decode(kv, [65], drawing(b"one. User: two"), stop=["User:", "never"])
    assert (decoding.full_text(), decoding.finish, decoding.stopped_by) == ("one. ", "stop_text", "User:")
    assert decoding.pending == list(b":")
    assert sym.detokenize(kv.read()[0]) == "Aone. User"
    end = min(sym.model_info().eos_ids)
    stopped = sym.decode(sym.kv_create(), [65], drawing([66, end, 67]))
    assert (list(stopped), stopped.finish, stopped.stopped_by, stopped.pending) == ([66], "stop_token", end, [])
    goes_on = sym.decode(sym.kv_create(), [65], drawing([66, end, 67]), stop_at_end=False, stop=67)
    assert (list(goes_on), goes_on.stopped_by) == ([66, end], 67)


def test_contexts_beside_the_file_get_the_same_tokens_in_the_same_steps(connected):
    first, second, seen = sym.kv_create(), sym.kv_create(), []

    def both(dist, other):
        seen.append((np.array(dist), np.array(other)))
        return 66

    sym.decode(first, [65, 66], both, beside=[(second, [70])], max_tokens=3).full_text()
    assert (first.read()[0], second.read()[0]) == ([65, 66, 66, 66], [70, 66, 66])
    alone = sym.kv_create()
    for given, (_, row) in zip(([70], [66], [66]), seen, strict=True):
        assert (np.array(sym.pred(alone, given)) == row).all()


def test_a_loop_ends_with_the_context(connected):
    kv, most = sym.kv_create(), sym.model_info().max_positions
    sym.kv_write(kv, [65], most - 3)
    decoding = sym.decode(kv, [66], lambda dist: 67)
    assert (list(decoding), decoding.finish) == ([67, 67], "length")
    full = sym.kv_create("full.kv")
    sym.kv_write(full, [65], most - 2)
    with pytest.raises(sym.Invalid, match=rf"full\.kv: 2 tokens, .* {most} .* 1 more:"):
        sym.decode(sym.kv_create(), [66], lambda dist: 67, beside=[(full, [66, 66])])
    full.remove()


def test_a_draw_that_fails_leaves_what_was_appended(connected):
    def fails(dist):
        raise ZeroDivisionError

    kv = sym.kv_create()
    decoding = sym.decode(kv, [65, 66], fails)
    with pytest.raises(ZeroDivisionError):
        next(decoding)
    assert (kv.len(), decoding.pending) == (2, [])
    with pytest.raises(sym.Invalid, match="the loop is over"):
        next(decoding)
    with pytest.raises(sym.Invalid, match="what draw"):
        next(sym.decode(sym.kv_create(), [65], lambda dist: None))
    with pytest.raises(sym.Invalid, match="each file once"):
        sym.decode(kv, [65], sym.Dist.argmax, beside=[(kv, [66])])
    with pytest.raises(sym.Invalid, match="not in the vocabulary"):
        next(sym.decode(sym.kv_create(), [65], lambda dist: 10**6))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_in_an_event_loop_may_await_its_draw(connected, backend):
    async def draw(dist):
        await anyio.lowlevel.checkpoint()
        return dist.argmax()

    async def loop():
        decoding = await sym.aio.decode(await sym.aio.kv_create(), sym.tokenize("Once"), draw, max_tokens=8)
        return await decoding.full_text()

    expected = sym.generate(sym.kv_create(), sym.tokenize("Once"), max_tokens=8).full_text()
    assert anyio.run(loop, backend=backend) == expected


def test_a_score_is_what_pred_says_of_each_token(connected):
    tokens = [65 + index % 7 for index in range(300)]
    kv = sym.kv_create()
    scores = sym.score(kv, tokens)
    assert (len(scores), kv.len()) == (299, 300)
    by_hand = sym.kv_create()
    for given, wanted, score in zip(tokens, tokens[1:], scores, strict=False):
        assert score == pytest.approx(sym.pred(by_hand, [given]).logprob(wanted), abs=1e-5)
    assert sym.score(kv, [65]) == []
    assert all(math.isfinite(each) for each in scores)


def test_opening_to_append_creates_what_is_not_there(connected):
    with sym.kv_open("log.kv", "a") as kv:
        assert (kv.writable, sym.kv_write(kv, [1, 2])) == (True, 2)
    assert sym.kv_open("log.kv", "a").len() == 2
    with pytest.raises(sym.NotFound):
        sym.kv_open("none/log.kv", "a")
    connected.shell(f"ln -s nowhere.kv {connected.mount}/dangling.kv")
    with pytest.raises((sym.Exists, sym.NotFound)):
        sym.kv_open("dangling.kv", "a")
    connected.shell(f"rm {connected.mount}/dangling.kv {connected.mount}/log.kv")


def test_entries_are_extracted_by_their_numbers(connected):
    with sym.kv_create() as kv:
        sym.kv_write(kv, list(range(100, 200)))
        kept = [0, 1, 2, 50, 51, 7, -1]
        assert kv.extract(kept).read()[0] == [100, 101, 102, 150, 151, 107, 199]
        assert kv.extract([0, (1, 3), 3, slice(4, 6), np.int64(9)], rebase=False).read() == (
            [100, 101, 102, 103, 104, 105, 109],
            [0, 1, 2, 3, 4, 5, 9],
        )
        with pytest.raises(sym.Invalid):
            kv.extract([100])


PROGRAMS = {
    "an error of the daemon is one line": ('sym.kv_open("no.kv")', 1, "prog: no.kv: no such file\n"),
    "an error of the system is one line": ('open("/nowhere")', 1, "prog: /nowhere: No such file or directory\n"),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, ""),
    "a reader who has gone": ("raise BrokenPipeError", 141, ""),
    "all is well": ("print('x')", 0, ""),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_program_ends_as_a_command_ends(connected, tmp_path, kind, how):
    body, status, said = PROGRAMS[kind]
    (tmp_path / "prog.py").write_text(f"import libsym as sym\n{how} main():\n    {body}\nsym.main(main)\n")
    process = connected.shell(f"{sys.executable} {tmp_path / 'prog.py'}", check=False)
    assert (process.returncode, process.stderr) == (status, said)


@pytest.mark.parametrize("kind", sorted(PROGRAMS.keys() - {"Ctrl-C"}))  # which asyncio turns into a cancellation
def test_tasks_of_a_program_end_it_as_it_would_itself(connected, tmp_path, kind):
    body, status, said = PROGRAMS[kind]
    program = f"""
import anyio, libsym as sym
async def task():
    {body}
async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(task)
sym.main(main)
"""
    (tmp_path / "prog.py").write_text(program)
    process = connected.shell(f"{sys.executable} {tmp_path / 'prog.py'}", check=False)
    assert (process.returncode, process.stderr) == (status, said)
