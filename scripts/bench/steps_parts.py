"""What steps.py measures, part by part."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

from load import wait_for_quiet
from steps_bench import Bench, Row, Turn, cpu_us

import libsym as sym

NUM_STREAMS, NUM_MANY, PROMPT_TOKENS = 64, 300, 16
NEVER = ["\u2603 never \u2603", "no text\x01 has this", "</never-comes>"]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["animal", "plant", "mineral"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "known": {"type": "boolean"},
        },
        "required": ["name", "kind", "size", "known"],
        "additionalProperties": False,
    },
    "minItems": 100,
    "maxItems": 120,
}
"""100 of these are more than 1,000 tokens: no text is over before its count of tokens is."""
ACCOUNTS = (13001, 13002, 13003, 13004)


def streams(bench: Bench) -> None:
    num_tokens = 32 if bench.is_quick else 128
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_STREAMS)]

    def crew(way: str, **more: Any) -> Callable[[], Turn]:
        member = {"way": way, "num_tokens": num_tokens} | more
        return bench.crew_turn([member | {"prompt": prompt} for prompt in prompts])

    found = bench.in_turns(
        {
            "loop": bench.loop_turn({"prompts": prompts, "num_tokens": num_tokens}),
            "pred": crew("pred"),
            "generate": crew("generate"),
            "stops": crew("generate", stop=NEVER),
        }
    )
    texts = found["loop"][0].tokens
    for name, turns in found.items():
        assert all(turn.tokens == texts for turn in turns), f"{name} decoded different tokens than the loop"
    bench.add_rates("64 streams, pred()", found["pred"], found["loop"], "0.97")
    bench.add_rates("64 streams, generate()", found["generate"], found["loop"], "0.99")
    bench.add_rates("64 streams, stop texts", found["stops"], found["loop"], "0.97")
    bench.details["wakeups of the plain loop"] = found["loop"][0].wakeups_per_token


def with_schema(bench: Bench) -> None:
    """The generations are a grammar's, so the loop is told what they were: it appends the same, without masks."""
    num_tokens = 32 if bench.is_quick else 128
    schema = json.dumps(SCHEMA)
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_STREAMS)]
    member = {"way": "grammar", "num_tokens": num_tokens, "schema": schema}
    crew = bench.crew_turn([member | {"prompt": prompt} for prompt in prompts])
    texts = crew().tokens
    assert {len(text) for text in texts} == {num_tokens}, "a text of the schema ended early"
    stretches = bench.loop.ask({"schema": schema, "texts": texts})
    found = bench.in_turns({"loop": bench.loop_turn({"prompts": prompts, "stretches": stretches}), "json": crew})
    assert all(turn.tokens == texts for turn in found["json"]), "the same generations gave different tokens"
    num_all = num_tokens * NUM_STREAMS
    whole = [num_all / (turn.came_s[0][-1] - turn.began_s) for turn in found["loop"]]
    row = Row(
        "64 streams, JSON schema", "tokens/s", [turn.whole for turn in found["json"]], "plain loop", whole, "0.90"
    )
    row.wakeups = statistics.median(turn.wakeups_per_token for turn in found["json"])
    num_steps = 1 + max(map(len, stretches))
    own_us, loop_us = cpu_us(found["json"], found["loop"])
    row.cpu_us = (own_us, loop_us * found["loop"][0].num_tokens / num_all)  # the loop has a time a step, not a token
    row.note = f"{num_all} tokens in {num_steps} steps of the loop"
    bench.add(row)


def many(bench: Bench) -> None:
    num_tokens = 16 if bench.is_quick else 48
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_MANY)]
    members = [{"way": "generate", "num_tokens": num_tokens, "prompt": prompt} for prompt in prompts]
    request = {"prompts": prompts, "num_tokens": num_tokens}
    found = bench.in_turns({"loop": bench.loop_turn(request), "generate": bench.crew_turn(members)})
    texts = found["loop"][0].tokens
    assert all(turn.tokens == texts for turn in found["generate"]), "300 streams decoded different tokens than the loop"
    bench.add_rates(f"{NUM_MANY} streams, generate()", found["generate"], found["loop"], "")


