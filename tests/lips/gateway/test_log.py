"""A gateway's log: a line a request."""

import json
import re

from tests.lips.gateway.test_odd_clients import CHAT, QUESTION


def test_the_log_has_a_line_a_request_and_no_client_forges_one(start_gateway):
    gateway = start_gateway()
    with gateway.client() as http:
        usage = http.post(CHAT, json={**QUESTION, "ignore_eos": True}).json()["usage"]
        line = gateway.until_it_says("POST")
        tokens = f"in {usage['prompt_tokens']} cached 0 out 8"
        assert re.fullmatch(rf"gateway: POST {CHAT} 200 {tokens} first \d+\.\d{{3}} s total \d+\.\d{{3}} s\n", line)
        assert http.get("/nothing%0agateway:%20GET?key=secret").status_code == 404
        assert gateway.until_it_says("404").startswith("gateway: GET /nothing%0agateway:%20GET 404 total ")


def test_the_log_is_json_where_it_is_asked_for(start_gateway):
    gateway = start_gateway("--log", "json")
    with gateway.client() as http:
        usage = http.post(CHAT, json={**QUESTION, "stream": True, "ignore_eos": True}).text
        assert usage.endswith("data: [DONE]\n\n")
        found = json.loads(gateway.until_it_says("POST"))
        assert (found["method"], found["path"], found["status"]) == ("POST", CHAT, 200)
        assert (found["completion_tokens"], found["cached_tokens"]) == (8, 0)
        assert 0 < found["first_token_s"] < found["total_s"]
        http.get("/health")
        assert json.loads(gateway.until_it_says("health"))["first_token_s"] is None
