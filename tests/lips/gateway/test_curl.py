"""curl, as users type it in a shell: requests that no library sends, and its exit statuses."""

import json
import shutil
import subprocess

import pytest

from tests.lips.gateway.test_odd_clients import running, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="NOT TESTED: curl is not installed"),
]
QUESTION = {"messages": [{"role": "user", "content": "Count from one to a thousand."}], "max_tokens": 8}
ENDLESS = {**QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
COULD_NOT_SEND, TOOK_TOO_LONG, NOTHING_CAME = 55, 28, 52


def key_of(gateway):
    """Return curl's options for the key, if the gateway needs one."""
    return ["-H", f"Authorization: Bearer {gateway.key}"] if gateway.is_blind else []


@pytest.fixture
def curl(gateway):
    def run(*options, path="/v1/chat/completions", given=b"", timeout=100):
        options = [*key_of(gateway), *options]
        command = ["curl", "-sS", "--noproxy", "*", "-w", "\\n%{http_code}", *options, f"{gateway.url}{path}"]
        done = subprocess.run(command, input=given, capture_output=True, timeout=timeout, check=False)
        body, _, status = done.stdout.rpartition(b"\n")
        return done.returncode, int(status), body

    return run


def test_a_question_needs_no_headers(curl):
    _, status, body = curl("-d", json.dumps(QUESTION))
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", lambda error: error["error"]["type"] == "invalid_request_error"),
        ("/v1/messages", lambda error: error["type"] == "error"),
    ],
)
def test_bad_json_is_refused_in_the_form_of_the_interface(curl, path, kind):
    _, status, body = curl("-d", "{'messages': []}", path=path)
    assert status == 400
    assert kind(json.loads(body))


def test_a_huge_body_is_refused_whatever_way_it_is_sent(curl):
    huge = b'{"a": "' + b"x" * (12 << 20) + b'"}'
    for options in (
        ["-H", "Expect: 100-continue", "--data-binary", "@-"],
        ["-H", "Expect:", "--data-binary", "@-"],
        ["-H", "Transfer-Encoding: chunked", "--data-binary", "@-"],
    ):
        exit_status, status, _ = curl(*options, given=huge)
        assert status == 413 or exit_status in {COULD_NOT_SEND, NOTHING_CAME}, options
    _, status, _ = curl("-H", "Expect: 100-continue", "--data-binary", "@-", given=json.dumps(QUESTION).encode())
    assert status == 200


def test_a_body_in_pieces_is_read(curl):
    _, status, _ = curl("-H", "Transfer-Encoding: chunked", "-d", json.dumps(QUESTION))
    assert status == 200


def test_a_slow_reader_gets_all_of_its_stream(curl):
    body = {**QUESTION, "stream": True, "max_tokens": 30, "ignore_eos": True}
    _, status, stream = curl("-N", "--limit-rate", "4k", "-d", json.dumps(body))
    assert status == 200
    assert stream.rstrip().endswith(b"data: [DONE]")


def test_one_that_gives_up_frees_its_place(curl, http):
    exit_status, status, stream = curl("-N", "--max-time", "1.5", "-d", json.dumps(ENDLESS))
    assert (exit_status, status) == (TOOK_TOO_LONG, 200)
    assert stream.startswith(b"data: {")
    until(lambda: running(http) == 0, 3)


def test_several_requests_go_over_one_connection(gateway):
    one = [
        *key_of(gateway),
        "--noproxy",
        "*",
        "-sS",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code} %{num_connects}\\n",
        f"{gateway.url}/v1/models",
    ]
    done = subprocess.run(["curl", *one, "--next", *one], capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [b"200", b"1", b"200", b"0"]


def test_other_methods_are_answered(curl):
    assert curl("-I", path="/health")[1] == 200
    assert curl("-X", "DELETE")[1] == 405
    assert curl("-X", "OPTIONS")[1] == 405
    assert curl("--http1.0", path="/v1/models")[1] == 200


def test_two_hundred_at_once_are_all_answered(gateway, tmp_path):
    """A single curl opens a connection for each request."""
    body = json.dumps({**QUESTION, "stream": True, "max_tokens": 2, "ignore_eos": True})
    each = [f'url = "{gateway.url}/v1/chat/completions"', f"data = {json.dumps(body)}", 'noproxy = "*"']
    each += [f'header = "{header}"' for header in key_of(gateway)[1:]]
    each += [f'output = "{tmp_path}/%d"', 'write-out = "%{http_code}\\n"', "silent"]
    text = "\nnext\n".join("\n".join(each).replace("%d", str(number)) for number in range(200))
    config = tmp_path / "config"
    config.write_text(f"parallel\nparallel-max = 200\nparallel-immediate\n{text}\n")
    done = subprocess.run(["curl", "-K", str(config)], capture_output=True, timeout=120, check=False)
    assert done.stdout.split() == [b"200"] * 200, done.stderr
    for number in range(200):
        assert (tmp_path / str(number)).read_bytes().rstrip().endswith(b"data: [DONE]")
