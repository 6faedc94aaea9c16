"""The cost model learns the time of steps from steps."""

import json

import numpy as np
import pytest

from scheduler._loop import ffi, lib
from scheduler.batch.cost_model import RECORD, CostModel

FAST, SLOW = 0.1, 10.0
"""Machines, as factors of one that is neither."""


def steps(count, seed=0, speed=1.0, noise=0.02, most_rows=600):
    """Steps of a machine whose time is that of rows (flat at first, as weights are read once), logits and entries."""
    chance = np.random.default_rng(seed)
    records = np.zeros(count, RECORD)
    decodes = np.where(chance.random(count) < 0.8, 2 ** chance.uniform(0, 8, count), 0).astype(int)
    prefills = np.where(chance.random(count) < 0.3, 2 ** chance.uniform(4, np.log2(most_rows), count), 0).astype(int)
    decodes = np.maximum(decodes, prefills == 0)
    records["num_rows"] = decodes + prefills
    records["num_wanted"] = decodes + (chance.random(count) < 0.3) * (prefills > 0)
    records["num_seen"] = decodes * chance.integers(1, 2000, count)
    records["num_entries"] = records["num_seen"] * chance.uniform(0.1, 1, count)
    records["num_pairs"] = prefills * chance.integers(1, 2000, count)
    rows = np.maximum(10e6, 0.4e6 * records["num_rows"])
    logits = (records["num_wanted"] > 0) * 2e6 + 0.05e6 * records["num_wanted"]
    entries = 300 * records["num_seen"] + 600 * records["num_entries"] + 400 * records["num_pairs"]
    records["ns"] = (rows + logits + entries) * speed * np.exp(chance.normal(0, noise, count))
    return records


def taught(records, model=None, together=16):
    model = model or CostModel("cpu", "bf16", None)
    for first in range(0, len(records), together):
        model.observe(records[first : first + together])
    return model


def off(model, records):
    return float(np.median(np.abs(model.predict(records) / records["ns"] - 1)))


def record(**of_it):
    one = np.zeros(1, RECORD)
    for name, value in of_it.items():
        one[name] = value
    return one


@pytest.mark.parametrize("speed", [FAST, 1.0, SLOW])
def test_it_learns_any_machine_from_its_steps(speed):
    model = taught(steps(1500, speed=speed))
    assert off(model, steps(300, seed=1, speed=speed)) < 0.05
    errors = model.errors()
    assert set(errors) == {"1 decode", "2-8 decodes", "9-64 decodes", "65+ decodes", "prefills", "mixed"}
    assert max(error for error, _ in errors.values()) < 0.1


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_single_step_tells_how_fast_the_machine_is(speed):
    model = taught(steps(1, speed=speed))
    assert off(model, steps(300, seed=1, speed=speed)) < 0.7


@pytest.mark.parametrize("backend", ["cpu avx2", "cuda sm_90"])
def test_before_the_first_step_there_is_a_guess(backend):
    model = CostModel(backend, "bf16", None)
    decode, chunk = model.predict(record(num_rows=1, num_wanted=1)), model.predict(record(num_rows=128))
    assert 1e6 < decode < 100e6
    assert decode < chunk < 100 * decode


def test_steps_that_a_neighbour_made_slow_hardly_count():
    records = steps(2000)
    disturbed = np.random.default_rng(2).random(len(records)) < 0.25
    records["ns"][disturbed] *= 3
    assert off(taught(records), steps(300, seed=1)) < 0.1


def test_a_machine_that_becomes_slower_is_followed_within_some_steps():
    model = taught(steps(1000))
    taught(steps(150, seed=1, speed=1.6), model)
    assert off(model, steps(300, seed=2, speed=1.6)) < 0.1


def test_what_was_learnt_long_ago_is_forgotten():
    """Entries cost more now, and rows less: no pace can tell that."""
    model = taught(steps(1000))

    def changed(count, seed):
        records = steps(count, seed)
        records["ns"] = 2e6 + 20e3 * records["num_rows"] + 2000 * (records["num_seen"] + records["num_pairs"])
        return records

    taught(changed(12_000, 1), model, together=200)
    assert off(model, changed(300, 2)) < 0.1


