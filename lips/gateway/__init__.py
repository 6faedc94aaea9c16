"""Serves the usual HTTP interfaces, as a program like any other: OpenAI's, Anthropic's, and a page to talk on.

`symphony run gateway` listens on http://127.0.0.1:8080, for this machine alone.
"""
