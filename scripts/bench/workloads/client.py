#!/usr/bin/env python3
"""A process that does the jobs of a workload against a server; `compare.py` starts it.

client.py URL [OPTIONS], OPTIONS being more fields for each request, as JSON. A line of jobs comes for each run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import branches
import branching_client
import editor
import plain
import rag
import react
import sessions
import shared
import structured
from kinds import Client
from openai_client import Server

CLIENTS: dict[str, Client] = {
    "plain": plain.client,
    "shared": shared.client,
    "branches": branches.client,
    "react": react.client,
    "structured": structured.client,
    "rag": rag.client,
    "sessions": sessions.client,
    "editor": editor.client,
    "rates": branching_client.rates,
    "program": branching_client.program,
}


async def main() -> None:
    url, *options = sys.argv[1:]
    server = Server(url, json.loads(options[0]) if options else None)
    await server.prepare()
    server.close_connections()
    about = {"model": server.model, "tells_tokens": server.tells_tokens, "owner": server.owner}
    print(json.dumps(about | {"version": await server.version()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        jobs: list[dict[str, Any]] = json.loads(line)
        done = await asyncio.gather(*(CLIENTS[job["kind"]](server, job["work"]) for job in jobs))
        server.close_connections()
        print(json.dumps([answer for answers in done for answer in answers]), flush=True)


asyncio.run(main())
