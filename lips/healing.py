"""Token healing: a text may end in the middle of a token, and goes on as if it had not.

    symphony run healing "The capital of Fra"
    symphony run healing 'An example link is <a href="http:'

Where a text is cut off, its last token is, too. Behind "http" and ":" a model hardly says "//": in all that it has read
"://" is one token, and ":" alone says that something else follows. Healing takes the last token back and draws one in
its place, but only among those that begin with its text. (Lundberg, "The Art of Prompt Design: Prompt Boundaries and
Token Healing", 2023.) Which ones these are is a set of tokens, made from the bytes of each.
"""

import libsym as sym


def heal(kv: sym.KV, tokens: list[int]) -> int:
    """Appends `tokens` without the last; gives the likeliest token that begins with the text of the last."""
    text = sym.vocabulary()[tokens[-1]]
    beginning = sym.token_set(lambda token: token.startswith(text))
    special = sym.token_set(sym.model_info().special_ids)  # these only look like text
    return sym.pred(kv, tokens[:-1]).argmax(allowed=beginning - special)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "what is to be gone on with: two tokens at least")
    arguments.whole("--max-tokens", "tokens to generate", 20)
    args = arguments.parse_args()
    tokens = sym.tokenize(args.text)
    if len(tokens) < 2:
        arguments.error("the text must have two tokens at least: the last one is taken back")
    with sym.kv_create() as cut, sym.kv_create() as whole:
        plain = sym.generate(cut, tokens, max_tokens=args.max_tokens)
        sym.send_to_user(f"as it is: {args.text}{plain.full_text()}\n")
        healed = heal(whole, tokens)
        answer = sym.generate(whole, [healed], max_tokens=args.max_tokens)
        sym.send_to_user(f"healed:   {sym.detokenize([*tokens[:-1], healed, *answer])}\n")
