"""Requests with generated tokens in place of the recorded ones; any two share a prefix as long as the recorded two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.records import Int32Array, Request, SamplingParams
from trencadis_tools.recorder.flight_record import RecordedRequest

__all__ = ["EOS", "SyntheticRequests"]

EOS = 0
"""End-of-sequence token of a replay."""


class SyntheticRequests:
    """Requests of one record, and the output tokens of each.

    Args:
        recorded: Recorded requests by number.
        ends_by_token: Whether every output ends with ``EOS`` at its recorded length, even if a client ended the request.

    Attributes:
        recorded: Recorded requests by number.
        tokens: Prompt and recorded output of each request, int32. If a stop token ended it, the last one is ``EOS``.
        vocab_size: Size of the vocabulary; token ids are 0 .. vocab_size - 1.
    """

    def __init__(self, recorded: Sequence[RecordedRequest], *, ends_by_token: bool = False) -> None:
        self.recorded = recorded
        self.vocab_size = len(recorded) + 1
        self.tokens = _tokens(recorded, ends_by_token=ends_by_token)
        self._number_of: dict[int, int] = {}
        self._params: list[SamplingParams] = []  # kept alive so that ids of objects stay unique

    def request(self, number: int) -> Request:
        """Return the request to add for a recorded one; its id is its number."""
        record, tokens = self.recorded[number], self.tokens[number].tolist()
        params = SamplingParams(
            max_tokens=record.max_tokens,
            min_tokens=record.min_tokens,
            prompt_logprobs=0 if record.wants_prompt_logprobs else None,
            seed=number,  # identifies the request to simulated drafts
        )
        self._number_of[id(params)] = number
        self._params.append(params)
        known = tokens[record.num_prompt_tokens : record.num_known_tokens]
        return Request(
            request_id=str(number),
            prompt_token_ids=tuple(tokens[: record.num_prompt_tokens]),
            params=params,
            output_token_ids=tuple(known) if known else None,
            tenant=record.tenant,
            cache_salt=record.tenant if record.cache_salt is None else record.cache_salt,
            priority=record.priority,
            weight=record.weight,
            ttft_target_s=record.ttft_target_s,
            tpot_target_s=record.tpot_target_s,
        )

    def number_of(self, params: SamplingParams) -> int:
        """Return the number of the request with this parameters object, compared by identity."""
        return self._number_of[id(params)]

    def next_tokens(self, number: int, known: int, count: int) -> list[int]:
        """Return the tokens of a request after ``known`` tokens; beyond the record, a token that no other request has."""
        tokens: list[int] = self.tokens[number][known : known + count].tolist()
        return tokens + [number + 1] * (count - len(tokens))


def _tokens(recorded: Sequence[RecordedRequest], *, ends_by_token: bool) -> list[Int32Array]:
    """Return tokens of which any two requests share the recorded length of prefix. Pure."""
    made: dict[int, Int32Array] = {}
    for start in range(len(recorded)):
        chain = [start]
        while chain[-1] not in made and recorded[chain[-1]].num_like:
            chain.append(recorded[chain[-1]].like)
        for number in reversed(chain):
            if number not in made:
                record = recorded[number]
                text = np.full(record.num_tokens, number + 1, np.int32)
                if record.num_like:
                    text[: record.num_like] = made[record.like][: record.num_like]
                made[number] = text
    texts = [made[number] for number in range(len(recorded))]
    for record, text in zip(recorded, texts, strict=True):
        if (record.ends_by_token or ends_by_token) and record.num_output_tokens:
            text[-1] = EOS  # the KV of the last token is never shared
    return texts
