"""A client of any OpenAI-compatible server, as good as one gets: asyncio, kept connections, streaming, token ids.

It needs nothing but the standard library and does little for a token, since it shares the cores with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from programs.work import Answer

Prompt = list[int | str]
"""Token ids; and text between them, where a server does not tell the ids of what it generated."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Response:
    """The body of one answer, whether it comes in chunks or with its length."""

    def __init__(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
        self._reader = reader
        self.is_last = headers.get("connection", "").lower() == "close"
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._num_left = int(headers.get("content-length", "0"))

    async def pieces(self) -> AsyncIterator[bytes]:
        if not self._is_chunked:
            yield await self._reader.readexactly(self._num_left)
            return
        while size := int((await self._reader.readline()).split(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what `data:` lines say, up to [DONE]; read the body to its end, so that the connection can be kept."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[5:])


class Server:
    """A server by its URL. One object for one event loop."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        """`options`: more fields for every request, such as a server's own."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/")
        self._free: list[Connection] = []
        self._options = options or {}
        self.model = self.owner = ""
        self.tells_tokens = False

    async def prepare(self) -> None:
        """Learn the model's name, whose server this is, and whether it tells which tokens it generated."""
        model = (await self.get("/v1/models"))["data"][0]
        self.model, self.owner = model["id"], model.get("owned_by", "")
        answer = await self.complete([100, 101, 102], 4)
        self.tells_tokens = -1 not in answer["tokens"]

    async def version(self) -> str:
        """Return the version of vLLM or llama.cpp; other servers have no common place for it."""
        places = {"vllm": ("/version", "version"), "llamacpp": ("/props", "build_info")}
        path, name = places.get(self.owner, ("", ""))
        return str((await self.get(path))[name]) if path else ""

    async def get(self, path: str) -> dict[str, Any]:
        connection = await asyncio.open_connection(self._host, self._port)
        try:
            response = await self._ask(connection, "GET", path, b"")
            found: dict[str, Any] = json.loads(b"".join([piece async for piece in response.pieces()]))
            return found
        finally:
            connection[1].close()

    async def post(self, path: str, request: dict[str, Any]) -> Any:
        """Return the answer, which is whole: no stream."""
        connection, response = await self._post(path, json.dumps(request | self._options).encode())
        found = json.loads(b"".join([piece async for piece in response.pieces()]))
        self._keep(connection, response)
        return found

    async def stream(self, path: str, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield events. The connection of a caller that leaves early is closed."""
        connection, response = await self._post(path, json.dumps(request | self._options).encode())
        is_whole = False
        try:
            async for event in response.events():
                if "error" in event:
                    raise RuntimeError(f"the server says: {event['error']}")
                yield event
            is_whole = True
        finally:
            if is_whole:
                self._keep(connection, response)
            else:
                connection[1].close()

    def _keep(self, connection: Connection, response: Response) -> None:
        if response.is_last:
            connection[1].close()
        else:
            self._free.append(connection)

    async def _post(self, path: str, body: bytes) -> tuple[Connection, Response]:
        """On a connection that was kept, if there is one that the server has not closed since."""
        while self._free:
            connection = self._free.pop()
            try:
                return connection, await self._ask(connection, "POST", path, body)
            except ConnectionError:
                connection[1].close()
        connection = await asyncio.open_connection(self._host, self._port)
        return connection, await self._ask(connection, "POST", path, body)

    async def _ask(self, connection: Connection, method: str, path: str, body: bytes) -> Response:
        reader, writer = connection
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: keep-alive\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        if not status:
            raise ConnectionResetError(f"{path}: the server closed the connection")
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        response = Response(reader, headers)
        if b" 200 " not in status:
            text = b"".join([piece async for piece in response.pieces()])
            raise RuntimeError(f"{path}: {status!r} {text[:500]!r}")
        return response

    def _request(self, prompt: Prompt, num_tokens: int, schema: dict[str, Any] | None) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": True,  # llama.cpp's
            "return_token_ids": True,  # vLLM's
        }
        if schema is None:
            request |= {"ignore_eos": True, "min_tokens": num_tokens}
        else:
            request["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return request

    async def complete(
        self,
        prompt: Prompt,
        num_tokens: int,
        *,
        schema: dict[str, Any] | None = None,
        began: asyncio.Event | None = None,
    ) -> Answer:
        """`began` is set with the first token. A token whose id is not told is -1; `continuation` has its text."""
        asked_s = time.monotonic()
        request = self._request(prompt, num_tokens, schema)
        tokens: list[int] = []
        came_s: list[float] = []
        texts: list[str] = []
        num_generated = 0
        computed: int | None = None
        async for event in self.stream("/v1/completions", request):
            if event.get("usage"):
                num_generated = event["usage"]["completion_tokens"]
                computed = _computed(event)
            for choice in event.get("choices", ()):
                ids = choice.get("token_ids") or ([-1] if choice.get("text") else [])
                tokens += ids
                texts.append(choice.get("text", ""))
                came_s += [time.monotonic()] * len(ids)
            if began is not None and came_s:
                began.set()
        if num_generated > len(tokens):  # several tokens came with one event, or one that is no whole character
            missing = num_generated - len(tokens)
            tokens += [-1] * missing
            came_s += [came_s[-1] if came_s else time.monotonic()] * missing
        found = Answer(tokens=tokens, asked_s=asked_s, came_s=came_s, text="".join(texts))
        return found if computed is None else found | {"computed": computed}

    async def complete_all(self, prefix: list[int], ends: list[list[int]], num_tokens: int) -> list[Answer]:
        """Prompts with one beginning. One goes ahead up to its first token, so that the others find it in the cache."""
        began = asyncio.Event()
        first = asyncio.create_task(self.complete([*prefix, *ends[0]], num_tokens, began=began))
        waiting = asyncio.create_task(began.wait())
        await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        others = [self.complete([*prefix, *end], num_tokens) for end in ends[1:]]
        return list(await asyncio.gather(first, *others))

    def continuation(self, answer: Answer) -> Prompt:
        """Return what was generated, for the next prompt."""
        if -1 in answer["tokens"]:
            return [answer["text"]]
        return list(answer["tokens"])

    def close_connections(self) -> None:
        """After a run: while the server is stopped for others, its patience with an idle connection ends."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


def _computed(event: dict[str, Any]) -> int | None:
    """Tokens of the prompt that were not in the cache, if the server says it."""
    if "timings" in event:  # llama.cpp's
        return int(event["timings"]["prompt_n"])
    details = event["usage"].get("prompt_tokens_details")  # vLLM's
    return event["usage"]["prompt_tokens"] - (details.get("cached_tokens") or 0) if details else None
