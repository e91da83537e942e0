"""Quality of experience: how near a reader's progress through a streamed answer is to the one that is expected.

A client shows tokens at the reader's pace: it keeps those that come early, and the reader waits for those that come late. So late tokens
delay all after them, and tokens that come early make up for nothing that was lost.

Source: Liu et al., Andes, arXiv 2404.16283.
"""

from __future__ import annotations

import math

import numpy as np

from trencadis.records import FloatArray
from trencadis_tools.simulation.run import RequestRecord

__all__ = ["qoe_of", "qoe_v1_of", "shown_times"]


def shown_times(delivered_s: FloatArray, *, ttft_target_s: float, tpot_target_s: float) -> FloatArray:
    """Return when each token is shown, ``[num_tokens]``: once it is there, the one before is read, and not before it is expected. Pure.

    The first is expected at ``ttft_target_s``, each other one ``tpot_target_s`` after that before it. So token i is shown at the maximum,
    over all j up to i, of ``delivered_s[j] + (i - j) * tpot_target_s``, or at its expected time if that is later.

    Args:
        delivered_s: When each came, after the request was sent, ascending, ``[num_tokens]``.
        ttft_target_s: Finite.
        tpot_target_s: Time to read a token, finite.
    """
    read_s = np.arange(len(delivered_s)) * tpot_target_s
    start_s: FloatArray = np.maximum(np.maximum.accumulate(delivered_s - read_s), ttft_target_s)
    return start_s + read_s


def qoe_of(record: RequestRecord) -> float:
    """Return the quality of experience, above 0 and at most 1; 0 without an answer, NaN without targets or times of tokens. Pure.

    It is 1 less the sum of the tokens' delays by the sum of the times until they were shown, both against the expected times: the area
    between the expected and the actual curve of tokens over time, by the area left of the actual one.

    Source: equations 1 to 3 of the paper's second version.
    """
    expected_s, shown_s = _curves(record)
    return float(expected_s.sum() / shown_s.sum()) if len(shown_s) else _without_tokens(record)


def qoe_v1_of(record: RequestRecord) -> float:
    """Return the same by the first version of the paper: the area below the actual curve of tokens over time by that below the expected one.

    Both until the last token is read. Each token is read for as long as one is expected to take, and counts by the part that was read.
    """
    expected_s, shown_s = _curves(record)
    if not len(shown_s):
        return _without_tokens(record)
    half_s = record.request.tpot_target_s / 2
    end_s = shown_s[-1] + half_s
    return float((end_s - shown_s).sum() / (end_s - expected_s).sum())


def _has_targets(record: RequestRecord) -> bool:
    return math.isfinite(record.request.ttft_target_s) and math.isfinite(record.request.tpot_target_s)


def _without_tokens(record: RequestRecord) -> float:
    return 0.0 if record.error and _has_targets(record) else math.nan


def _curves(record: RequestRecord) -> tuple[FloatArray, FloatArray]:
    """Return when each token is expected and shown, after the request was sent; empty if there is nothing to compare."""
    request, times_s = record.request, record.token_times_s
    ttft_s, tpot_s = request.ttft_target_s, request.tpot_target_s
    if record.error or times_s is None or not _has_targets(record):
        return np.empty(0), np.empty(0)
    expected_s: FloatArray = ttft_s + np.arange(len(times_s)) * tpot_s
    return expected_s, shown_times(times_s - record.sent_s, ttft_target_s=ttft_s, tpot_target_s=tpot_s)
