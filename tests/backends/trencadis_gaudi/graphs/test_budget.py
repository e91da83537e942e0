from __future__ import annotations

from collections.abc import Callable

from trencadis.records import Bucket, Phase
from trencadis_gaudi.graphs.capture import GraphBudget, capture_order

GIB = 2**30
PREFILLS = [Bucket(b, q, 0) for b in (1, 2, 4) for q in range(128, 1025, 128)]
DECODES = [Bucket(b, 1, n, Phase.DECODE) for b in (1, 2, 4) for n in range(1, 17)]
"""Sizes of the vendor's published run: 24 prefills, 48 decodes."""


def _budget(total: float, ratio: float, capture: Callable[[Bucket, int], int]) -> GraphBudget:
    return GraphBudget(int(total), prompt_ratio=ratio, capture=capture)


def _by_tokens(bucket: Bucket, index: int) -> int:
    """Memory in proportion to the tokens of a prefill; a decode costs 3.4 MiB, as in the published run."""
    if bucket.phase is Phase.DECODE:
        return int(161.9 * 2**20 / 48)
    return int(bucket.num_tokens * 1.45 * 2**20)


def test_fewest_tokens_come_first_then_the_shorter_then_the_smaller_batch():
    order = [(b.batch_size, b.query_len) for b in capture_order(PREFILLS, "min_tokens")]
    assert order[:16] == [
        (1, 128), (2, 128), (1, 256), (1, 384), (4, 128), (2, 256), (1, 512), (1, 640),
        (2, 384), (1, 768), (1, 896), (4, 256), (2, 512), (1, 1024), (2, 640), (4, 384),
    ]  # fmt: skip


def test_largest_batch_comes_first_then_the_fewest_blocks():
    order = [(b.batch_size, b.num_blocks) for b in capture_order(DECODES, "max_bs")]
    assert order[:3] == [(4, 1), (4, 2), (4, 3)]
    assert order[-1] == (1, 16)


def test_what_decodes_leave_goes_to_prefills_in_a_second_round():
    prefills, decodes = capture_order(PREFILLS, "min_tokens"), capture_order(DECODES, "max_bs")
    prompt, decode = _budget(15.85 * GIB, 0.5, _by_tokens).run(prefills, decodes)
    assert decode.is_complete
    assert len(decode.captured) == 48
    alone, _ = _budget(15.85 * GIB / 2, 1.0, _by_tokens).run(prefills, [])
    assert len(prompt.captured) > len(alone.captured)
    assert prompt.captured[: len(alone.captured)] == alone.captured
    assert prompt.used_bytes + decode.used_bytes <= 15.85 * GIB


def test_what_prefills_leave_goes_to_decodes():
    one = [Bucket(1, 128, 0)]
    prompt, decode = _budget(100, 0.9, lambda bucket, index: 1).run(one, capture_order(DECODES, "max_bs"))
    assert prompt.is_complete
    assert decode.captured_ratio == 1.0


def test_a_bucket_that_does_not_fit_is_left_and_later_smaller_ones_are_still_tried():
    large, small = Bucket(1, 1024, 0), Bucket(1, 128, 0)
    first = Bucket(1, 512, 0)
    prompt, _ = _budget(1000, 1.0, lambda bucket, index: bucket.query_len).run([first, large, small], [])
    assert prompt.captured == [first, small]
    assert not prompt.is_complete


def test_nothing_is_captured_without_a_budget():
    prompt, decode = _budget(0, 0.5, _by_tokens).run(list(PREFILLS), list(DECODES))
    assert not prompt.captured
    assert not decode.captured
    assert (prompt.captured_ratio, prompt.is_complete) == (0.0, False)


def test_a_capture_is_told_its_place_in_the_whole_order():
    seen: list[tuple[int, int]] = []

    def capture(bucket: Bucket, index: int) -> int:
        seen.append((bucket.query_len, index))
        return 1

    _budget(100, 1.0, capture).run([Bucket(1, q, 0) for q in (128, 256, 384)], [])
    assert seen == [(128, 0), (256, 1), (384, 2)]
