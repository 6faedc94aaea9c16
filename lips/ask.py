"""Answers a question and streams the answer; --kv keeps the conversation on the mount for later.

    symphony run ask "What is the capital of France?"
    symphony run ask --kv ada.kv "My name is Ada. Who are you?"
    symphony run ask --kv ada.kv --resume "What is my name?"
    cat question.txt | symphony run ask -

A conversation needs no more than a question, an answer and a file. `chat` does the same for many questions.
"""

import sys

import libsym as sym


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", "- reads it from standard input")
    arguments.kv("--kv", "keep the conversation in this KV file", metavar="PATH")
    arguments.add_argument("--resume", action="store_true", help="go on with the conversation in --kv")
    arguments.whole("--max-tokens", "of the answer", 256)
    arguments.text("--system", "how a new conversation begins", metavar="TEXT")
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    args = arguments.parse_args()
    if args.resume and (not args.kv or args.system):
        arguments.error("--resume needs --kv, and no --system")
    question = sys.stdin.read() if args.question == "-" else args.question
    if not question.strip():
        arguments.error("the question is empty")
    try:
        kv = sym.kv_open(args.kv, "rw") if args.resume else sym.kv_create(args.kv)
    except sym.Exists as error:
        sys.exit(f"ask: {error}, or go on with the conversation in it by --resume")
    with sym.Chat(kv, args.system or ()) as chat:
        try:
            sym.send_to_user(chat.ask(question, temperature=args.temperature, max_tokens=args.max_tokens).text(), "\n")
            if not kv.room():
                sys.stderr.write("ask: the answer ends where the context is full\n")
        except BaseException:
            chat.settle()
            if args.kv and not args.resume and not kv.len():
                kv.remove()  # no answer: leave the name free for the next try
            raise
