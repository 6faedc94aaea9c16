r"""Token healing: a prompt that ends in the middle of a token goes on as if it did not.

symphony run healing "The link is <a href=\"http:"
symphony run healing "I love New Yor"

In what a model was trained on, `http://` is one token after another than `http:` is: behind the second, `//` hardly
ever comes. So the prompt's last token is taken back. The next ones are drawn among those that spell it again, and may
go beyond it: a set of tokens, made of their bytes.
"""

from __future__ import annotations

import argparse

import libsym as sym


def spelling(left: bytes) -> sym.TokenSet:
    """The tokens that begin with this, and those that this begins with."""
    return sym.token_set(lambda text: bool(text) and (text.startswith(left) or left.startswith(text)))


def heal(kv: sym.KV, prompt: list[int]) -> list[int]:
    """Appends the prompt but for its last token; gives the tokens that spell that one anew, and perhaps more.

    The last of them is not in the file: give them to what goes on.
    """
    texts = sym.vocabulary()
    left = texts[prompt[-1]]
    dist, tokens = sym.pred(kv, prompt[:-1]), list[int]()
    while True:
        tokens.append(dist.argmax(allowed=spelling(left)))
        left = left[len(texts[tokens[-1]]) :]
        if not left:
            return tokens
        dist = sym.pred(kv, tokens[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", help="the text to go on with, cut anywhere")
    parser.add_argument("--max-tokens", type=int, default=16, help="(default: %(default)s)")
    args = parser.parse_args()
    prompt = sym.tokenize(args.prompt)
    if len(prompt) < 2:
        parser.error("the prompt needs two tokens at least: the last one is taken back")
    with sym.kv_create() as plain:
        print("as it is:", args.prompt + sym.generate(plain, prompt, max_tokens=args.max_tokens).full_text())
    with sym.kv_create() as kv:
        healed = heal(kv, prompt)
        tail = sym.generate(kv, healed[-1:], max_tokens=args.max_tokens)
        print("healed:  ", sym.detokenize([*prompt[:-1], *healed, *tail]))


if __name__ == "__main__":
    sym.main(main)
