"""Wrong input: each a clear one-line error with its errno, and nothing lost."""

import errno
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

import libsym as sym
from libsym.abi import ROWS_LAST, Op
from libsym.channel.handshake import GREETING
from libsym.channel.process import process


@pytest.fixture
def connected(daemon):
    sym.connect(str(daemon.socket))
    free = sym.daemon_stat()["num_free_pages"]
    yield daemon
    assert sym.daemon_stat()["num_free_pages"] == free, "an error leaked pages"
    sym.close()


def error_of(function, *arguments, **options):
    """The error that a call raises; its message must be one line that says something."""
    with pytest.raises(sym.SymError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 10
    return caught.value


@pytest.mark.slow
def test_an_unknown_path(connected):
    error = error_of(sym.kv_open, "no/such.kv")
    assert error.errno == errno.ENOENT
    assert "no/such.kv" in str(error)


def test_a_path_outside_the_mount(connected):
    assert error_of(sym.kv_open, "/etc/passwd").errno == errno.EXDEV


def test_a_plain_file_is_no_kv_file(connected):
    (connected.mount / "note.txt").write_text("hello")
    assert error_of(sym.kv_open, "note.txt").errno == errno.EINVAL
    (connected.mount / "note.txt").unlink()


@pytest.mark.parametrize("token", [-1, 100_000, 2**31 - 1])
def test_a_token_out_of_range(connected, token):
    with sym.kv_create() as kv:
        error = error_of(sym.pred, kv, [1, token])
        assert error.errno == errno.EINVAL
        assert str(token) in str(error)
        assert kv.len() == 0


@pytest.mark.parametrize("positions", [[0, -1], [0, 10**6], 10**6, -5])
def test_a_position_out_of_range(connected, positions):
    with sym.kv_create() as kv:
        assert error_of(sym.pred, kv, [1, 2], positions).errno == errno.EINVAL
        assert kv.len() == 0


def test_positions_that_do_not_match_the_tokens(connected):
    with sym.kv_create() as kv:
        assert error_of(sym.pred, kv, [1, 2, 3], [0, 1]).errno == errno.EINVAL


def test_no_tokens(connected):
    with sym.kv_create() as kv:
        assert error_of(sym.pred, kv, []).errno == errno.EINVAL


def test_more_context_than_the_model_has(connected):
    limit = sym.model_info().max_positions
    with sym.kv_create() as kv:
        sym.kv_write(kv, [1], limit - 1)
        assert error_of(sym.pred, kv, [2]).errno == errno.EINVAL
        assert kv.len() == 1


def test_a_handle_that_is_closed(connected):
    kv = sym.kv_create()
    kv.close()
    assert error_of(sym.pred, kv, [1]).errno == errno.EBADF


def test_a_handle_of_another_process(connected):
    with sym.kv_create() as kv:
        sym.kv_write(kv, [1, 2, 3])
        out = connected.run(
            """
            from libsym.abi import Op
            from libsym.channel.process import process
            mine = sym.kv_create()
            stolen = int(sys.argv[1])
            for handle in {0, stolen, stolen + 1, stolen + 100, 2**63} - {mine.handle}:
                try:
                    print(process.channel().call(Op.KV_READ, handle=handle))
                except sym.SymError as error:
                    print(error.errno)
            """,
            str(kv.handle),
        )
        assert set(out.split()) == {str(errno.EBADF)}
        assert kv.len() == 3


def test_writing_through_a_handle_for_reading(connected):
    with sym.kv_create("ro.kv") as kv:
        sym.kv_write(kv, [1])
    with sym.kv_open("ro.kv") as kv:
        assert error_of(sym.pred, kv, [2]).errno in (errno.EACCES, errno.EBADF)
        assert kv.len() == 1
    sym.kv_remove("ro.kv")


def test_a_name_that_is_taken(connected):
    with sym.kv_create("taken.kv"):
        assert error_of(sym.kv_create, "taken.kv").errno == errno.EEXIST
    sym.kv_remove("taken.kv")


def test_a_truncation_beyond_the_end(connected):
    with sym.kv_create() as kv:
        sym.kv_write(kv, [1, 2])
        assert error_of(sym.kv_truncate, kv, 3).errno == errno.EINVAL


@pytest.mark.slow
def test_a_full_pool_refuses_and_keeps_what_is_there(start_daemon):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "1M")  # soon full
    sym.connect(str(daemon.socket))
    free = sym.daemon_stat()["num_free_pages"]
    files = []
    with pytest.raises(sym.NoSpace) as caught:  # noqa: PT012 - how many it takes is the pool's business
        while True:
            files.append(sym.kv_create())
            sym.kv_write(files[-1], [1] * 1000)
    assert caught.value.errno == errno.ENOSPC
    assert [kv.len() for kv in files] == [1000] * (len(files) - 1) + [0]
    files[0].close()
    sym.pred(files[-1], [1] * 500)
    for kv in files[1:]:
        kv.close()
    assert sym.daemon_stat()["num_free_pages"] == free, "an error leaked pages"
    sym.close()


def test_more_rows_than_the_region_holds(connected):
    with sym.kv_create() as kv:
        assert error_of(sym.pred, kv, [1] * 3000, rows="all").errno == errno.EMSGSIZE
        assert kv.len() == 0


