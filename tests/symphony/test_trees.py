"""A tree of forked files, and a budget for what searches one."""

import anyio
import pytest

import libsym as sym


class Thought(sym.Tree):
    score = 0.0


@pytest.mark.slow
def test_each_node_goes_on_where_its_parent_stood(shared):
    root = Thought(sym.kv_create())
    root.kv.write([65])
    first, second = root.fork(), root.fork()
    first.kv.write([66])
    second.kv.write([67])
    leaf = first.fork()
    leaf.kv.write([68])
    assert [node.kv.read()[0] for node in root] == [[65], [65, 66], [65, 66, 68], [65, 67]]
    assert [node.name for node in leaf.line()] == ["", "0", "0.0"]
    assert (leaf.depth, root.depth, leaf.parent, isinstance(leaf, Thought)) == (2, 0, first, True)
    assert root.leaves() == [leaf, second]
    second.score = 2.0
    assert max(root.leaves(), key=lambda node: node.score) is second


def test_a_pruned_branch_gives_its_pages_back(shared):
    root = sym.Tree(sym.kv_create())
    root.kv.write([65] * 64)
    free = sym.daemon_stat()["num_free_pages"]
    branch = root.fork()
    for _ in range(3):
        branch.fork().kv.write([66] * 64)
    assert sym.daemon_stat()["num_free_pages"] == free - 6
    branch.remove()
    assert (sym.daemon_stat()["num_free_pages"], root.children) == (free, [])
    assert root.fork().name == "1", "a name is not given twice"


@pytest.mark.slow
def test_a_shell_sees_a_tree_that_has_a_path(emptied):
    def names():
        return emptied.shell(f"ls {emptied.mount}/search/today").stdout.split()

    root = sym.Tree(sym.kv_create(), "search/today")
    root.kv.write([65])
    kept, dropped = root.fork(), root.fork()
    kept.fork()
    dropped.fork()
    assert names() == ["0.0.kv", "0.kv", "1.0.kv", "1.kv"]
    (emptied.mount / "search/today/1.0.kv").unlink()
    dropped.remove()
    assert names() == ["0.0.kv", "0.kv"]
    root.remove()
    assert names() == []
    root.kv.close()


async def test_branches_grow_side_by_side_in_an_event_loop(shared):
    async def branch():
        await sym.aio.kv_write((await root.fork()).kv, [65])

    async with await sym.aio.kv_create() as kv:
        root = sym.aio.Tree(kv)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(branch)
        assert [len(node.kv) for node in root.leaves()] == [1] * 5
        await root.remove()
        assert root.children == []


def test_a_budget_counts_what_the_program_computes(shared):
    budget = sym.Budget(tokens=5)
    kv = sym.kv_create()
    kv.write([1, 2, 3])
    assert (budget.tokens_left, bool(budget), budget.seconds_left) == (2, True, None)
    kv.write([1, 2, 3])
    assert (budget.tokens_left, bool(budget)) == (0, False)
    timed = sym.Budget(seconds=0)
    assert (timed.tokens_left, timed.seconds_left, bool(timed)) == (None, 0.0, False)
    assert sym.Budget(seconds=100)
    for wrong in ({}, {"tokens": -1}, {"seconds": "x"}):
        with pytest.raises(sym.Invalid):
            sym.Budget(**wrong)
