"""Workloads whose KV is several times memory: the short form of the bench, without other servers."""

import json
import os
import subprocess
import sys

import pytest

from tests.symphony.launchers import ROOT

PROGRAM = ROOT / "scripts/bench/workloads/compare.py"


@pytest.fixture(scope="module")
def samples():
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("NO MOUNT TESTED: /dev/fuse is missing or not open to this user")
    command = [sys.executable, str(PROGRAM), "--quick", "--model", "tiny", "--json", "--seed", "1"]
    command += ["--policies", "cost", "--only", "rag,sessions,crowd"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)["samples"]
    return {case: {side: run for side, (run,) in by_side.items()} for case, by_side in found.items()}


def test_a_corpus_larger_than_memory_is_computed_once_and_each_document_again_without_files(samples):
    by_side = samples["rag 0.5 questions"]
    questions = len(by_side["symphony-none"]["took_s"]) * 16
    documents = len(by_side["symphony-none"]["took_s"]) * 1000
    assert by_side["symphony-none"]["computed"] == documents + questions
    assert by_side["symphony-cost"]["computed"] == questions
    assert by_side["symphony-cost"]["told"]["num_in"] > 0, "the corpus fits into memory"


def test_sessions_that_pause_go_on_where_they_were_though_memory_has_not_room_for_all(samples):
    sessions = {case: by_side["symphony-cost"] for case, by_side in samples.items() if case.startswith("sessions")}
    assert {case: len(sample["took_s"]) for case, sample in sessions.items()} == {
        "sessions agent": 5,
        "sessions agent begins": 1,
        "sessions person": 6,
        "sessions person begins": 2,
        "sessions all": 14,
    }
    assert samples["sessions all"]["symphony-cost"]["told"]["num_out"] > 0, "all sessions fit into memory"


def test_a_crowd_with_ten_times_more_kv_than_memory_finishes_and_computes_nothing_twice(samples):
    by_side = samples["crowd all"]
    ample, tenth = by_side["symphony-cost-ample"], by_side["symphony-cost-tenth"]
    assert len(ample["took_s"]) == len(tenth["took_s"]) == 16 * 5
    # The last chunk of a prefill counts as a decode where it has one token: a token a turn, of some 116.
    assert abs(ample["told"]["num_prefill_tokens"] - tenth["told"]["num_prefill_tokens"]) < 16 * 5
    assert ample["told"]["num_in"] == 0 < tenth["told"]["num_in"]
