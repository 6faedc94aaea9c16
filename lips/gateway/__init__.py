"""Serves the HTTP interfaces of OpenAI, Anthropic and Ollama, and a page to chat on.

    symphony run gateway                              # http://127.0.0.1:8080, for this machine alone
    symphony run gateway --host 0.0.0.0 --keys FILE   # for others, by their keys

The gateway serves every client of these interfaces: chat and text completions, responses, messages, streamed or not,
with tools, JSON schemas and log-probabilities. Common beginnings of prompts are computed once for each key. A
conversation is a file under /kv/gateway-UID: `ls`, `cp` and `rm` list, fork and remove conversations. A header of the
answer names the fields of the request that had no effect. Fields that this server cannot obey, and that would change
the answer, are refused; `--strict` refuses unknown fields, too.
"""

ISOLATION = "none"
"""The gateway runs without a sandbox: a sandbox would forbid it to listen, and to read a file of keys at any path."""
