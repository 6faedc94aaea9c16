"""A client of an OpenAI-compatible server that runs the jobs of workloads. compare.py starts it.

    clients.py URL [OPTIONS]

OPTIONS is JSON with more fields for each request. For each run the client reads a line of jobs. The client shares the
cores with the server, so it is cheap: one event loop, kept connections, token ids, and only the standard library.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

from work import Answer, give

Prompt = list[int | str]
"""A prompt: token ids, and text in place of generated tokens whose ids the server does not report."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Response:
    """The body of one answer, either in chunks or with a known length."""

    def __init__(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
        self._reader = reader
        self.is_last = headers.get("connection", "").lower() == "close"
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._num_left = int(headers.get("content-length", "0"))

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        if not self._is_chunked:
            yield await self._reader.readexactly(self._num_left)
            return
        while size := int((await self._reader.readline()).split(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON of `data:` lines up to [DONE]. Read the whole body, so that the connection can be kept."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[5:])


class Server:
    """A server at a URL. `options` has more fields for every request, such as extensions of that server."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/")
        self._free: list[Connection] = []
        self._options = options
        self.model = ""

    async def prepare(self) -> None:
        connection = await asyncio.open_connection(self._host, self._port)
        response = await self._ask(connection, "GET", "/v1/models", b"")
        self.model = json.loads(await response.whole())["data"][0]["id"]
        connection[1].close()
        await self.complete([100, 101, 102], 4)  # a server may compile kernels at its first request
        self.close_connections()

    async def _post(self, body: bytes) -> tuple[Connection, Response]:
        """Post a request on a kept connection that the server has not closed, or on a new one."""
        while self._free:
            connection = self._free.pop()
            try:
                return connection, await self._ask(connection, "POST", "/v1/completions", body)
            except ConnectionError:
                connection[1].close()
        connection = await asyncio.open_connection(self._host, self._port)
        return connection, await self._ask(connection, "POST", "/v1/completions", body)

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
            raise RuntimeError(f"{path}: {status!r} {(await response.whole())[:500]!r}")
        return response

    def _request(self, prompt: Prompt, num_tokens: int, schema: dict[str, Any] | None) -> dict[str, Any]:
        request = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        request |= {"stream_options": {"include_usage": True}}
        request |= {"cache_prompt": True, "return_token_ids": True}  # fields of llama.cpp and of vLLM
        if schema is None:
            request |= {"ignore_eos": True, "min_tokens": num_tokens}
        else:
            request["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return request | self._options

    async def complete(
        self,
        prompt: Prompt,
        num_tokens: int,
        *,
        schema: dict[str, Any] | None = None,
        began: asyncio.Event | None = None,
    ) -> Answer:
        """Complete a prompt. Set `began` at the first token. A token whose id the server does not report is -1."""
        asked_s = time.monotonic()
        connection, response = await self._post(json.dumps(self._request(prompt, num_tokens, schema)).encode())
        found = Answer(tokens=[], asked_s=asked_s, came_s=[], text="")
        num_generated = 0
        async for event in response.events():
            if "error" in event:
                raise RuntimeError(f"the server says: {event['error']}")
            if event.get("usage"):
                num_generated = event["usage"]["completion_tokens"]
                if (computed := _computed(event)) is not None:
                    found["computed"] = computed
            for choice in event.get("choices", ()):
                ids = choice.get("token_ids") or ([-1] if choice.get("text") else [])
                found["tokens"] += ids
                found["text"] += choice.get("text", "")
                found["came_s"] += [time.monotonic()] * len(ids)
            if began is not None and found["came_s"]:
                began.set()
        if response.is_last:
            connection[1].close()
        else:
            self._free.append(connection)
        # An event may have the text of several tokens. A token that is part of a character may have no event.
        missing = num_generated - len(found["tokens"])
        if missing > 0:
            found["came_s"] += [found["came_s"][-1] if found["came_s"] else time.monotonic()] * missing
            found["tokens"] += [-1] * missing
        return found

    def close_connections(self) -> None:
        """Close kept connections after a run, since idle connections time out while the server is stopped."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


def _computed(event: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens that were not in the server's cache, if the server reports it."""
    if "timings" in event:  # llama.cpp
        return int(event["timings"]["prompt_n"])
    details = event["usage"].get("prompt_tokens_details")  # vLLM
    return event["usage"]["prompt_tokens"] - (details.get("cached_tokens") or 0) if details else None


async def prompts(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Complete all prompts concurrently.

    If the prompts have a common prefix, the first prompt runs alone until its first token. The server then has the
    prefix in its cache for the other prompts.
    """
    prefix, began = work.get("prefix", []), asyncio.Event()
    asked = [
        server.complete([*prefix, *prompt], work["num_tokens"], schema=work.get("schema"), began=began)
        for prompt in work["prompts"]
    ]
    first = asyncio.create_task(asked[0])
    if prefix:
        waiting = asyncio.create_task(began.wait())
        await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    return list(await asyncio.gather(first, *asked[1:]))


async def session(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Run a session. Each request has the whole context, and the server has most of it in its cache."""
    await asyncio.sleep(work["begin_s"])
    prompt: Prompt = [*work["prefix"]]
    answers: list[Answer] = []
    for number, turn in enumerate(work["turns"]):
        prompt = [*prompt, *turn["say"]]
        answer = await server.complete(prompt, work["num_tokens"])
        label = work["label"] if number or not work["label"] else f"{work['label']} begins"
        answers.append(answer | {"label": label})
        said: Prompt = [answer["text"]] if -1 in answer["tokens"] else [*answer["tokens"]]
        prompt = [*prompt, *said]
        await asyncio.sleep(turn["pause_s"])
    return answers


async def rag(server: Server, work: dict[str, Any]) -> list[Answer]:
    answers: list[Answer] = []

    async def ask(questions: list[dict[str, Any]], label: str) -> None:
        for question in questions:
            prompt = [*work["documents"][question["document"]], *question["question"]]
            answers.append(await server.complete(prompt, work["num_tokens"]) | {"label": label})

    count = work["num_clients"]
    for label in ("warm", "questions"):
        await asyncio.gather(*(ask(work[label][number::count], label) for number in range(count)))
    return answers


async def main() -> None:
    url, *options = sys.argv[1:]
    server = Server(url, json.loads(options[0]) if options else {})
    await server.prepare()
    print(json.dumps({"model": server.model}), flush=True)
    kinds = {"prompts": prompts, "session": session, "rag": rag}
    while line := await asyncio.to_thread(sys.stdin.readline):
        done = await asyncio.gather(*(kinds[job["kind"]](server, job["work"]) for job in json.loads(line)))
        server.close_connections()
        give(answer for answers in done for answer in answers)


if __name__ == "__main__":
    asyncio.run(main())
