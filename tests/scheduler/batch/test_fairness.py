"""Fairness and waiting times under random loads, on a machine without a model.

`Machine` checks each plan: all decodes go while they have seats, a prefill that waits has rows, nothing is withheld,
and no call waits for longer than `policy.c` says. scripts/soak/fairness.py runs the same check for any length of time.
"""

import random
from collections import defaultdict

import pytest

from scheduler.batch.policy import StepLimits
from tests.scheduler.fake_machine import Machine, Tree
from tests.scheduler.random_loads import Saturating, random_load, run_programs, stubborn_load

NUM_LOADS, AT_ONCE = 360, 120
NUM_STUBBORN = 8


def check(load, seed):
    try:
        load(seed)
    except* AssertionError as error:
        raise AssertionError(f"{load.__name__}({seed})") from error


@pytest.mark.parametrize("first", range(0, NUM_LOADS, AT_ONCE))
def test_no_call_waits_for_longer_than_is_stated(first):
    for seed in range(first, first + AT_ONCE):
        check(random_load, seed)


def test_nor_beside_others_that_always_want_everything():
    for seed in range(NUM_STUBBORN):
        check(stubborn_load, seed)


def saturated(chance, tree, num_steps, *, kinds):
    """Service by account, each with calls enough of one kind, or of both."""
    programs = []
    for account in tree.accounts:
        for kind in kinds:
            for _ in range(chance.randrange(1, 4)):
                share = tree.new_program(account)
                if kind == "decode":
                    programs.append(Saturating(account, share, 16, 1))
                elif kind == "prefill":
                    programs.append(Saturating(account, share, chance.randrange(1, 8), chance.randrange(2, 300)))
                else:
                    programs.append(Saturating(account, share, 1, 1))
    machine = Machine(tree, StepLimits(max_tokens=64, max_calls=16, min_chunk=8, step_s=0.040), row_ms=1.0)
    run_programs(machine, programs, num_steps)
    return [machine.service[account] / account.weight for account in tree.accounts]


KINDS = (("decode",), ("prefill",), ("decode", "prefill"), ("some", "prefill"))


@pytest.mark.parametrize("kinds", KINDS, ids=" and ".join)
@pytest.mark.parametrize("seed", range(2))
def test_equal_accounts_have_equal_service(seed, kinds):
    chance = random.Random(seed)
    count = chance.randrange(2, 5)
    tree = Tree([[1.0]] * count if chance.random() < 0.5 else [[1.0] * count])
    service = saturated(chance, tree, 400, kinds=kinds)
    assert max(service) / min(service) < 1.2


@pytest.mark.parametrize("kinds", KINDS[:3], ids=" and ".join)
@pytest.mark.parametrize("seed", range(2))
def test_service_is_as_the_weights_within_a_tenth(seed, kinds):
    chance = random.Random(100 + seed)
    tree = Tree([[chance.choice((1.0, 2.0, 3.0, 5.0)) for _ in range(chance.randrange(2, 5))]])
    service = saturated(chance, tree, 600, kinds=kinds)
    assert max(service) / min(service) < 1.1


def test_users_share_before_their_accounts_do():
    tree = Tree([[1.0, 1.0, 1.0], [1.0]], [1.0, 2.0])
    service = saturated(random.Random(0), tree, 600, kinds=("prefill",))
    by_user = defaultdict[int, float](float)
    for account, amount in zip(tree.accounts, service, strict=True):
        by_user[account.user] += amount
    assert by_user[1] / by_user[0] == pytest.approx(2, rel=0.1)
