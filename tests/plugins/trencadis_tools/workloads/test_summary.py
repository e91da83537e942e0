from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis_tools.workloads import Workload, WorkloadRequest, load_workload, summarise
from trencadis_tools.workloads.prompts import Prompts
from trencadis_tools.workloads.summary import reusable_tokens


def asked(request_id: str, length: int, **more) -> WorkloadRequest:
    return WorkloadRequest(
        **{"request_id": request_id, "arrival_s": 0.0, "num_prompt_tokens": length, "num_output_tokens": 5, **more}
    )


@given(
    heads=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=5),
    own=st.integers(1, 9),
    chain=st.booleans(),
)
def test_reusable_tokens_are_the_longest_beginning_that_an_earlier_prompt_or_answer_has(heads, own, chain) -> None:
    """Against the definition: token by token, over all texts before."""
    ids = [tuple(hash(tuple(head[: i + 1])) % 2**63 for i in range(len(head))) for head in heads]
    requests = [asked(str(i), 6 * len(one) + own, block_ids=one) for i, one in enumerate(ids)]
    if chain:
        requests.append(asked("last", requests[0].num_prompt_tokens + 5 + own, after="0"))
    workload = Workload(name="w", requests=tuple(requests), block_tokens=6)
    prompts = Prompts(workload, vocab_size=2**20)
    texts: list[tuple[int, ...]] = []
    for index, found in enumerate(reusable_tokens(workload)):
        before = texts[0] if requests[index].continues else ()
        tokens = prompts.token_ids(index, before)
        best = 0
        for text in texts:
            length = next(
                (i for i, pair in enumerate(zip(text[:-1], tokens, strict=False)) if pair[0] != pair[1]), None
            )
            best = max(best, min(len(text) - 1, len(tokens)) if length is None else length)
        best = min(best, len(tokens) - 1)
        assert found == best
        texts.append((*tokens, 1, 1, 1, 1, 0))


def test_counts_rates_and_lengths() -> None:
    requests = [
        asked("a", 10, tenant="x", session="s"),
        asked("b", 17, after="a", session="s", think_s=4.0, tenant="x"),
        asked("c", 30, arrival_s=2.0, priority=1),
        asked("d", 30, arrival_s=6.0),
    ]
    summary = summarise(Workload(name="w", requests=tuple(requests)))
    assert (summary.num_requests, summary.num_following, summary.num_sessions) == (4, 1, 1)
    assert (summary.span_s, summary.rate, summary.gap_cv) == (6.0, 1 / 3, pytest.approx(1 / 3))
    assert (summary.num_prompt_tokens, summary.prompt_tokens.mean, summary.prompt_tokens.max) == (87, 21.75, 30)
    assert (summary.think_s.mean, summary.num_output_tokens) == (4.0, 20)
    assert (summary.tenants, summary.priorities) == ({"default": 2, "x": 2}, {0: 3, 1: 1})
    assert summary.reusable_ratio == 14 / 87


def test_published_traces_have_their_published_numbers() -> None:
    """``README.md`` of the traces: of Mooncake's synthetic one, 43,924 of 121,877 blocks are unique, so that 64.0 % may hit."""
    workload = load_workload("mooncake_synthetic")
    blocks = [block for one in workload.requests for block in one.block_ids]
    assert (len(workload.requests), len(blocks), len(set(blocks))) == (3993, 121_877, 43_924)
    assert 1 - len(set(blocks)) / len(blocks) == pytest.approx(0.640, abs=5e-4)
    # In tokens it is more: last blocks, which are seldom shared, are not full.
    assert summarise(workload).reusable_ratio == pytest.approx(0.651, abs=5e-4)
    code = summarise(load_workload("azure_code"))
    assert (code.num_requests, round(code.prompt_tokens.mean), round(code.output_tokens.mean)) == (8819, 2048, 28)
    assert (code.rate, code.gap_cv) == (pytest.approx(2.57, abs=0.005), pytest.approx(13.2, abs=0.06))
