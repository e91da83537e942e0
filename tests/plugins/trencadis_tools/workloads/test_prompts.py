from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.errors import ConfigError, ConfigValueError
from trencadis_tools.workloads import Prompts, Workload, WorkloadRequest
from trencadis_tools.workloads.prompts import NUM_RESERVED_TOKENS

VOCAB_SIZE = 2**17


def asked(request_id: str, length: int, **more) -> WorkloadRequest:
    return WorkloadRequest(
        **{"request_id": request_id, "arrival_s": 0.0, "num_prompt_tokens": length, "num_output_tokens": 5, **more}
    )


def workload(*requests: WorkloadRequest, **more) -> Workload:
    return Workload(name="w", requests=requests, **more)


def common(first, second) -> int:
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


@given(
    heads=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=2, max_size=4),
    block_tokens=st.sampled_from([1, 4, 16, 512]),
    own=st.integers(1, 40),
)
def test_prompts_share_exactly_the_blocks_of_equal_ids_and_no_token_more(heads, block_tokens, own) -> None:
    """An id is chained here: it stands for the ids before it too, as in traces."""
    chained = [tuple(hash(tuple(head[: i + 1])) % 2**63 for i in range(len(head))) for head in heads]
    requests = [
        asked(str(i), len(ids) * block_tokens + own, block_ids=ids, max_tokens=9) for i, ids in enumerate(chained)
    ]
    prompts = Prompts(workload(*requests, block_tokens=block_tokens), vocab_size=VOCAB_SIZE)
    tokens = [prompts.token_ids(i) for i in range(len(requests))]
    for i, one in enumerate(tokens):
        assert len(one) == requests[i].num_prompt_tokens
        assert NUM_RESERVED_TOKENS <= min(one) <= max(one) < VOCAB_SIZE
        for k in range(i):
            shared = common(chained[i], chained[k]) * block_tokens
            # Below 16 drawn tokens chance alone makes a few equal: one in 131,072 is.
            assert shared <= common(one, tokens[k]) <= shared + 1


def test_equal_ids_share_though_the_last_block_of_one_is_cut() -> None:
    prompts = Prompts(
        workload(asked("a", 30, block_ids=(7, 8)), asked("b", 40, block_ids=(7, 8)), block_tokens=16),
        vocab_size=VOCAB_SIZE,
    )
    assert common(prompts.token_ids(0), prompts.token_ids(1)) == 30


def test_a_request_that_continues_begins_with_prompt_and_answer_of_the_one_before() -> None:
    made = workload(asked("a", 20), asked("b", 33, after="a"), asked("c", 12, after="b", block_ids=(1,)))
    prompts = Prompts(made, vocab_size=VOCAB_SIZE)
    first = prompts.token_ids(0)
    assert prompts.token_ids(1, (*first, 1, 1, 1, 1, 0))[:25] == (*first, 1, 1, 1, 1, 0)
    assert len(prompts.token_ids(1, (*first, 1, 1, 1, 1, 0))) == 33
    assert len(prompts.token_ids(1, (*first, 0))) == 29, "a shorter answer: as many new tokens"
    assert len(prompts.token_ids(2)) == 12


def test_tokens_are_those_of_the_seed() -> None:
    requests = [asked(str(i), 50, block_ids=(3,)) for i in range(3)]
    other = Prompts(workload(*requests, seed=1), vocab_size=VOCAB_SIZE)
    again = Prompts(workload(*requests, seed=1), vocab_size=VOCAB_SIZE)
    assert other.token_ids(0) == again.token_ids(0)
    assert common(other.token_ids(0), Prompts(workload(*requests), vocab_size=VOCAB_SIZE).token_ids(0)) == 0


def test_an_engines_request_has_the_terms_of_the_workload_and_no_true_length() -> None:
    made = workload(
        asked("a", 20, tenant="t", priority=3, ttft_target_s=2.0, tpot_target_s=0.1, num_output_tokens=7),
        asked("b", 20, max_tokens=100),
    )
    first, second = (Prompts(made, vocab_size=VOCAB_SIZE).request(i) for i in range(2))
    assert (first.request_id, first.tenant, first.priority, first.cache_salt) == ("a", "t", 3, "")
    assert (first.ttft_target_s, first.tpot_target_s) == (2.0, 0.1)
    assert (first.params.max_tokens, second.params.max_tokens) == (7, 100)
    assert (first.params.seed, second.params.seed) == (0, 1)


def test_a_vocabulary_without_a_token_for_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="a vocabulary of 2 tokens has none for prompts"):
        Prompts(workload(asked("a", 20)), vocab_size=2)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ((), "holds no request"),
        ((asked("a", 5), asked("a", 5)), "'a' comes twice"),
        ((asked("a", 5, arrival_s=2.0), asked("b", 5)), "comes at 0 s, after one of 2 s"),
        ((asked("b", 50, after="a"), asked("a", 5)), "follows 'a', which is not before it"),
        ((asked("a", 20), asked("b", 25, after="a")), "whose prompt and answer have 25"),
        ((asked("a", 16, block_ids=(1, 2)),), "16 prompt tokens and 2 blocks of 16"),
    ],
)
def test_a_workload_that_contradicts_itself_is_refused_in_words(requests, words) -> None:
    with pytest.raises(ConfigValueError, match=words):
        workload(*requests)
