from __future__ import annotations

import numpy as np
import pytest

from trencadis.errors import ConfigValueError
from trencadis_plugins.scheduling.config import ShortestFirstConfig
from trencadis_plugins.scheduling.shortest_first import ShortestFirst, make_predictor
from trencadis_testing.scheduling import SchedulingConformance


class TestShortestFirst(SchedulingConformance):
    make = ShortestFirst


class TestShortestFirstByMaxTokens(SchedulingConformance):
    num_histories = 8

    def make(self):
        return ShortestFirst(ShortestFirstConfig(predictor="max_tokens", age_tokens_per_s=0))


COLUMNS = {
    "num_prompt_tokens": {0: 50, 1: 20, 2: 90},
    "num_tokens": {0: 50, 1: 20, 2: 90},
    "max_total_tokens": {0: 60, 1: 120, 2: 91},
}


@pytest.mark.parametrize(
    ("predictor", "weight", "order"),
    [("none", 2.0, [1, 0, 2]), ("max_tokens", 1.0, [0, 2, 1]), ("max_tokens", 0.0, [1, 0, 2])],
)
def test_work_is_prompt_and_weighted_output(view_of, predictor, weight, order):
    """With weight 1: 50 + 10, 20 + 100, 90 + 1."""
    policy = ShortestFirst(ShortestFirstConfig(predictor=predictor, output_weight=weight, age_tokens_per_s=0))
    assert policy.order(view_of(waiting=[0, 1, 2], **COLUMNS)).tolist() == order


def test_of_a_preempted_sequence_only_what_is_still_to_come_counts(view_of):
    """Slot 0 has 9 of its 10 outputs: 59 tokens again and 1 to come; slot 1 is new with 55 and 10."""
    policy = ShortestFirst(ShortestFirstConfig(predictor="max_tokens", output_weight=1, age_tokens_per_s=0))
    view = view_of(
        waiting=[1, 0],
        num_prompt_tokens={0: 50, 1: 55},
        num_tokens={0: 59, 1: 55},
        max_total_tokens={0: 60, 1: 65},
    )
    assert policy.order(view).tolist() == [0, 1]


@pytest.mark.parametrize(("later_s", "first"), [(6.0, 1), (8.0, 2)])
def test_waiting_makes_up_for_work_at_the_stated_rate(view_of, later_s, first):
    """70 tokens more, at 10 tokens a second: worth 7 s."""
    policy = ShortestFirst(ShortestFirstConfig(predictor="none", age_tokens_per_s=10))
    view = view_of(waiting=[1, 2], arrival_s={1: later_s, 2: 0}, **COLUMNS)
    assert policy.order(view)[0] == first


def test_it_learns_lengths_from_what_ended(view_of):
    policy = ShortestFirst(ShortestFirstConfig(predictor="history", age_tokens_per_s=0))
    view = view_of(waiting=[0, 1], tenant={0: 0, 1: 1}, num_tokens={0: 50, 1: 60}, num_prompt_tokens={0: 50, 1: 60})
    assert policy.order(view).tolist() == [0, 1]
    for tenant, num_output_tokens in ((0, 90), (1, 5)):
        policy.on_finished(slot=7, tenant=tenant, num_output_tokens=num_output_tokens)
    assert policy.order(view).tolist() == [1, 0]


def test_equal_work_stays_in_order(view_of):
    assert ShortestFirst().order(view_of(waiting=[5, 2, 7])).tolist() == [5, 2, 7]


SLOTS = np.array([3, 1], np.int32)


def test_none_expects_nothing(view_of):
    assert make_predictor("none").expected(view_of(), SLOTS).tolist() == [0, 0]


def test_max_tokens_expects_what_is_allowed(view_of):
    view = view_of(num_prompt_tokens={3: 40, 1: 10}, max_total_tokens={3: 140, 1: 12})
    assert make_predictor("max_tokens").expected(view, SLOTS).tolist() == [100, 2]


def test_history_expects_the_mean_of_the_tenant_and_no_more_than_allowed(view_of):
    view = view_of(tenant={3: 0, 1: 1}, num_prompt_tokens={3: 10, 1: 10}, max_total_tokens={3: 500, 1: 40})
    predictor = make_predictor("history")
    assert predictor.expected(view, SLOTS).tolist() == [128, 30]
    for tenant, num_output_tokens in ((0, 10), (0, 20), (0, 30), (1, 999), (0, 0)):
        predictor.on_finished(tenant, num_output_tokens)
    assert predictor.expected(view, SLOTS).tolist() == pytest.approx([20, 30])


def test_history_follows_a_change(view_of):
    predictor = make_predictor("history")
    for num_output_tokens in [1000] * 500 + [10] * 500:
        predictor.on_finished(0, num_output_tokens)
    view = view_of(max_total_tokens={1: 5000, 3: 5000})
    assert predictor.expected(view, SLOTS).max() < 20


def test_a_function_by_import_path_is_asked_once_per_request(view_of, request_of, monkeypatch, tmp_path):
    (tmp_path / "guesses_of_a_test.py").write_text(
        "def half_of_the_prompt(request):\n    return len(request.prompt_token_ids) / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    predictor = make_predictor("guesses_of_a_test:half_of_the_prompt")
    predictor.on_added(3, request_of(num_prompt_tokens=60))
    predictor.on_added(1, request_of(num_prompt_tokens=10))
    assert predictor.expected(view_of(), SLOTS).tolist() == [30, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("oracle", "no such predictor. Choose one of: none, max_tokens, history"),
        ("no_such_module:guess", "cannot be imported: No module named"),
        ("builtins:no_such_function", "cannot be imported"),
        ("os:system", "is no function of a Python module, and was not called"),
        ("subprocess:Popen", "is no function of a Python module, and was not called"),
    ],
)
def test_what_is_no_predictor_is_refused_in_words(name, message):
    with pytest.raises(ConfigValueError, match=message):
        make_predictor(name)
