"""Heat of files: it follows their uses, each user sees his own view, and the number of files does not matter."""

import stat

import pytest

from kvfs.facts.hot import HotFile, hot_files, path_for
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.tree import Credentials
from kvfs.volume.heat import HALF_LIFE_S, NUM_OF_ALL, NUM_OF_OWNER, Heat
from tests.kvfs.fakes import commit_all

ROOT, ANN, BOB = Credentials(0, 0), Credentials(1000, 1000), Credentials(1001, 1001)


class Clock:
    """Time, as a test tells it."""

    def __init__(self) -> None:
        self.now_s = 50_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(fs: FileSystem) -> Clock:
    clock = Clock()
    fs.volume.heat = Heat(clock)
    return clock


def make(fs: FileSystem, path: str, creds: Credentials = ANN, mode: int = 0o600) -> None:
    fs.kv_close(fs.kv_create(creds, path, mode))


def use(fs: FileSystem, path: str, creds: Credentials = ANN) -> None:
    fs.kv_close(fs.kv_open(creds, path, write=False))


def append(fs: FileSystem, file: OpenKv, tokens: list[int]) -> None:
    commit_all(fs.reserve(file, tokens, list(range(len(tokens)))))
    fs.committed(file)


def hot(fs: FileSystem, creds: Credentials = ANN) -> list[HotFile]:
    return [file for file in hot_files(fs.volume, creds) if file is not None]


def seen(fs: FileSystem, creds: Credentials = ANN) -> list[str]:
    return [file.path for file in hot(fs, creds)]


def test_what_is_used_more_often_is_hotter_and_what_is_not_used_cools_by_half_a_minute_each(fs, clock):
    for name in ("a.kv", "b.kv", "c.kv"):
        make(fs, name)
        clock.now_s += 2
    for _ in range(3):
        use(fs, "b.kv")
        clock.now_s += 2
    use(fs, "a.kv")
    assert seen(fs) == ["b.kv", "a.kv", "c.kv"]
    warm = [file.heat for file in hot(fs)]
    clock.now_s += HALF_LIFE_S
    files = hot(fs)
    assert [file.heat for file in files] == pytest.approx([heat / 2 for heat in warm])
    assert files[0].idle_s == pytest.approx(HALF_LIFE_S + 2)
    assert [file.hits for file in files] == [3, 1, 0]


def test_a_file_that_is_used_in_every_second_has_all_the_heat_that_there_is(fs, clock):
    make(fs, "a.kv")
    for _ in range(int(20 * HALF_LIFE_S)):
        use(fs, "a.kv")
        use(fs, "a.kv")
        clock.now_s += 1
    clock.now_s -= 1
    (file,) = hot(fs)
    assert file.heat == pytest.approx(1, abs=1e-4)
    assert file.hits == 40 * HALF_LIFE_S


def test_appending_and_forking_are_uses_and_an_anonymous_file_is_not_told(fs, clock):
    file = fs.kv_create(ANN, "a.kv")
    clock.now_s += 10
    append(fs, file, [1, 2, 3])
    (found,) = hot(fs)
    assert (found.idle_s, found.tokens, found.opens) == (0, 3, 1)
    clock.now_s += 10
    fork = fs.kv_fork(ANN, file, None)
    append(fs, fork, [4])
    (found,) = hot(fs)
    assert (found.path, found.idle_s, found.hits) == ("a.kv", 0, 1)


def test_a_name_is_told_to_those_alone_who_may_list_it_and_read_the_file(fs, clock):
    for name, mode in (("open", 0o755), ("searched", 0o711), ("closed", 0o700)):
        fs.volume.tree.make(fs.volume.tree.root, name.encode(), stat.S_IFDIR, mode=mode, uid=ANN.uid, gid=ANN.gid)
        make(fs, f"{name}/theirs.kv", mode=0o644)
    make(fs, "secret.kv")
    assert set(seen(fs, ANN)) == {"open/theirs.kv", "searched/theirs.kv", "closed/theirs.kv", "secret.kv"}
    assert seen(fs, BOB) == ["open/theirs.kv"]
    assert set(seen(fs, ROOT)) == set(seen(fs, ANN))


def test_a_connection_that_is_confined_sees_its_domain_with_paths_from_there(fs, clock):
    directory = fs.volume.tree.make(fs.volume.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=ANN.gid)
    fs.volume.domains.set_limit(directory, b"user.kv.quota", b"1M", ANN.uid)
    make(fs, "outside.kv")
    make(fs, "d/inside.kv")
    assert seen(fs, fs.confine(ANN, "d")) == ["inside.kv"]


@pytest.mark.slow
def test_however_many_files_others_use_a_user_sees_the_hottest_of_his_own(fs, clock):
    for index in range(NUM_OF_OWNER // 2):
        make(fs, f"mine{index}.kv", BOB)
    make(fs, "old.kv")
    for _ in range(5):
        clock.now_s += 1
        use(fs, "old.kv")
    clock.now_s += 10
    for index in range(2 * NUM_OF_ALL + 1):
        make(fs, f"{index}.kv")
    assert seen(fs)[0] == "old.kv", "it was never forgotten: it is hotter than what was used once"
    assert len(seen(fs, ROOT)) <= 2 * NUM_OF_ALL
    assert len(seen(fs, BOB)) == NUM_OF_OWNER // 2


def test_removed_renamed_and_given_files_are_told_as_they_are_now(fs, clock):
    for name in ("removed.kv", "renamed.kv", "given.kv"):
        make(fs, name)
    fs.kv_remove(ANN, "removed.kv")
    fs.kv_rename(ANN, "renamed.kv", "after.kv")
    fs.volume.change_owner(fs.volume.tree.child(fs.volume.tree.root, b"given.kv"), BOB.uid)
    assert seen(fs) == ["after.kv"]
    use(fs, "given.kv", BOB)
    assert seen(fs, BOB) == ["given.kv"]
    fs.kv_remove(BOB, "given.kv")
    assert seen(fs, ROOT) == ["after.kv"]


def test_a_file_that_no_path_of_a_call_can_name_has_none_to_show(fs: FileSystem) -> None:
    directory = fs.volume.tree.root
    for depth in range(2100):
        if depth == 2000:
            above = directory
        directory = fs.volume.tree.make(directory, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
    near, far = (fs.volume.make_plain(each, b"f", 0o644, 0, 0) for each in (above, directory))
    assert path_for(fs.volume, near, ANN) == "d/" * 2000 + "f"
    assert path_for(fs.volume, far, ANN) is None
