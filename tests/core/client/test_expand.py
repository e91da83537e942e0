from __future__ import annotations

import attrs

from trencadis.client.expand import expand
from trencadis.records import Request, SamplingParams


def request(**params: object) -> Request:
    return Request(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(**params), tenant="t", priority=3)


def test_one_completion_is_the_request_itself() -> None:
    one = request(seed=5)
    assert expand(one) == (one,)


def test_each_completion_has_its_own_name_and_the_seed_counted_up() -> None:
    parts = expand(request(n=3, seed=5, temperature=0.5))
    assert [part.request_id for part in parts] == ["r/0", "r/1", "r/2"]
    assert [part.params.seed for part in parts] == [5, 6, 7]
    assert all(part.params.n == 1 and part.params.temperature == 0.5 for part in parts)
    assert all((part.tenant, part.priority, part.prompt_token_ids) == ("t", 3, (1, 2)) for part in parts)


def test_the_largest_seed_wraps_around() -> None:
    assert [part.params.seed for part in expand(request(n=2, seed=2**63 - 1))] == [2**63 - 1, 0]


def test_without_a_seed_no_completion_gets_one() -> None:
    assert [part.params.seed for part in expand(request(n=2))] == [None, None]


def test_prompt_logprobs_are_computed_once() -> None:
    assert [part.params.prompt_logprobs for part in expand(request(n=3, prompt_logprobs=2))] == [2, None, None]


def test_best_of_runs_so_many_and_reports_what_is_needed_to_choose() -> None:
    parts = expand(request(n=2, best_of=4, seed=5))
    assert [part.request_id for part in parts] == ["r/0", "r/1", "r/2", "r/3"]
    assert [part.params.seed for part in parts] == [5, 6, 7, 8]
    assert {(part.params.n, part.params.best_of, part.params.logprobs) for part in parts} == {(1, None, 0)}


def test_log_probabilities_that_were_asked_for_stay_as_they_are() -> None:
    assert {part.params.logprobs for part in expand(request(best_of=2, logprobs=3))} == {3}
    assert {part.params.logprobs for part in expand(request(n=2, best_of=2))} == {None}


def test_one_prefix_is_handed_over_once() -> None:
    one = attrs.evolve(request(n=3), transfer_params={"a": 1})
    assert [part.transfer_params for part in expand(one)] == [{"a": 1}, None, None]
