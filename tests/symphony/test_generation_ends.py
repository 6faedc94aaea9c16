"""Early ends of a generation, and the file afterwards: given + tokens - pending, always."""

import threading

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")

PROMPT = list(b"the cat sat on the mat; the cat sat on the ")
LONG = PROMPT * 40
"""Several chunks of prefill."""
SLOW_GRAMMAR = "start: word+\nword: " + " | ".join(f'"{"x" * (1 + number % 7)}{number}"' for number in range(3000))
"""Takes a worker some tenths of a second to compile."""


def endless(kv, tokens=PROMPT):
    """A generation that fills the model's context unless something ends it."""
    return sym.generate(kv, tokens, stop_at_end=False)


def is_cut_off(kv):
    return len(kv) < sym.model_info().max_positions - 1


def check_file(kv, tokens, generation):
    assert sym.kv_read(kv)[0] + generation.pending == [*tokens, *generation.tokens]


# ---- by the handle that started it


def end_by(how, kv):
    match how:
        case "truncate":
            kv.truncate(len(PROMPT) - 1)
        case "with":
            with kv:
                pass
        case _:
            getattr(kv, how)()


@pytest.mark.parametrize("learn", [list, sym.Generation.cancel], ids=["read", "cancel"])
@pytest.mark.parametrize("how", ["close", "with", "remove", "truncate"])
def test_its_own_handle_ends_it_and_what_had_come_is_exact_or_not_told(how, learn):
    kv, other = sym.kv_create("ended.kv"), sym.kv_open("ended.kv")
    generation = endless(kv)
    first = next(generation)
    assert generation.tokens[0] == first, "while it goes on"
    end_by(how, kv)
    assert "cancelled" in repr(generation)
    for known in ("tokens", "pending"):
        with pytest.raises(sym.Invalid, match="cancelled"):
            getattr(generation, known)
    rest = learn(generation)
    assert rest is None or [first, *rest] == generation.tokens
    assert generation.finish == "cancelled"
    assert len(generation.tokens) < sym.model_info().max_positions - len(PROMPT)
    if how == "truncate":
        assert sym.kv_read(other)[0] == PROMPT[:-1]
    else:
        check_file(other, PROMPT, generation)


@pytest.mark.parametrize("how", ["close", "remove", "truncate"])
def test_one_whose_grammar_is_being_compiled_is_ended_too(how):
    kv = sym.kv_create("compiling.kv")
    generation = sym.generate(kv, PROMPT, grammar=sym.Grammar.lark(f'{SLOW_GRAMMAR} | "{how}"'))
    kv.truncate(0) if how == "truncate" else end_by(how, kv)
    assert list(generation) == []
    assert (generation.finish, generation.pending) == ("cancelled", PROMPT)
    if how != "remove":
        assert sym.kv_read("compiling.kv") == ([], [])


def test_the_end_of_another_handle_leaves_it_alone_and_waits_for_it_only_to_cut():
    kv, other, third = sym.kv_create("two.kv"), sym.kv_open("two.kv", "rw"), sym.kv_open("two.kv", "rw")
    generation = sym.generate(kv, PROMPT, max_tokens=4000, stop_at_end=False)
    first = next(generation)
    other.close()
    assert len(kv) < 4000, "that waited for nothing"
    sym.kv_remove("two.kv")
    with pytest.raises(sym.NotFound):
        kv.remove()
    third.truncate(0)
    assert len([first, *generation]) == 4000
    assert (generation.finish, len(kv)) == ("length", 0)
    own, behind = endless(kv), endless(third, [1])
    next(own)
    kv.close()  # waits for its own, and not for those behind it
    assert is_cut_off(third)
    next(behind)
    behind.cancel()


async def test_it_is_so_in_event_loops(backend):
    async with await sym.aio.kv_create() as kv:
        other = await sym.aio.kv_fork(kv)
        for file, end in ((kv, lambda: sym.aio.kv_truncate(kv, 5)), (other, lambda: sym.aio.kv_close(other))):
            generation = await sym.aio.generate(file, PROMPT, stop_at_end=False)
            await end()
            rest = [token async for token in generation]
            assert (generation.finish, len(rest) < 4000) == ("cancelled", True)
        assert (await sym.aio.kv_stat(kv)).tokens == 5


# ---- by cancel()

