"""What users and programs see of the tiers, on a real daemon with little memory: attributes, advice, pressure, figures."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time

import pytest

import libsym as sym

MEMORY = "1M"  # of the tiny model's pages, 128: 4,096 tokens
LARGE = 1000  # tokens: 32 pages


@pytest.fixture
def small(start_daemon, connect_to):
    """A daemon in whose memory four large files have room."""
    daemon = start_daemon("--model", "tiny", "--kv-memory", MEMORY)
    connect_to(daemon)
    return daemon


def tier(daemon, name):
    return os.getxattr(daemon.mount / name, "user.kv.tier").decode()


def make(name, num_tokens=LARGE):
    with sym.kv_create(name) as kv:
        sym.kv_write(kv, [1 + number % 200 for number in range(num_tokens)])


def tokens_of(name):
    with sym.kv_open(name) as kv, kv.fork() as fork:
        return sym.pred(fork, [5]).argmax()
