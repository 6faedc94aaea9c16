"""The paper's first program: plain decoding, one `pred()` a token.

symphony run lips/plain.py "Once upon a time"
"""

from __future__ import annotations

import sys

import libsym as sym

MAX_TOKENS = 64


def main() -> None:
    prompt = " ".join(sys.argv[1:]) or "Once upon a time"
    end = sym.model_info().eos_ids
    text = sym.Detokenizer()
    kv = sym.kv_create()
    tokens = sym.tokenize(prompt)
    for _ in range(MAX_TOKENS):
        dist = sym.pred(kv, tokens)
        token = dist.argmax()
        if token in end:
            break
        sym.send_to_user(text.add(token))
        tokens = [token]
    sym.send_to_user(text.flush() + "\n")
    sym.kv_close(kv)


if __name__ == "__main__":
    main()