FORMS = st.sampled_from(
    [
        {},
        {"sampler": sym.Sampler(temperature=1.1, seed=5)},
        {"draft": sym.Ngram(max_tokens=6, min_match=1)},
        {"stop": "no such text"},
        {"grammar": sym.Grammar.regex("(the cat sat on the mat; |a dog ran[.] ){80,}")},
        {"sampler": sym.Sampler(logit_bias={257: 1e6}), "stop_at_end": True},
    ]
)
ANYHOW = {"num_taken": st.integers(0, 40), "form": FORMS, "tokens": st.sampled_from([PROMPT, LONG])}
NO_HEALTH_CHECK = [HealthCheck.function_scoped_fixture]


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=NO_HEALTH_CHECK)
@given(**ANYHOW, before=st.sampled_from([[], [1, 2, 3]]))
def test_whenever_it_is_cancelled_the_file_is_what_was_given_and_came_but_for_what_is_pending(
    num_taken, form, tokens, before
):
    with sym.kv_create() as kv:
        if before:
            sym.kv_write(kv, before)
        generation = sym.generate(kv, tokens, **({"stop_at_end": False} | form))
        for _, _ in zip(range(num_taken), generation, strict=False):
            pass
        generation.cancel()
        whole, file = [*before, *tokens, *generation.tokens], sym.kv_read(kv)[0]
        assert file + generation.pending == whole
        rest = list(generation)
        assert generation.tokens[len(generation.tokens) - len(rest) :] == rest
        assert sym.kv_read(kv)[0] == file
        assert file + generation.pending == whole


async def test_in_event_loops_it_is_not_told_before_it_is_known_and_goes_on_from_there(backend):
    async with await sym.aio.kv_create() as kv:
        generation = await sym.aio.generate(kv, PROMPT, stop_at_end=False)
        generation.cancel()
        for known in ("tokens", "pending"):
            with pytest.raises(sym.Invalid, match="await"):
                getattr(generation, known)
        rest = [token async for token in generation]
        assert generation.tokens == rest
        async with await sym.aio.generate(kv, generation.pending, stop_at_end=False) as following:
            with anyio.move_on_after(0.05):  # a task that is cancelled may go on with its generation
                async for _ in following:
                    pass
            await anext(following)
        assert (await sym.aio.kv_read(kv))[0] + following.pending == [*PROMPT, *rest, *following.tokens]


async def test_a_task_that_is_being_cancelled_leaves_its_block_without_waiting(backend):
    kv = await sym.aio.kv_create()
    with anyio.CancelScope() as scope:
        async with await sym.aio.generate(kv, PROMPT, stop_at_end=False) as generation:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    await generation.cancel()
    assert (await sym.aio.kv_read(kv))[0] + generation.pending == [*PROMPT, *generation.tokens]


def test_cancelled_while_another_thread_waits_for_its_tokens_it_is_told_when_that_thread_has_them():
    kv, got, begun = sym.kv_create(), [], threading.Event()
    generation = endless(kv)

    def take():
        for token in generation:
            got.append(token)
            begun.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert begun.wait(20)
    generation.cancel()
    thread.join(20)
    assert got == generation.tokens
    assert generation.finish == "cancelled"
    check_file(kv, PROMPT, generation)


def test_one_that_waits_behind_another_ends_at_once_with_all_of_it_pending():
    kv, other = sym.kv_create("queue.kv"), sym.kv_open("queue.kv", "rw")
    ahead, behind = endless(kv), endless(other, [7, 8])
    next(ahead)
    behind.cancel()
    assert (behind.tokens, behind.pending, behind.finish) == ([], [7, 8], "cancelled")
    assert is_cut_off(kv)


# ---- by an error


def test_given_tokens_that_the_file_has_are_not_pending_when_nothing_could_be_drawn():
    kv = sym.kv_create()
    nothing = sym.Sampler(logit_bias=dict.fromkeys(range(259), float("-inf")))
    generation = sym.generate(kv, PROMPT, sampler=nothing)
    with pytest.raises(sym.Invalid, match="-inf"):
        list(generation)
    check_file(kv, PROMPT, generation)


# ---- by its deadline


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"draft": "ngram"}], ids=str)
def test_a_deadline_ends_it_with_what_it_has(more):
    """Steps of plain generations follow each other in C; others are planned one by one."""
    for deadline in (0.1, 0.05, 0.025, 0.012):  # a fast machine fills the context within the first
        kv = sym.kv_create()
        generation = sym.generate(kv, PROMPT, stop_at_end=False, deadline=deadline, **more)
        tokens = list(generation)
        if generation.finish != "length":
            break
    assert generation.finish == "deadline"
    assert 0 < len(tokens) == len(generation.tokens)
    check_file(kv, PROMPT, generation)
    assert list(sym.generate(sym.kv_create(), PROMPT, stop_at_end=False, max_tokens=len(tokens))) == tokens
