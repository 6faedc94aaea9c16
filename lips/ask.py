"""Answers a question in streamed text; with --kv the conversation stays on the mount and can go on.

    symphony run ask "What is the capital of France?"
    symphony run ask --kv ada.kv "My name is Ada. Who are you?"
    symphony run ask --kv ada.kv --resume "What is my name?"

A question, an answer and a file are all there is to a conversation: `chat` is the same with a user who stays.
"""

from __future__ import annotations

import libsym as sym


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.text("question")
    arguments.kv("--kv", "keep the conversation in this KV file", metavar="PATH")
    arguments.add_argument("--resume", action="store_true", help="go on with the conversation in --kv")
    arguments.whole("--max-tokens", "of the answer", 256)
    args = arguments.parse_args()
    if args.resume and not args.kv:
        arguments.error("--resume needs --kv")
    kv = sym.kv_open(args.kv, "rw") if args.resume else sym.kv_create(args.kv)
    with sym.Chat(kv) as chat:
        sym.send_to_user(chat.ask(args.question, max_tokens=args.max_tokens).text())
        sym.send_to_user("\n")


if __name__ == "__main__":
    sym.main(main)
