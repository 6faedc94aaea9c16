"""Calls about the daemon and its model."""

from __future__ import annotations

from typing import Any

from libsym.abi import Op
from libsym.channel.scripts import Call, Script
from libsym.info import ModelInfo, parse


def model_info_script() -> Script[ModelInfo]:
    reply = yield Call(Op.MODEL_INFO)
    return ModelInfo.from_json(reply.payload)


def daemon_stat_script() -> Script[dict[str, Any]]:
    return (yield from _object(Op.STAT))


def daemon_check_script() -> Script[dict[str, int]]:
    return (yield from _object(Op.CHECK))


def _object(op: Op) -> Script[dict[str, Any]]:
    reply = yield Call(op)
    found: dict[str, Any] = parse(reply.payload)
    return found
