from __future__ import annotations

import numpy as np
import pytest

from trencadis.errors import ConfigValueError
from trencadis_plugins.scheduling.predictors import make_predictor

SLOTS = np.array([3, 1], np.int32)


def half_of_the_prompt(request) -> float:
    return len(request.prompt_token_ids) / 2


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


def test_a_function_by_import_path_is_asked_once_per_request(view_of, request_of, monkeypatch):
    name = type(monkeypatch).__module__ + ":MonkeyPatch"  # importable, and no predictor of ours
    assert make_predictor(name) is not None
    predictor = make_predictor("builtins:len")
    predictor._function = half_of_the_prompt
    predictor.on_added(3, request_of(num_prompt_tokens=60))
    predictor.on_added(1, request_of(num_prompt_tokens=10))
    assert predictor.expected(view_of(), SLOTS).tolist() == [30, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("oracle", "no such predictor. Choose one of: none, max_tokens, history"),
        ("no_such_module:guess", "cannot be imported: No module named"),
        ("builtins:no_such_function", "cannot be imported"),
    ],
)
def test_what_is_no_predictor_is_refused_in_words(name, message):
    with pytest.raises(ConfigValueError, match=message):
        make_predictor(name)
