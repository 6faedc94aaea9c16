"""Send one turn of a conversation to the gateway and print all turns so far: talk.py KEY CONVERSATION

Exit status 1: the gateway refuses; its HTTP status is printed. Exit status 2: no gateway listens.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

GATEWAY = "http://127.0.0.1:8080"


def asked(path: str, key: str, body: object = None) -> dict[str, object]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(GATEWAY + path, data, headers), timeout=60) as answer:
        told: dict[str, object] = json.load(answer)
    return told


def main() -> int:
    key, name = sys.argv[1:]
    turn = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 3, "conversation": name}
    try:
        asked("/v1/chat/completions", key, turn)
        print(json.dumps(asked(f"/sessions/{name}", key)))
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
        return 1
    except OSError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
