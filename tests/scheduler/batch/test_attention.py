"""Memory and replies of calls that ask for attention."""

import pytest

from libsym.channel.server import PAYLOAD_BYTES
from libsym.errors import NoBuffers, TooLarge
from libsym.rows.attention import Attention, attention_block
from scheduler.batch.attention import MAX_USER_BYTES, AnswerRoom, AttentionMass, AttentionMemory

LAYERS, HEADS = 8, 4
ROW_BYTES = 4 * LAYERS * HEADS
"""Bytes of the sums of one entry."""


def mass(memory, columns="pages", rows="sum", uid=0):
    return AttentionMass(attention_block(columns, rows), LAYERS, HEADS, memory, uid)


@pytest.mark.parametrize("num_entries", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("columns", ["entries", "pages"])
@pytest.mark.parametrize("rows", ["sum", "layer"])
def test_an_answer_is_what_the_library_reads(num_entries, columns, rows):
    asked = mass(AttentionMemory(), columns, rows)
    asked.begin(num_entries)
    found = Attention(asked.answer())
    assert found.num_entries == num_entries
    assert found.shape[-1] == (num_entries if columns == "entries" else -(-num_entries // 32))
    assert found.shape[:-1] == ((LAYERS, HEADS) if rows == "layer" else ())
    assert not any(found.values)


def test_a_reply_has_room_for_so_much_and_no_more():
    most = (PAYLOAD_BYTES - 16) // ROW_BYTES
    mass(AttentionMemory(), "entries", "layer").begin(most)
    with pytest.raises(TooLarge, match="ask for pages, or for the sum"):
        mass(AttentionMemory(), "entries", "layer").begin(most + 1)
    with pytest.raises(TooLarge, match="ask for pages"):
        mass(AttentionMemory(), "entries", "sum").begin(PAYLOAD_BYTES // 4)
    with pytest.raises(TooLarge, match="ask for its sum"):
        mass(AttentionMemory(), "pages", "layer").begin(32 * (most + 1))


def test_calls_of_one_reply_share_its_room():
    memory, room = AttentionMemory(), AnswerRoom(10_000)
    calls = [mass(memory, "entries") for _ in range(3)]
    for call in calls:
        call.room = room
    calls[0].begin(1000)
    calls[1].begin(1000)
    with pytest.raises(TooLarge):
        calls[2].begin(1000)
    calls[2].begin(200)


def test_a_user_has_so_much_memory_at_a_time_and_others_have_their_own():
    memory, most = AttentionMemory(), MAX_USER_BYTES // ROW_BYTES
    first, second, other = mass(memory), mass(memory), mass(memory, uid=7)
    first.begin(most - 100)
    with pytest.raises(NoBuffers, match="ask for fewer at once"):
        second.begin(101)
    second.begin(100)
    other.begin(most)
    for call in (first, second, other):
        call.let_go()
        call.let_go()
    mass(memory).begin(most)


def test_a_call_alone_gets_what_it_needs():
    memory = AttentionMemory()
    alone = mass(memory)
    alone.begin(MAX_USER_BYTES // ROW_BYTES + 1)
    with pytest.raises(NoBuffers):
        mass(memory).begin(1)
    alone.let_go()
    mass(memory).begin(1)
