"""A request to an engine on the fake backend, and drafters that are always right about its text or never."""

from __future__ import annotations

from typing import Any

from trencadis.records import Request, SamplingParams
from trencadis_testing.fakes import fake_text

__all__ = ["PROMPT", "request", "right", "wrong"]

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    """Return a request for twelve tokens, unless parameters say otherwise. Pure."""
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 12, **params}))


def right(tokens: Any) -> list[int]:
    """Return the three tokens that come next. Pure."""
    return fake_text(tokens.tolist(), 3, eos=-1)


def wrong(tokens: Any) -> list[int]:
    """Return three tokens none of which can stand. Pure."""
    return [(right(tokens)[0] + 1) % 97] * 3
