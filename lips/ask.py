"""Answers a question in streamed text; with --kv the conversation stays on the mount and can go on.

symphony run lips/ask.py "What is the capital of France?"
symphony run lips/ask.py --kv chat.kv "My name is Ada. Who are you?"
symphony run lips/ask.py --kv chat.kv --resume "What is my name?"
"""

from __future__ import annotations

import argparse

import libsym as sym

MAX_TOKENS = 256


def answer(kv: sym.KV, tokens: list[int]) -> None:
    """Stream the model's answer; the end token itself is not put into the file."""
    end = sym.model_info().eos_ids
    text = sym.Detokenizer()
    for _ in range(MAX_TOKENS):
        token = sym.pred(kv, tokens).argmax()
        if token in end:
            break
        sym.send_to_user(text.add(token))
        tokens = [token]
    else:
        sym.kv_write(kv, tokens)  # the last one was shown: --resume goes on behind it
    sym.send_to_user(text.flush() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question with the model that runs beside this program.")
    parser.add_argument("question")
    parser.add_argument("--kv", metavar="PATH", help="keep the conversation in this KV file")
    parser.add_argument("--resume", action="store_true", help="go on with the conversation in --kv")
    args = parser.parse_args()
    if args.resume and not args.kv:
        parser.error("--resume needs --kv")
    try:
        kv = sym.kv_open(args.kv, "rw") if args.resume else sym.kv_create(args.kv)
        with kv:
            question = [{"role": "user", "content": args.question}]
            answer(kv, sym.chat_tokens(question, after_answer=args.resume))
    except sym.SymError as error:
        parser.exit(1, f"ask: {error}\n")


if __name__ == "__main__":
    main()
