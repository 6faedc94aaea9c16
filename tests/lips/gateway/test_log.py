"""A gateway's log: a line a request."""

import json
import re

from tests.lips.gateway.wire import CHAT, QUESTION, post

TIMES = r"first \d+\.\d{3} s total \d+\.\d{3} s"


def test_the_log_has_a_line_a_request_and_no_client_forges_one(tiny_gateway, tiny):
    usage = post(tiny, CHAT, QUESTION, ignore_eos=True)["usage"]
    num_tokens = usage["prompt_tokens"]
    line = tiny_gateway.until_it_says(f"in {num_tokens} cached")  # other tests have lines in this log
    assert re.fullmatch(rf"gateway: POST {CHAT} 200 in {num_tokens} cached [0-9]+ out 8 {TIMES}\n", line)
    assert tiny.get("/nothing%0agateway:%20GET?key=secret").status_code == 404
    assert tiny_gateway.until_it_says("404").startswith("gateway: GET /nothing%0agateway:%20GET 404 total ")


def test_the_log_is_json_where_it_is_asked_for(start_gateway):
    gateway = start_gateway("--log", "json")
    with gateway.client() as http:
        assert http.post(CHAT, json={**QUESTION, "stream": True, "ignore_eos": True}).text.endswith("[DONE]\n\n")
        found = json.loads(gateway.until_it_says("POST"))
        assert (found["method"], found["path"], found["status"]) == ("POST", CHAT, 200)
        assert (found["completion_tokens"], found["cached_tokens"]) == (8, 0)
        assert 0 < found["first_token_s"] < found["total_s"]
        http.get("/health")
        assert json.loads(gateway.until_it_says("health"))["first_token_s"] is None
