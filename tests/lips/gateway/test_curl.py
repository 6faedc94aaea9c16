"""curl, as users type it in a shell: requests that no library sends, and its exit statuses."""

import json
import shutil
import subprocess

import pytest

from tests.lips.gateway.conftest import both_ways
from tests.lips.gateway.wire import CHAT, QUESTION

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="NOT TESTED: curl is not installed"),
]
BODY = json.dumps(QUESTION)
COULD_NOT_SEND, NOTHING_CAME = 55, 52


@pytest.fixture
def curl(gateway):
    def run(*options, path=CHAT, given=b""):
        key = ["-H", f"Authorization: Bearer {gateway.key}"] if gateway.is_blind else []
        command = ["curl", "-sS", "--noproxy", "*", *key, "-w", "\\n%{http_code} %{num_connects}", *options]
        done = subprocess.run([*command, f"{gateway.url}{path}"], input=given, capture_output=True, check=False)
        body, _, counts = done.stdout.rpartition(b"\n")
        return done.returncode, int(counts.split()[0]), body

    return run


@both_ways
def test_a_question_needs_no_headers_and_may_come_in_pieces(curl):
    _, status, body = curl("-d", BODY)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]
    assert curl("-H", "Transfer-Encoding: chunked", "-d", BODY)[1] == 200
    assert curl("-H", "Expect: 100-continue", "--data-binary", "@-", given=BODY.encode())[1] == 200


@pytest.mark.parametrize("way", ["Expect: 100-continue", "Expect:", "Transfer-Encoding: chunked"])
def test_a_huge_body_is_refused_whatever_way_it_is_sent(curl, way):
    exit_status, status, _ = curl("-H", way, "--data-binary", "@-", given=b'{"a": "' + b"x" * (12 << 20) + b'"}')
    assert status == 413 or exit_status in {COULD_NOT_SEND, NOTHING_CAME}


def test_a_slow_reader_gets_all_of_its_stream(curl):
    body = {**QUESTION, "stream": True, "max_tokens": 30, "ignore_eos": True}
    _, status, stream = curl("-N", "--limit-rate", "4k", "-d", json.dumps(body))
    assert status == 200
    assert stream.rstrip().endswith(b"data: [DONE]")


def test_several_requests_go_over_one_connection_and_other_methods_are_answered(curl, gateway):
    url = f"{gateway.url}/v1/models"
    _, _, said = curl("-o", "/dev/null", url, "-o", "/dev/null", url, "-o", "/dev/null", path="/v1/models")
    assert said.split(b"\n")[-2:] == [b"200 1", b"200 0"], "the last goes over the same one, too"
    assert curl("-I", path="/health")[1] == 200
    assert curl("-X", "DELETE")[1] == 405
    assert curl("-X", "OPTIONS")[1] == 405
    assert curl("--http1.0", path="/v1/models")[1] == 200