def test_a_daemon_that_is_not_there(connected, tmp_path):
    error = error_of(sym.connect, str(tmp_path / "nobody.sock"))
    assert error.errno == errno.ENOTCONN
    assert "symphony serve" in str(error)
    sym.connect(str(connected.socket))


def other_model(image):
    """The image with one digit of the model's fingerprint changed."""
    header, data = image[:4096], image[4096:]
    at = header.index(b'"model":') + len('"model":"') + 3
    return header[:at] + (b"0" if header[at : at + 1] != b"0" else b"1") + header[at + 1 :] + data


def test_an_image_that_is_cut_off_or_of_another_model(connected, tmp_path):
    with sym.kv_create("good.kv") as kv:
        sym.kv_write(kv, list(range(100)))
    image = (connected.mount / "good.kv").read_bytes()
    sym.kv_remove("good.kv")
    bad = {
        "cut.kv": image[:-1],
        "bits.kv": image[:8192] + bytes([image[8192] ^ 1]) + image[8193:],
        "model.kv": other_model(image),
    }
    for name, data in bad.items():
        source = tmp_path / name
        source.write_bytes(data)
        done = connected.shell(f"cp {source} {connected.mount}/{name}", check=False)
        assert done.returncode != 0, name
        assert "Invalid argument" in done.stderr
        assert error_of(sym.kv_open, name).errno == errno.EINVAL
        (connected.mount / name).unlink()
    (tmp_path / "good.kv").write_bytes(image)
    connected.shell(f"cp {tmp_path}/good.kv {connected.mount}/again.kv")
    with sym.kv_open("again.kv") as kv:
        assert sym.kv_read(kv)[0] == list(range(100))
    sym.kv_remove("again.kv")


def test_strangers_at_the_socket_are_turned_away(connected):
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("=IIQ", 0x314D5953, 999, 0)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(connected.socket))
            stranger.sendall(greeting[:16])
            stranger.settimeout(10)
            assert b"version" in stranger.recv(1000) or greeting.startswith(b"GET")
    assert sym.daemon_stat()["lips"] == 1


@pytest.mark.parametrize("name", ["\udc80gone", "two\nlines", "\x1b[31mred"])
def test_a_name_that_cannot_be_printed_is_quoted_on_one_line(connected, name):
    with sym.kv_create() as kv:
        error = error_of(sym.kv_open, name)
        assert error.errno == errno.ENOENT
        assert str(error).isprintable()
        assert kv.len() == 0  # the connection lives


@pytest.mark.parametrize("call", [sym.chat_template, sym.chat_tokens])
def test_half_a_surrogate_pair_in_a_conversation(connected, call):
    for content in ("\ud800", "<eos>\ud800"):
        error = error_of(call, [{"role": "user", "content": content}])
        assert error.errno == errno.EINVAL


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": {}}',
        b'{"messages": [1]}',
        b'{"messages": [], "tools": 1}',
        b'{"messages": [[]]}',
    ],
)
@pytest.mark.parametrize("op", [Op.CHAT_TEMPLATE, Op.CHAT_TOKENS])
def test_a_conversation_that_is_none(connected, op, form):
    assert error_of(process.channel().call, op, payload=form).errno == errno.EINVAL
    later = form.replace(b"}", b', "after_answer": true}') if form.endswith(b"}") else form
    assert error_of(process.channel().call, op, payload=later).errno == errno.EINVAL


@pytest.mark.parametrize("counts", [(-1, 1), (-1, 2), (2, -1), (3, -1), (2**62, -(2**62)), (-(2**63), 0)])
def test_counts_that_no_library_sends(connected, counts):
    with sym.kv_create() as kv:
        payload = bytes(4 * max(0, sum(counts)))
        call = process.channel().call
        error = error_of(call, Op.PRED, flags=ROWS_LAST, handle=kv.handle, args=(*counts, 0, 0), payload=payload)
        assert error.errno == errno.EINVAL
        assert kv.len() == 0


def test_clients_that_hang_up_in_the_handshake_leave_no_descriptors(connected):
    descriptors = Path(f"/proc/{connected.process.pid}/fd")
    sym.model_info()
    before = len(list(descriptors.iterdir()))
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(connected.socket))
            stranger.sendall(GREETING)
    deadline_s = time.monotonic() + 10
    while len(list(descriptors.iterdir())) > before and time.monotonic() < deadline_s:
        sym.model_info()  # the daemon's turn
    assert len(list(descriptors.iterdir())) <= before


@pytest.mark.slow
def test_more_connections_than_descriptors_do_not_end_the_daemon(start_daemon):
    daemon = start_daemon("--model", "tiny")
    assert daemon.stat()["lips"] == 1, "it has opened what it needs for itself"
    is_open = Path(f"/proc/{daemon.process.pid}/fd")
    num_open = next(number for number in range(1000) if not (is_open / str(number)).is_symlink())
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (num_open, hard))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(60)]
    for stranger in strangers:
        stranger.connect(str(daemon.socket))
    deadline_s = time.monotonic() + 10
    while "no connection can be accepted" not in daemon.log.read_text():
        assert daemon.process.poll() is None
        assert time.monotonic() < deadline_s
    for stranger in strangers:
        stranger.close()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert daemon.stat()["lips"] == 1
    assert daemon.stop() == 0