def delay(bench: Bench) -> None:
    """`idle` lasts until its decodes have about as many entries as those beside the prefills have in the end."""
    num_prefills, length, num_decodes = (1 if bench.is_quick else 2), 4000, 8
    idle_s = 5.0 if bench.is_quick else 10.0
    tokens = bench.prompt(length)
    decodes = [
        {"way": "decode_until_over", "prompt": bench.prompt(PROMPT_TOKENS), "limit_s": idle_s}
        for _ in range(num_decodes)
    ]
    prefill = {"way": "prefill", "tokens": tokens, "count": num_prefills}

    def idle() -> Turn:
        return bench.crew_turn(decodes)()

    def alone() -> Turn:
        found, spent = bench.by_crew([prefill | {"after_s": 0.0}])
        spans = found["members"][-1]["spans_s"]
        return Turn(found["began_s"], [[at_s for span in spans for at_s in span]], [], *spent)

    def beside() -> Turn:
        members = [*[each | {"limit_s": 600.0} for each in decodes], prefill | {"after_s": 1.0}]
        found, spent = bench.by_crew(members)
        spans = found["members"][-1]["spans_s"]
        came_s = [each["came_s"] for each in found["members"][:-1]]
        return Turn(found["began_s"], [*came_s, [at_s for span in spans for at_s in span]], [], *spent)

    found = bench.in_turns({"idle": idle, "alone": alone, "beside": beside})
    for percent in (50, 99):
        quiet = [percentile(gaps(turn.came_s), percent) for turn in found["idle"]]
        busy = [
            percentile(gaps(turn.came_s[:-1], turn.came_s[-1][0], turn.came_s[-1][-1]), percent)
            for turn in found["beside"]
        ]
        aim = "under 2" if percent == 99 else ""
        bench.add(Row(f"8 decodes beside prefills, p{percent} between tokens", "ms", busy, "idle", quiet, aim))
    worst = [max(gaps(turn.came_s[:-1], turn.came_s[-1][0], turn.came_s[-1][-1])) for turn in found["beside"]]
    bench.add(Row("8 decodes beside prefills, longest between tokens", "ms", worst))
    rates = {
        name: [num_prefills * length / (turn.came_s[-1][-1] - turn.came_s[-1][0]) for turn in found[name]]
        for name in ("beside", "alone")
    }
    bench.add(Row("prefills of 4,000 beside 8 decodes", "tokens/s", rates["beside"], "alone", rates["alone"]))
    decoded = [
        sum(turn.came_s[-1][0] < at_s <= turn.came_s[-1][-1] for each in turn.came_s[:-1] for at_s in each)
        / (turn.came_s[-1][-1] - turn.came_s[-1][0])
        for turn in found["beside"]
    ]
    idle_rates = [turn.steady for turn in found["idle"]]
    bench.add(Row("8 decodes beside prefills", "tokens/s", decoded, "idle", idle_rates))


