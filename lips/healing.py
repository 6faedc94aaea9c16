"""Token healing: draws the last token of a text again, since the text may end inside a token.

    symphony run healing "The capital of Fra"
    symphony run healing 'An example link is <a href="http:'

A text that is cut off ends in a cut token. After "http" and ":" a model hardly writes "//". In its training text "://"
is one token, so ":" alone suggests that something else follows. Healing removes the last token and draws another in
its place, among the tokens whose text begins with the removed text. The program builds this set from the tokens' bytes.
(Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing", 2023.)
"""

import libsym as sym


def heal(kv: sym.KV, tokens: list[int]) -> int:
    """Append all `tokens` except the last; return the likeliest token that begins with the last token's text."""
    text = sym.vocabulary()[tokens[-1]]
    beginning = sym.token_set(lambda token: token.startswith(text))
    special = sym.token_set(sym.model_info().special_ids)  # special tokens are not text
    return sym.pred(kv, tokens[:-1]).argmax(allowed=beginning - special)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue: two tokens at least")
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
