from __future__ import annotations

import logging

import attrs
import pytest

from support.strategies.bucket_cases import SMALL, fields
from trencadis.errors import ConfigValueError
from trencadis.records import Bucket
from trencadis_plugins.bucketing.config import LinearConfig
from trencadis_plugins.bucketing.stepped import Span, SteppedStrategy

LIMITS = attrs.evolve(
    SMALL, block_size=16, max_model_len=256, max_num_batched_tokens=128, max_prefill_batch_size=2, num_blocks=20
)


class Ends(SteppedStrategy[LinearConfig]):
    """The smallest size and the largest one; the step stays unused but in what the config derives."""

    table_name = "bucketing.ends"

    def __init__(self, limits, **settings):
        super().__init__(limits, LinearConfig(**settings))

    def derived(self, limits):
        return {
            "prompt_bs": Span(1, 1, 2),
            "prompt_query": Span(self.min_query(limits), 16, 128),
            "prompt_ctx": Span(0, 1, 8),
            "decode_bs": Span(1, 1, 4),
            "decode_block": Span(1, 8, 20),
        }

    def sizes(self, dimension, span, limits):
        if span.minimum > span.maximum:
            raise ValueError("nothing")
        return sorted({span.minimum, span.maximum})


def sizes(limits=LIMITS, **settings):
    return fields(Ends(limits, **settings).buckets(limits))


def test_derived_spans_are_used_where_nothing_is_set():
    assert sizes() == [
        (1, 16, 0), (1, 16, 8), (1, 128, 0), (1, 128, 8), (2, 16, 0), (2, 16, 8),
        (1, 1, 1), (1, 1, 16), (4, 1, 20),
    ]  # fmt: skip


def test_set_values_take_the_place_of_derived_ones():
    found = sizes(prompt_bs_min=2, prompt_query_max=64, prompt_ctx_min=3, prompt_ctx_max=4, decode_bs_max=2)
    assert found == [(2, 16, 3), (2, 16, 4), (2, 64, 3), (2, 64, 4), (1, 1, 1), (1, 1, 16), (2, 1, 20)]


def test_shortest_query_is_a_block_or_the_longest_query_if_that_is_shorter():
    assert Ends(LIMITS).min_query(LIMITS) == 16
    assert Ends(LIMITS, prompt_query_max=10).min_query(LIMITS) == 10
    assert Ends(LIMITS, prompt_query_min=5).min_query(LIMITS) == 5
    assert Ends(LIMITS).min_query(attrs.evolve(LIMITS, max_num_batched_tokens=7)) == 7


def test_maximum_above_the_engines_is_lowered_and_said(caplog):
    with caplog.at_level(logging.INFO):
        assert Ends(LIMITS, decode_bs_max=99, prompt_bs_max=2).bucket_for(Bucket(1, 16, 0)) == Bucket(1, 16, 0)
    assert "[bucketing.ends] decode_bs_max = 99: above what the engine allows, so 4" in caplog.messages
    assert not any("prompt_bs_max" in message for message in caplog.messages)


def test_what_merged_prompts_change_is_said(caplog):
    merged = attrs.evolve(LIMITS, max_prefill_batch_size=1, max_merged_prefills=4)
    with caplog.at_level(logging.INFO):
        Ends(merged, prompt_query_step=32, prompt_query_max=64, prompt_bs_min=2)
    changes = [message for message in caplog.messages if message.startswith("[bucketing.ends] prompt")]
    assert changes == [
        "[bucketing.ends] prompt_bs_min = 2: above what the engine allows, so 1",
        "[bucketing.ends] prompt_query_step = 32: 4 times as much where prompts are merged, so 128",
        "[bucketing.ends] prompt_query_max = 64: merged prompts fill the budget, so 128",
    ]


@pytest.mark.parametrize(("step", "lowered"), [(5, 15), (50, 1)])
def test_contiguous_minimum_above_the_cache_is_lowered_by_a_step_to_one_at_least_and_said(caplog, step, lowered):
    with caplog.at_level(logging.INFO):
        found = sizes(attrs.evolve(LIMITS, contiguous=True), decode_block_min=30, decode_block_step=step)
    assert {count for _, query_len, count in found if query_len == 1} == {lowered, 20}
    assert f"[bucketing.ends] decode_block_min = 30: above what the engine allows, so {lowered}" in caplog.messages


def test_dimension_without_a_size_names_setting_and_remedy():
    with pytest.raises(ConfigValueError, match=r"\[bucketing.ends\] decode_bs_min = 9: nothing. Lower decode_bs_min"):
        Ends(LIMITS, decode_bs_min=9)


@pytest.mark.parametrize(
    ("settings", "phase"),
    [
        ({"prompt_bs_min": 2, "prompt_query_min": 100}, "prefill"),
        ({"decode_bs_min": 4, "decode_block_max": 3}, "decode"),
    ],
)
def test_settings_that_leave_a_phase_empty_are_refused(settings, phase):
    with pytest.raises(
        ConfigValueError, match=rf"\[bucketing.ends\] leaves no {phase} bucket.*Lower the smallest sizes"
    ):
        Ends(LIMITS, **settings)


def test_spans_are_logged_as_the_vendor_does(caplog):
    with caplog.at_level(logging.DEBUG):
        Ends(LIMITS, decode_bs_min=2)
    spans = Ends(LIMITS).derived(LIMITS)
    listed = {name: list(attrs.astuple(span)) for name, span in spans.items()}
    said = f"bs:{listed['prompt_bs']}, query:{listed['prompt_query']}, blocks:{listed['prompt_ctx']}"
    assert f"Prompt bucket config (min, step, max_warmup) {said}" in caplog.messages
    assert "VLLM_DECODE_BS_BUCKET_MIN=2 (default:1)" in caplog.messages
    assert (
        f"VLLM_PROMPT_QUERY_BUCKET_MAX={spans['prompt_query'].maximum} (default:{spans['prompt_query'].maximum})"
        in (caplog.messages)
    )
