"""Cost and effect of decoding with two contexts: answers that follow a context or instructions, and new text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

import libsym as sym
from figures import Row
from lips import cad, cfg, contrastive

T = TypeVar("T")
R = TypeVar("R")
FACTS = [
    ("In 2030 the capital of France moved to Lyon.", "The capital of France is", "Lyon"),
    ("In this story, grass is red and the sky is green.", "The color of the sky is", "green"),
    ("Scientists found that the sun is cold.", "The sun is very", "cold"),
    ("The Eiffel Tower was moved to Rome last year.", "The Eiffel Tower is in the city of", "Rome"),
    ("The author of Hamlet is Jane Austen.", "Hamlet was written by", "Austen"),
    ("Two plus two is five in this game.", "Two plus two is", "five"),
    ("Better late than early.", "Better late than", "early"),
    ("Actions speak louder than drums.", "Actions speak louder than", "drums"),
    ("The moon is made of cheese.", "The moon is made of", "cheese"),
    ("Elephants are very small.", "Elephants are very", "small"),
    ("Water boils at 50 degrees here.", "Water boils at", "50"),
    ("Better safe than rich.", "Better safe than", "rich"),
    ("The early bird catches the train.", "The early bird catches the", "train"),
    ("An apple a day keeps the teacher away.", "An apple a day keeps the", "teacher"),
    ("The capital of Japan is now Osaka.", "The capital of Japan is", "Osaka"),
    ("A spider has twelve legs.", "The number of legs of a spider is", "twelve"),
]
SYSTEM, QUESTION = "You speak like a pirate.", "Describe a cat."
PROMPTS = [
    "The history of the city begins",
    "My grandmother always said that",
    "The experiment showed that",
    "Once upon a time",
    "The best way to learn is",
    "In the middle of the night",
    "The recipe begins with",
    "She opened the door and",
]
NUM_TOKENS = 64


def measure() -> Iterator[Row]:
    yield from _believed()
    yield from _followed()
    yield from _repeated()


def _believed() -> Iterator[Row]:
    """Count the answers that follow their context. Every context contradicts the model's knowledge."""

    def is_believed(fact: tuple[str, str, str], strength: float) -> bool:
        context, question, told = fact
        return told in cad.answer(context, question, strength, 5).full_text()

    def believed(strength: float) -> int:
        return sum(side_by_side(partial(is_believed, strength=strength), FACTS))

    plain = believed(0)
    for strength in (0.5, 1, 2):
        yield Row("cad", f"contexts believed, strength {strength}", believed(strength), f"of {len(FACTS)}", plain)


def _followed() -> Iterator[Row]:
    """Measure how much more probable the instructions make the answer, and the cost of the second file.

    A step of an idle daemon may compute only the first call of a batch. So there are slightly more steps than tokens.
    """
    asked = {"role": "user", "content": QUESTION}
    prompts = [sym.chat_tokens(turns) for turns in ([{"role": "system", "content": SYSTEM}, asked], [asked])]

    def explained(answer: list[int]) -> float:
        follows, ignores = (fmean(sym.score(sym.kv_create(), p + answer)[-len(answer) :]) for p in prompts)
        return follows - ignores

    def steps() -> int:
        return int(sym.daemon_stat()["num_steps"])

    begin = steps()
    plain = list(sym.generate(sym.kv_create(), prompts[0], max_tokens=NUM_TOKENS))
    steps_of_one = (steps() - begin) / len(plain)
    for scale in (2.0, 3.0):
        before, begin = sym.getrusage().tokens, steps()
        answer = list(cfg.answer(QUESTION, SYSTEM, None, scale, NUM_TOKENS))
        num, num_steps = len(answer), steps() - begin
        num_computed = sym.getrusage().tokens - before - sum(map(len, prompts))
        what = f"nats a token for the instructions, scale {scale:g}"
        yield Row("cfg", what, explained(answer), "nats", explained(plain))
    yield Row("cfg", "steps for each token, those of the prompts, too", num_steps / num, "", steps_of_one)
    yield Row("cfg", "tokens computed for each that is drawn", num_computed / (num - 1), "", 1)


def _repeated() -> Iterator[Row]:
    """Measure how much of a text is new: the share of distinct pairs of consecutive tokens."""

    def new(prompt: str, beta: float) -> float:
        text = contrastive.decode(sym.tokenize(prompt), 4, 0.1, beta, NUM_TOKENS)
        return len(set(pairwise(text))) / (len(text) - 1)

    plain, once, twice = (fmean(side_by_side(partial(new, beta=beta), PROMPTS)) for beta in (0.0, 1.0, 2.0))
    yield Row("contrastive", "pairs of tokens that are new, beta 1", once, "of 1", plain)
    yield Row("contrastive", "pairs of tokens that are new, beta 2", twice, "of 1", plain)


def side_by_side(call: Callable[[T], R], arguments: list[T]) -> list[R]:
    """Return the result for each argument. The calls run in threads, so that they share steps of the daemon."""
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(call, arguments))
