"""Serves the HTTP interfaces of OpenAI, Anthropic and Ollama, and a page to talk on; itself a program.

    symphony run gateway                              # http://127.0.0.1:8080, for this machine alone
    symphony run gateway --host 0.0.0.0 --keys FILE   # for others, by their keys

Every client of those interfaces works with it: chat and text completions, responses, messages, streamed or not, with
tools, JSON schemas and log-probabilities. What prompts have in common is computed once, for each key apart. A
conversation is a file under /kv/gateway-UID: `ls`, `cp` and `rm` list, fork and forget them. Fields of a request that
have no effect are named in a header of the answer, or refused; `--strict` refuses unknown ones, too.
"""

ISOLATION = "none"
"""The gateway listens, as no sandbox lets it, and reads a file of keys at any path."""
