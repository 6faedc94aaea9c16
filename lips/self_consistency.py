"""Self-consistency: draws several chains of thought, and takes the answer that most of them reach.

    symphony run self_consistency "Tom has 3 apples and buys 2. How many has he?" -n 9

The question is computed once. The chains are drawn side by side, on forks of the question's file. The last number of
each chain is its vote. A chain that --max-tokens cuts off has no vote. (Wang et al. 2022)
"""

import re
import sys
from collections import Counter
from decimal import Decimal

import libsym as sym


def last_number(text: str) -> str | None:
    """Return the last number of a text in one form (3.50 is 3.5; "5-3" ends in 3), or None if it has no number."""
    found = re.findall(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?", text)
    return f"{Decimal(found[-1].replace(',', '')).normalize():f}" if found else None


def votes(drawn: list[sym.Generation]) -> Counter[str]:
    """Count the answers that end with each number. An answer that was cut off does not count."""
    texts = [generation.full_text() for generation in drawn]
    whole = (text for text, generation in zip(texts, drawn, strict=True) if generation.finish != "length")
    return Counter(number for text in whole if (number := last_number(text)) is not None)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.whole("-n", "how many ways are drawn", 5, most=256)
    arguments.number("--temperature", "of the draws", 0.7, least=0)
    arguments.whole("--max-tokens", "of each way", 160)
    args = arguments.parse_args()
    question = sym.chat_tokens([{"role": "user", "content": f"{args.question} Think, then give the number."}])
    how = sym.Sampler(args.temperature, seed=0)
    found = votes(sym.generate_n(sym.kv_create(), question, args.n, sampler=how, max_tokens=args.max_tokens))
    if not found:
        sys.exit(f"self_consistency: none of {args.n} answers comes to a number within {args.max_tokens} tokens")
    for number, count in found.most_common():
        print(f"{count} of {args.n}: {number}")
