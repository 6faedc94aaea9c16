"""kv_rewind: a file is cut to the prefix that it shares with a text, and the rest is named."""

import pytest

import libsym as sym


@pytest.fixture
def kv(shared):
    with sym.kv_create() as file:
        file.write([1, 2, 3, 4])
        yield file


@pytest.mark.parametrize(
    ("tokens", "rest", "kept"),
    [
        ([1, 2, 9, 4], [9, 4], [1, 2]),
        ([1, 2, 3, 4, 5], [5], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [4], [1, 2, 3]),
        ([1, 2], [2], [1]),
        ([1], [1], []),
        ([9, 2, 3, 4], [9, 2, 3, 4], []),
    ],
    ids=["differs", "longer", "the same", "shorter", "one token", "another text"],
)
def test_what_is_kept_and_what_is_missing_are_the_text(kv, tokens, rest, kept):
    assert sym.kv_rewind(kv, tokens) == rest
    assert kv.read()[0] == kept


def test_the_distribution_is_that_of_the_whole_text(kv):
    text = [1, 2, 9, 8]
    with sym.kv_create() as fresh:
        wanted = list(sym.pred(fresh, text).logits)
    assert list(sym.pred(kv, sym.kv_rewind(kv, text)).logits) == wanted


def test_a_text_without_tokens_and_a_file_that_may_not_be_cut_are_refused(kv):
    with pytest.raises(sym.Invalid, match="one at least"):
        sym.kv_rewind(kv, [])
    kv.fork("named.kv").close()
    with sym.kv_open("named.kv") as read_only:
        assert sym.kv_rewind(read_only, [1, 2, 3, 4, 5]) == [5], "there was nothing to cut"
        with pytest.raises(sym.BadHandle):
            sym.kv_rewind(read_only, [1, 9])
        assert read_only.len() == 4
    sym.kv_remove("named.kv")


async def test_a_task_is_told_the_same(kv):
    assert await sym.aio.kv_rewind(kv, [1, 7]) == [7]
    assert kv.len() == 1
