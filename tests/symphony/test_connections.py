"""Several connections in one program: which a call takes, and that they know nothing of each other's domains."""

import os
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import libsym as sym

pytestmark = pytest.mark.slow


@pytest.fixture
def domains(shared):
    """Two, with a program's file in each."""
    for name in ("ann", "bob"):
        (shared.mount / name).mkdir()
        os.setxattr(shared.mount / name, "user.kv.quota", b"1M")
    return ["ann", "bob"]


def names():
    return {entry.name for entry in sym.kv_list()}


def test_each_is_confined_to_its_domain_and_the_programs_own_to_none(shared, domains):
    with sym.connection(domain="ann") as ann, sym.connection(domain="bob") as bob:
        sym.kv_create("of_bob.kv").write([1, 2])  # the inner one is in use
        with ann.use():
            assert names() == set()
            sym.kv_create("of_ann.kv").write([3])
            with pytest.raises(sym.CrossDevice):
                sym.kv_open("../bob/of_bob.kv")
            with bob.use():
                assert names() == {"of_bob.kv"}
            assert names() == {"of_ann.kv"}
        assert (ann.domain, bob.domain) == ("ann", "bob")
    assert names() == {"ann", "bob"}
    assert (shared.mount / "ann" / "of_ann.kv").exists()
    assert not ann.is_open
    assert not bob.is_open


def test_a_call_on_an_open_file_takes_the_files_connection(domains):
    with sym.connection(domain="ann") as ann:
        kv = sym.kv_create("a.kv")
        fork = sym.kv_fork(kv)
    with pytest.raises(sym.NotConnected):
        kv.write([1])
    assert fork.channel is kv.channel is ann.channel
    with sym.connection(domain="ann") as again:
        kv = sym.kv_open("a.kv", "rw")
        own = sym.connection()
        with own.use():
            assert sym.pred(kv, [65]).argmax() == 65
            assert sym.kv_fork(kv, "b.kv").channel is again.channel
            with pytest.raises(sym.BadHandle, match="or another"):
                sym.kv_merge([kv])
        own.close()
        assert names() == {"a.kv", "b.kv"}


def test_threads_and_tasks_use_their_own(domains):
    connections = {name: sym.connection(domain=name) for name in domains}

    def write(name):
        with connections[name].use():
            for number in range(20):
                sym.kv_create(f"{name}{number}.kv").write([number])
            return names()

    async def list_all():
        found = {}

        async def list_one(name):
            with connections[name].use():
                await anyio.sleep(0.01)  # the other task runs meanwhile
                found[name] = {entry.name for entry in await sym.aio.kv_list()}

        async with anyio.create_task_group() as tasks:
            for name in domains:
                tasks.start_soon(list_one, name)
        return found

    async def open_one():
        with await sym.aio.connection(domain="ann"):
            async with await sym.aio.kv_create("a.kv") as kv:
                return (await sym.aio.pred(kv, [65])).argmax(), {each.name for each in await sym.aio.kv_list()}

    expected = {name: {f"{name}{number}.kv" for number in range(20)} for name in domains}
    with ThreadPoolExecutor(2) as pool:
        assert dict(zip(domains, pool.map(write, domains), strict=True)) == expected
    assert anyio.run(list_all) == expected
    assert anyio.run(list_all, backend="trio") == expected
    assert anyio.run(open_one) == (65, expected["ann"] | {"a.kv"})
    for connection in connections.values():
        connection.close()


def test_in_a_child_by_fork_it_can_not_be_used_and_nothing_else_takes_its_place(domains):
    with sym.connection(domain="ann"):
        kv = sym.kv_create("a.kv")
        sym.close()
        sym.connect()
        assert kv.write([1]) == 1, "a second connect of the program closes none of the others"
        pid = os.fork()
        if pid == 0:
            try:
                sym.kv_list()
            except sym.BadHandle:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert names() == {"a.kv"}, "the parent's goes on"


def test_what_can_not_be_connected_is_refused(shared):
    with pytest.raises(sym.NotConnected, match=r"nowhere\.sock"):
        sym.connection("/nowhere.sock")
    with pytest.raises(sym.NotFound):
        sym.connection(domain="nobody")
    with pytest.raises(sym.Invalid, match="wait"):
        sym.connection(wait=-1)
    assert names() is not None, "the program's own is as it was"
