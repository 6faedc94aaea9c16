"""`sym.aio`: generations and batches in event loops."""

import anyio
import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("connected")

PROMPT = list(b"the cat sat on the mat; the cat sat on the ")
SAMPLER = sym.Sampler(temperature=0.8)


@pytest.fixture(params=["trio", "asyncio"])
def run(request):
    return lambda main: anyio.run(main, backend=request.param)


@pytest.mark.slow
def test_many_tasks_generate_what_threads_do(run):
    expected = {
        seed: list(sym.generate(sym.kv_create(), PROMPT, sampler=SAMPLER, seed=seed, max_tokens=40))
        for seed in range(8)
    }
    made = {}

    async def generated(number):
        async with await sym.aio.kv_create() as kv:
            generation = await sym.aio.generate(kv, PROMPT, sampler=SAMPLER, seed=number % 8, max_tokens=40)
            made[number] = [token async for token in generation]
            assert generation.tokens == made[number]
            tokens, _ = await sym.aio.kv_read(kv)
            assert tokens + generation.pending == PROMPT + made[number]

    async def main():
        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(generated, number)

    run(main)
    assert made == {number: expected[number % 8] for number in range(32)}


def test_its_text_is_that_of_the_twin(run):
    grammar = sym.Grammar.regex("na[ïi]ve … [€$]uro [ab] END of it")

    async def main():
        async with await sym.aio.kv_create() as kv:
            generation = await sym.aio.generate(kv, PROMPT, grammar=grammar, stop="END")
            text = "".join([piece async for piece in generation.text()])
            return text, generation.finish, generation.stopped_by

    twin = sym.generate(sym.kv_create(), PROMPT, grammar=grammar, stop="END")
    assert run(main) == ("".join(twin.text()), "stop_text", "END")


def test_a_task_that_is_cancelled_may_go_on_with_its_generation(run):
    async def main():
        kv = await sym.aio.kv_create()
        async with await sym.aio.generate(kv, PROMPT, stop_at_end=False) as generation:
            with anyio.move_on_after(0.05):
                async for _ in generation:
                    pass
            first = await anext(generation)
        rest = [token async for token in generation]
        tokens, _ = await sym.aio.kv_read(kv)
        assert generation.tokens[-len(rest) - 1 :] == [first, *rest]
        assert tokens + generation.pending == PROMPT + generation.tokens
        return generation.finish

    assert run(main) in {"cancelled", "length"}


def test_pred_in_all_its_forms_and_batches(run):
    async def main():
        kvs = [await sym.aio.kv_create() for _ in range(8)]
        dists = await sym.aio.pred_batch([sym.Pred(kv, PROMPT) for kv in kvs])
        reduced = await sym.aio.pred(kvs[0], [1, 2], rows="all", top_k=3)
        masked = await sym.aio.pred(kvs[1], [1], mask=[True] * len(PROMPT), priority=3)
        await sym.aio.kv_write(kvs[2], [7])
        return [bytes(dist.logits) for dist in dists], reduced, bytes(masked.logits), await sym.aio.vocabulary()

    rows, reduced, masked, vocabulary = run(main)
    assert set(rows) == {bytes(sym.pred(sym.kv_create(), PROMPT).logits)}
    assert len(reduced) == 2
    kv = sym.kv_create()
    sym.kv_write(kv, PROMPT)
    assert masked == bytes(sym.pred(kv, [1]).logits)
    assert vocabulary == sym.vocabulary()


def test_a_generation_that_is_no_good_is_an_error_at_once(run):
    async def main():
        async with await sym.aio.kv_create() as kv:
            with pytest.raises(sym.Invalid, match="unclosed"):
                await sym.aio.generate(kv, PROMPT, grammar=sym.Grammar.regex("("))

    run(main)


@pytest.mark.slow
def test_a_thousand_tasks_that_wait_leave_room_for_the_calls_that_wake_them(run):
    got, refused = [], []

    async def wait(call, all_refused):
        try:
            got.append(await call())
        except sym.WouldBlock as error:
            refused.append(str(error))
            if len(refused) == 4:
                all_refused.set()

    async def main():
        all_refused = anyio.Event()
        kv = await sym.aio.kv_create("waits.kv")
        async with anyio.create_task_group() as tasks, await sym.aio.kv_lock(kv):
            for _ in range(1000):
                tasks.start_soon(wait, lambda: sym.aio.recv("news"), all_refused)
            await anyio.wait_all_tasks_blocked()
            other = await sym.aio.kv_open("waits.kv")
            for _ in range(2):
                tasks.start_soon(wait, lambda: sym.aio.recv("news"), all_refused)
                tasks.start_soon(wait, lambda: sym.aio.kv_lock(other), all_refused)
            with anyio.fail_after(20):
                await all_refused.wait()
                for number in range(1000):
                    assert await sym.aio.send("news", number) == 1
        await sym.aio.kv_remove(kv)

    run(main)
    assert sorted(got) == list(range(1000))
    assert set(refused) == {"1000 calls of this program wait already: let some of them end"}
