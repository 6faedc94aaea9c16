"""Name of an open file after a move, and the file that its handle then removes."""

import pytest

import libsym as sym

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emptied")]


def names():
    return [entry.name for entry in sym.kv_list() if entry.kind == "kv"]


def test_the_path_follows_a_rename_however_the_name_was_spelled(emptied):
    kv, other = sym.kv_create("a.kv"), sym.kv_open(emptied.mount / "a.kv")
    beside = sym.kv_create("beside.kv")
    sym.kv_rename("./a.kv", "b.kv")
    assert (kv.path, other.path, beside.path) == ("b.kv", "b.kv", "beside.kv")
    (emptied.mount / "d").mkdir()
    sym.kv_rename(emptied.mount / "b.kv", "d/c.kv")
    sym.kv_rename("d/c.kv", "d/e.kv")
    assert kv.path == "d/e.kv"
    kv.remove()
    assert sym.kv_list("d") == []
    assert names() == ["beside.kv"]


def test_a_file_that_was_computed_or_found_by_kv_open_or_compute_follows_too():
    made, found = (sym.kv_open_or_compute("a.kv", [1, 2]) for _ in range(2))
    sym.kv_rename("a.kv", "b.kv")
    assert (made.path, found.path) == ("b.kv", "b.kv")
    made.remove()
    assert names() == []


def test_of_a_file_with_two_names_only_the_one_that_was_moved_is_another(emptied):
    kv = sym.kv_create("a.kv")
    (emptied.mount / "link.kv").hardlink_to(emptied.mount / "a.kv")
    linked = sym.kv_open("link.kv")
    sym.kv_rename("link.kv", "new.kv")
    assert (kv.path, linked.path) == ("a.kv", "new.kv")
    linked.remove()
    assert names() == ["a.kv"]


def test_a_rename_between_two_names_of_one_file_moves_nothing(emptied):
    kv = sym.kv_create("a.kv")
    (emptied.mount / "b.kv").hardlink_to(emptied.mount / "a.kv")
    sym.kv_rename("a.kv", "b.kv")
    assert kv.path == "a.kv"
    kv.remove()
    assert names() == ["b.kv"]


def test_a_file_that_others_have_moved_is_kept_and_stays_open(emptied):
    kv = sym.kv_create("mine.kv")
    sym.kv_write(kv, [1, 2])
    (emptied.mount / "mine.kv").rename(emptied.mount / "kept.kv")
    with pytest.raises(sym.NotFound, match=r"mine\.kv: .* by the path"):
        kv.remove()
    assert names() == ["kept.kv"]
    assert (kv.path, kv.closed, len(kv)) == ("mine.kv", False, 2)


def test_the_file_behind_a_symbolic_link_is_what_its_handle_removes(emptied):
    sym.kv_create("a.kv").close()
    (emptied.mount / "s.kv").symlink_to("a.kv")
    sym.kv_open("s.kv").remove()
    assert names() == []


async def test_it_is_so_in_event_loops():
    kv = await sym.aio.kv_create("a.kv")
    await sym.aio.kv_rename("a.kv", "b.kv")
    assert kv.path == "b.kv"
    await sym.aio.kv_remove(kv)
    assert names() == []


def test_a_directory_that_is_missing_on_the_way_is_the_one_that_is_named(emptied):
    (emptied.mount / "d").mkdir()
    for path in ("d/none/a.kv", "d/none/deeper/a.kv"):
        for call in (sym.kv_create, sym.kv_open):
            with pytest.raises(sym.NotFound, match=f"^{path}: there is no directory none "):
                call(path)
    with pytest.raises(sym.NotFound, match=r"^d/none: no such file"):
        sym.kv_open("d/none")