def test_no_part_is_negative_and_more_rows_never_take_less():
    records = steps(300)
    chance = np.random.default_rng(3)
    records["ns"] = 10 ** chance.uniform(5, 9, len(records))  # nothing can be learnt from these
    model = taught(records)
    by_rows = model.predict(np.concatenate([record(num_rows=count) for count in range(1, 3000)]))
    assert (np.diff(by_rows) >= 0).all()
    cost = model.coefficients
    assert min(cost.head_ns, cost.wanted_ns, cost.entry_ns, cost.seen_ns, cost.pair_ns, *cost.rows_ns) >= 0


def test_rows_beyond_those_that_were_seen_are_guessed_by_what_was():
    few = steps(1000, speed=SLOW)
    few = few[few["num_rows"] <= 8]
    model = taught(few)
    chunk = float(model.predict(record(num_rows=512))[0])
    assert 0.2 < chunk / (0.4e6 * 512 * SLOW) < 5


def test_c_predicts_the_same():
    model = taught(steps(500))
    some = steps(200, seed=1)
    expected = model.predict(some)
    for each, ns in zip(some, expected, strict=True):
        fields = ("num_rows", "num_wanted", "num_entries", "num_seen", "num_pairs")
        work = ffi.new("sym_work *", {name: int(each[name]) for name in fields})
        assert lib.sym_cost_of(model.coefficients, work) == pytest.approx(ns, rel=1e-9)


def test_empty_and_impossible_records_teach_nothing():
    model = taught(steps(200))
    before = list(model.coefficients.rows_ns)
    model.observe(np.zeros(0, RECORD))
    model.observe(record(num_rows=3, ns=0))
    assert list(model.coefficients.rows_ns) == before


def test_what_was_learnt_is_kept_by_backend_precision_and_model(tmp_path):
    path = tmp_path / "costs.json"
    first, second = (
        taught(steps(400, speed=speed), CostModel("cpu", precision, path, model="tiny"))
        for precision, speed in (("bf16", 1.0), ("int8", FAST))
    )
    first.save()
    second.save()
    some = steps(10)
    for precision, model in (("bf16", first), ("int8", second)):
        again = CostModel("cpu", precision, path, model="tiny")
        assert again.predict(some) == pytest.approx(model.predict(some))
        assert again.num_seen == 400
    assert CostModel("cpu", "bf16", path, model="other").num_seen == 0
    assert [kept.name for kept in tmp_path.iterdir()] == ["costs.json"]


DAMAGES = {
    "version": lambda kept: kept.update(version=99),
    "list": lambda kept: kept.update(models=[*kept["models"].values()]),
    "shape": lambda kept: kept["models"]["cpu bf16"]["fitted"].pop(),
    "nan": lambda kept: kept["models"]["cpu bf16"]["products"][0].__setitem__(0, float("nan")),
    "negative": lambda kept: kept["models"]["cpu bf16"]["fitted"].__setitem__(0, -1.0),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "cut", "text"])
def test_a_damaged_file_is_named_in_the_log_and_ignored(tmp_path, caplog, damage):
    path = tmp_path / "costs.json"
    assert CostModel("cpu", "bf16", path).num_seen == 0
    assert not caplog.text, "a machine that was never seen has no file"
    taught(steps(100), CostModel("cpu", "bf16", path)).save()
    kept = json.loads(path.read_text())
    if damage in DAMAGES:
        DAMAGES[damage](kept)
    path.write_text({"cut": json.dumps(kept)[:-20], "text": "hello"}.get(damage, json.dumps(kept)))
    model = CostModel("cpu", "bf16", path)
    assert model.num_seen == 0
    assert str(path) in caplog.text
    taught(steps(100), model).save()
    assert CostModel("cpu", "bf16", path).num_seen == 100
