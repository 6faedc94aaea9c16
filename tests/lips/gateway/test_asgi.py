"""The body of a stream: which parts go straight to the connection, and which through the server."""

import anyio
import pytest

from lips.gateway.asgi import Outlet


class Transport:
    """A connection whose buffer is as full as the test says."""

    def __init__(self):
        self.sent, self.buffered, self.is_closed = b"", 0, False

    def write(self, data):
        self.sent += data

    def get_write_buffer_size(self):
        return self.buffered

    def is_closing(self):
        return self.is_closed


def outlet_on(transport, version):
    async def send(message):
        await anyio.lowlevel.checkpoint()
        transport.sent += b"<head>" if message["type"] == "http.response.start" else b"<%b>" % message["body"]

    return Outlet({"state": {"transport": transport}, "http_version": version}, send, ())


@pytest.mark.parametrize(
    ("version", "straight"), [("1.1", b"4\r\nlast\r\n"), ("1.0", b"last"), ("1.2", b"4\r\nlast\r\n")]
)
async def test_parts_wait_before_the_response_has_begun_and_while_a_client_does_not_read(version, straight):
    transport = Transport()
    outlet = outlet_on(transport, version)
    outlet.put(b"first")
    outlet.put(b"second")
    assert (transport.sent, outlet.is_waiting, outlet.has_begun) == (b"", True, False)
    async with anyio.create_task_group() as tasks:  # two answers share the stream
        tasks.start_soon(outlet.flush)
        tasks.start_soon(outlet.flush)
        await anyio.lowlevel.checkpoint()
        outlet.put(b"third")
    assert transport.sent == b"<head><firstsecondthird>"
    transport.buffered = 1 << 20
    outlet.put(b"a")
    transport.buffered = 0
    outlet.put(b"b")
    assert outlet.is_waiting
    await outlet.flush()
    outlet.put(b"last")
    assert not outlet.is_waiting
    transport.is_closed = True
    outlet.put(b"for nobody")
    assert outlet.is_waiting, "the server notices that the client has gone"
    assert transport.sent == b"<head><firstsecondthird><ab>" + straight
