"""Best-of-n: draws several answers from one computed question, and shows the best one.

    symphony run best_of_n "Why is the sky blue?" -n 8 --temperature 0.8
    symphony run best_of_n "Why is the sky blue?" --judge --all

The question is computed once. Each answer is a generation on a fork of the question's file, with a separate seed. All
generations share the steps of the daemon. By default the best answer has the highest mean log-probability of its tokens
(`score`). With --judge the program asks the model whether each answer is good; the surest Yes wins.
"""

import math
from statistics import fmean

import libsym as sym

JUDGE = "Question: {question}\nAnswer: {answer}\nIs this answer correct and complete? Say Yes or No."


def mean_logprob(kv: sym.KV, last: int, answer: list[int]) -> float:
    """Return the mean log-probability of the answer's tokens after `kv` and the question's last token."""
    with sym.kv_fork(kv) as fork:
        found = sym.score(fork, [last, *answer][: fork.room()])  # in a full context the last token has no room
    return fmean(found or [-math.inf])


def judged(question: str, answer: str) -> float:
    """Ask the model whether the answer is good; return the log-probability of Yes minus that of No."""
    yes, no = (sym.tokenize(word)[0] for word in ("Yes", "No"))
    prompt = sym.chat_tokens([{"role": "user", "content": JUDGE.format(question=question, answer=answer)}])
    with sym.kv_create() as kv:
        said = sym.pred(kv, prompt, logprobs=[yes, no])
    return said.logprob(yes) - said.logprob(no)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question", "what is to be answered")
    arguments.whole("-n", "answers that are drawn", 4, most=256)
    arguments.number("--temperature", "how they are drawn", 0.8, least=0)
    arguments.whole("--max-tokens", "length of each", 100)
    arguments.add_argument("--judge", action="store_true", help="rank by the model's own verdict, not by likelihood")
    arguments.add_argument("--all", action="store_true", help="show all answers with their scores, the best first")
    args = arguments.parse_args()
    kv, question = sym.kv_create(), sym.chat_tokens([{"role": "user", "content": args.question}])
    how, ranked = sym.Sampler(args.temperature, seed=0), []  # the same answers each time
    for answer in sym.generate_n(kv, question, args.n, sampler=how, max_tokens=args.max_tokens):
        text = answer.full_text()
        score = judged(args.question, text) if args.judge else mean_logprob(kv, question[-1], answer.tokens)
        ranked.append((score, text))
    ranked.sort(reverse=True)
    for score, text in ranked if args.all else ranked[:1]:
        sym.send_to_user(f"[{score:.3f}] {text}\n" if args.all else f"{text}\n")
