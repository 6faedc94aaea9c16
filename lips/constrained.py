"""Constrained decoding: an answer that is JSON of a schema, a match of a regex, or of a grammar.

symphony run constrained "What colour has the sky?" --schema '{"enum": ["red", "green", "blue"]}'
symphony run constrained "When did the war begin?" --regex "In [0-9]{4}, on [A-Z][a-z]+ [0-9]{1,2}" --speculate
symphony run constrained "Is it hot?" --lark 'start: ("yes" | "no") "."'

The daemon masks what the grammar does not allow before a token is drawn. Where only one continuation is possible, its
tokens take no steps. With --speculate it also guesses from what came before, and checks the guesses in one step; the
answer is the same.
"""

from __future__ import annotations

import argparse

import libsym as sym


def answer(kv: sym.KV, question: str, grammar: sym.Grammar, *, speculate: bool, max_tokens: int) -> tuple[str, int]:
    """The model's likeliest answer of this form, and how many steps of the daemon it took."""
    before = sym.getrusage().steps
    draft = sym.Ngram(max_tokens=8, min_match=1) if speculate else None
    text = sym.Chat(kv).ask(question, grammar=grammar, draft=draft, max_tokens=max_tokens).full_text()
    return text, sym.getrusage().steps - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--schema", help="a JSON schema")
    form.add_argument("--regex", help="a regular expression, which the whole answer matches")
    form.add_argument("--lark", help="a grammar in Lark's notation")
    parser.add_argument("--speculate", action="store_true", help="guess from what came before")
    parser.add_argument("--max-tokens", type=int, default=200, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.schema is not None:
        grammar = sym.Grammar.json(args.schema, compact=True)
    elif args.regex is not None:
        grammar = sym.Grammar.regex(args.regex)
    else:
        grammar = sym.Grammar.lark(args.lark)
    with sym.kv_create() as kv:
        text, num_steps = answer(kv, args.question, grammar, speculate=args.speculate, max_tokens=args.max_tokens)
    print(text)
    print(f"{num_steps} steps")


if __name__ == "__main__":
    sym.main(main)
