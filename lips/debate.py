"""Debate: several agents answer, read each other's answers, answer again, and then vote.

    symphony run debate "Tom has 3 apples and buys 2. How many has he?" --agents 3 --rounds 2
    symphony run debate "Which is larger, 9.11 or 9.9?" --quiet

The question is computed once. Each agent is a conversation in a fork of the question's file, and all agents answer in
the same steps. In each further round an agent reads the last answers of the other agents, and answers again. In the end
each agent states its answer in a few words, and the most frequent answer wins. A tie, or a debate without an answer,
ends with status 1. (Du et al. 2023)
"""

from collections import Counter

import libsym as sym

READ = "Other agents answered:\n\n{others}\n\nUse what is right in that, and answer the question again."
VOTE = "Now give your final answer alone, in a few words."


def said(chats: list[sym.Chat], questions: list[str], seed: int, max_tokens: int) -> list[str]:
    """Ask all agents at the same time; return their answers."""
    how = [sym.Sampler(temperature=0.8, seed=seed + number) for number in range(len(chats))]
    answers = [
        chat.ask(question, sampler=sampler, max_tokens=max_tokens)
        for chat, question, sampler in zip(chats, questions, how, strict=True)
    ]
    return [answer.full_text().strip() for answer in answers]


def votes(chats: list[sym.Chat]) -> Counter[str]:
    """Count the final answers of the agents, in lower case and without the full stop."""
    answers = [chat.ask(VOTE, max_tokens=16) for chat in chats]
    texts = (answer.full_text().strip().strip(".!\"'").casefold() for answer in answers)
    return Counter(text for text in texts if text)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.whole("--agents", "how many answer", 3, least=2, most=16)
    arguments.whole("--rounds", "how often each agent answers", 2)
    arguments.whole("--max-tokens", "of an answer", 80)
    arguments.whole("--seed", "of the draws", 0, least=0)
    arguments.add_argument("--quiet", action="store_true", help="show the vote alone")
    args = arguments.parse_args()
    first = sym.Chat(sym.kv_create(), f"You answer this question: {args.question}")
    chats = [first, *(first.fork() for _ in range(args.agents - 1))]
    questions = [args.question] * args.agents
    for turn in range(args.rounds):
        answers = said(chats, questions, args.seed + turn * args.agents, args.max_tokens)
        for number, answer in enumerate(answers, 1):
            if not args.quiet:
                sym.send_to_user(f"[round {turn + 1}, agent {number}] {answer}\n")
        questions = [
            READ.format(others="\n\n".join(answers[:number] + answers[number + 1 :])) for number in range(args.agents)
        ]
    ranked = votes(chats).most_common()
    for answer, count in ranked:
        sym.send_to_user(f"{count} of {args.agents}: {answer}\n")
    if not ranked:
        raise sym.Invalid("no agent says an answer: ask another way, or give more --agents")
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        raise sym.Invalid("the debate ends in a tie: give more --agents or --rounds")
