"""Constrained decoding: the answer is JSON of a schema, matches a regex, or fits a grammar.

    symphony run constrained "What colour has the sky?" --schema '{"enum": ["red", "green", "blue"]}'
    symphony run constrained "When did the Second World War end?" --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}" --speculate
    symphony run constrained "Is the sky blue?" --lark 'start: ("yes" | "no") ", because " /[a-z ]+/ "."'

The daemon allows only tokens that continue the grammar. If only one token is allowed, that token costs no step. With
--speculate the daemon guesses names and values from the question, and the keys of a list's next element. Each step
checks several guessed tokens. Guesses do not change the output.
"""

import sys

import libsym as sym


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", "what is to be answered")
    arguments.text("--schema", 'the answer is JSON of this schema, "$(cat FILE)" for one in a file', metavar="JSON")
    arguments.text("--regex", "this matches the whole answer")
    arguments.text("--lark", "the answer derives from start of this grammar, as Lark has it", metavar="GRAMMAR")
    arguments.add_argument(
        "--speculate", action="store_true", help="draft the tokens that followed the same last tokens earlier"
    )
    arguments.whole("--max-tokens", "limit of the answer", 200)
    args = arguments.parse_args()
    if [args.schema, args.regex, args.lark].count(None) != 2:
        arguments.error("one of --schema, --regex and --lark says what the answer is")
    if args.schema is not None:
        grammar = sym.Grammar.json(args.schema, compact=True)  # else a small model may write spaces endlessly
    elif args.regex is not None:
        grammar = sym.Grammar.regex(args.regex)
    else:
        grammar = sym.Grammar.lark(args.lark)
    chat, draft = sym.Chat(sym.kv_create()), sym.Ngram() if args.speculate else None
    answer = chat.ask(args.question, grammar=grammar, draft=draft, max_tokens=args.max_tokens)
    sym.send_to_user(answer.text(), "\n")
    print(f"{len(answer.tokens)} tokens in {sym.getrusage().steps} steps", file=sys.stderr)
    if answer.finish == "length":
        sys.exit(f"constrained: the answer is not whole: it ended after {args.max_tokens} tokens")
