"""Summarises a file longer than the model's context: first its pieces, then their summaries.

    symphony run mapreduce README.md
    symphony run mapreduce --context 2048 --max-tokens 100 README.md

The text is halved until each piece fits. Pieces are summarised side by side, each on a fork of one instruction, which
is computed once. The joined summaries are the next text. A text that fits as a whole gives the final summary.
"""

import libsym as sym

INSTRUCTION = {"role": "system", "content": "You summarize the text that the user gives you, in two sentences."}
AT_ONCE = 8  # pieces in memory at the same time, each with a context of its own


def conversation(text: str) -> list[int]:
    return sym.chat_tokens([INSTRUCTION, {"role": "user", "content": text}])


def pieces(text: str, num_tokens: int) -> list[str]:
    """Cut the text between words near its middle, repeatedly, until each conversation has at most `num_tokens`."""
    if len(conversation(text)) <= num_tokens:
        return [text]
    middle = len(text) // 2
    cut = max(text.rfind(" ", 0, middle), text.rfind("\n", 0, middle)) + 1 or middle
    return pieces(text[:cut], num_tokens) + pieces(text[cut:], num_tokens)


def summaries(instruction: sym.KV, texts: list[str], max_tokens: int) -> list[str]:
    """Return a summary of each text; all are decoded at the same time."""
    answers = []
    for text in texts:
        kv = sym.kv_fork(instruction)
        answers.append(sym.generate(kv, sym.kv_rewind(kv, conversation(text)), max_tokens=max_tokens))
    return [answer.full_text().strip() for answer in answers]


def summarize(text: str, context: int, max_tokens: int) -> str:
    """Return one summary of the whole text."""
    if context - len(conversation("")) < 5 * max_tokens:
        raise sym.Invalid(f"summaries of {max_tokens} tokens do not shorten what a context of {context} tokens holds")
    with sym.kv_create() as instruction:
        sym.kv_write(instruction, sym.chat_tokens([INSTRUCTION], add_generation_prompt=False))
        while True:
            parts = pieces(text, context - max_tokens)
            sym.send_to_user(f"(characters: {len(text)}, pieces: {len(parts)})\n")
            found = list[str]()
            for start in range(0, len(parts), AT_ONCE):
                found += summaries(instruction, parts[start : start + AT_ONCE], max_tokens)
            text = "\n".join(found)
            if len(parts) == 1:
                return text


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.document("file", "a text file")
    arguments.whole("--context", "tokens of one prompt with its summary (default: the whole context)")
    arguments.whole("--max-tokens", "of one summary", 120)
    args = arguments.parse_args()
    most = sym.model_info().max_positions
    sym.send_to_user(summarize(args.file.text, min(args.context or most, most), args.max_tokens), "\n")