def gaps(came_s: list[list[float]], since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
    """Milliseconds between tokens of one sequence that came between two times."""
    return [
        (after - before) * 1e3
        for each in came_s
        for before, after in itertools.pairwise(each)
        if since_s <= before and after <= until_s
    ]


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def mixed(bench: Bench) -> None:
    share = 0.5 if bench.is_quick else 1.0
    prompt = bench.prompt

    def count(num: int) -> range:
        return range(int(num * share))

    members: list[dict[str, Any]] = []
    members += [{"way": "generate", "prompt": prompt(32), "num_tokens": 24} for _ in count(24)]
    members += [{"way": "pred", "prompt": prompt(64), "num_tokens": 48} for _ in count(8)]
    members += [{"way": "generate", "prompt": prompt(1000), "num_tokens": 96} for _ in count(8)]
    members += [
        {"way": "agent", "prompt": prompt(64), "num_calls": 4, "tool_s": 0.1, "num_tokens": 16} for _ in count(16)
    ]
    members += [{"way": "masked", "prompt": prompt(32), "num_tokens": 32} for _ in count(4)]
    members += [
        {"way": "grammar", "prompt": prompt(32), "num_tokens": 48, "schema": json.dumps(SCHEMA)} for _ in count(4)
    ]
    turn, rates, wakeups = bench.crew_turn(members), [], []
    turn()
    before = sym.daemon_stat()
    for _ in range(bench.rounds):
        found = bench.least_disturbed(turn)
        rates.append(found.whole)
        wakeups.append(found.wakeups_per_token)
    after = sym.daemon_stat()
    row = Row("mixed: short, long, tools, masks, grammars", "tokens/s", rates, wakeups=statistics.median(wakeups))
    num_steps = after["num_steps"] - before["num_steps"]
    if "num_steps_in_c" in after:
        row.note = f"{(after['num_steps_in_c'] - before['num_steps_in_c']) / num_steps:.0%} of the steps ran in C"
    else:
        row.note = "this daemon does not tell which steps ran in C (num_steps_in_c)"
    bench.add(row)
    changed = {
        name: after[name] - before[name]
        for name in after
        if isinstance(after[name], (int, float)) and not isinstance(after[name], bool) and name.startswith("num_")
        if name in before and after[name] != before[name]
    }
    sizes = [late - early for early, late in zip(before["num_steps_by_size"], after["num_steps_by_size"], strict=True)]
    step_s = after["step_s"] - before["step_s"]
    numbers = {"step_s": step_s, "queue_s": after["queue_s"] - before["queue_s"], "num_steps_by_size": sizes}
    bench.details["mixed, the daemon's numbers"] = changed | numbers


def fair(bench: Bench) -> None:
    """Accounts want unequal much, all of them more than an equal share: what each gets of the middle of the time."""
    seconds = 8.0 if bench.is_quick else 20.0
    wanted = (90, 120, 180, 260)  # streams of each account: 650, of which a step holds 256
    for what, way, prompt, nums in (
        ("decodes", "decode_for", bench.prompt(PROMPT_TOKENS), wanted),
        ("prefills", "prefill_for", bench.prompt(256), (2, 4, 8, 16)),
    ):
        members = [
            {"way": way, "num_streams": num, "seconds": seconds, "uid": uid}
            | {"prompt" if way == "decode_for" else "tokens": prompt}
            for uid, num in zip(ACCOUNTS, nums, strict=True)
        ]
        add_fairness(bench, f"equal accounts, {what}, max/min", members, "came_s" if way == "decode_for" else "ended_s")


def add_fairness(bench: Bench, what: str, members: list[dict[str, Any]], key: str) -> None:
    ratios, notes = [], []
    for _ in range(max(1, bench.rounds // 2)):
        wait_for_quiet(bench.args.quiet, bench.args.patience)
        served, note = service(bench, members, key)
        weights = [member.get("weight", 1) for member in members]
        shares = [each / weight for each, weight in zip(served, weights, strict=True)]
        ratios.append(max(shares) / max(min(shares), 1e-9))
        notes.append(note)
    asked = ", ".join(str(member["num_streams"]) for member in members)
    note = f"streams {asked}; of the last round: {notes[-1]}"
    bench.add(Row(what, "", ratios, aim="under 1.2" if "equal" in what else "within 10 %", note=note))


def service(bench: Bench, members: list[dict[str, Any]], key: str) -> tuple[list[float], str]:
    """Answers of each account, once all have come."""
    plain = [{name: value for name, value in member.items() if name != "weight"} for member in members]
    found, spent = bench.by_crew(plain)
    bench.loads.append(spent.load)
    bench.others.append(spent.others)
    seconds = members[0]["seconds"]
    since_s = found["began_s"] + seconds / 3
    until_s = found["began_s"] + seconds
    served = [float(sum(since_s < at_s <= until_s for at_s in member[key])) for member in found["members"]]
    total = sum(served)
    return served, " : ".join(f"{each / total:.0%}" for each in served) + f" of {total:.0f}"


def weights(bench: Bench) -> None:
    seconds = 8.0 if bench.is_quick else 20.0
    prompt = bench.prompt(PROMPT_TOKENS)
    members = [
        {"way": "decode_for", "num_streams": 300, "seconds": seconds, "uid": uid, "prompt": prompt, "weight": weight}
        for uid, weight in zip(ACCOUNTS[:2], (1, 2), strict=True)
    ]
    add_fairness(bench, "weights 1:2, decodes, max/min of service for weight", members, "came_s")


PARTS: dict[str, Callable[[Bench], None]] = {
    "streams": streams,
    "json": with_schema,
    "delay": delay,
    "many": many,
    "mixed": mixed,
    "fair": fair,
}
