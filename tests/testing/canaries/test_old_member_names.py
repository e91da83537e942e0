"""Strategies that use names from before a rename work, and warn of it."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest

from trencadis.interfaces import Component, Distributions, LogitsProcessor
from trencadis.records import DraftDistributions, RowStart, SamplingParams
from trencadis_plugins.sampling.top_k import TopK

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated since :DeprecationWarning")


@pytest.fixture
def canary():
    path = Path(__file__).with_name("old_member_names.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True, action="always") as caught:
        spec.loader.exec_module(module)
    module.said = list(dict.fromkeys(str(one.message) for one in caught))  # an import asks twice
    return module


def start(row: int = 0, **params) -> RowStart:
    return RowStart(
        row=row, token_ids=np.array([1], np.int32), num_prompt_tokens=1, params=SamplingParams(**params), seed=0
    )


def test_class_member_and_new_name_are_named_once_at_the_definition(canary):
    renamed = [said.partition(";")[0] for said in canary.said]
    assert renamed == [
        "trencadis.interfaces.Laws is deprecated since 0.1: use Distributions",
        "trencadis.records.DraftLaws is deprecated since 0.1: use DraftDistributions",
        "CanaryOldProcessor.asks is deprecated since 0.1: use applies_to",
        "CanaryOldProcessor.may_begin is deprecated since 0.1: use can_start_with",
        "CanaryOldProcessor.takes_branches is deprecated since 0.1: use supports_branches",
        "CanaryOldSampler.takes_drafts is deprecated since 0.1: use supports_drafts",
        "CanaryOldSampler.goes_on is deprecated since 0.1: use is_portable",
        "CanaryOldSampler.may_begin is deprecated since 0.1: use can_start_with",
        "CanaryOldRule.needs_laws is deprecated since 0.1: use needs_distributions",
    ]
    assert canary.LAWS_TYPE is Distributions


def test_a_processor_with_old_names_answers_to_the_new_ones(canary):
    processor = canary.CanaryOldProcessor()
    assert processor.supports_branches
    named = {"logits_processors": {"old": {}}}
    assert [processor.applies_to(start(row, **named)) for row in (0, 1)] == [True, False]
    assert not processor.applies_to(start())
    processor.allocate(num_rows=1, vocab_size=8, device=None)
    processor.start_row(start(**named))
    assert [processor.can_start_with(start(), token) for token in (2, 3)] == [True, False]
    assert processor.started == [True]


def test_a_sampler_with_old_names_answers_to_the_new_ones(canary):
    sampler = canary.CanaryOldSampler()
    assert sampler.supports_drafts(SamplingParams(), branching=False)
    assert not sampler.supports_drafts(SamplingParams(), branching=True)
    assert not sampler.supports_drafts(SamplingParams(top_k=2), branching=False)
    assert [sampler.is_portable(SamplingParams(seed=seed)) for seed in (1, 2)] == [True, False]
    assert [sampler.can_start_with(start(), token) for token in (4, 5)] == [True, False]


def test_a_rule_with_old_names_answers_to_the_new_ones(canary):
    with pytest.warns(
        DeprecationWarning, match="CanaryOldRule.takes_trees is deprecated since 0.1: use supports_trees"
    ):
        rule = canary.CanaryOldRule()
    assert (rule.needs_distributions, rule.supports_trees) == (True, True)


def test_drafts_take_and_show_distributions_by_the_old_name(canary):
    with warnings.catch_warnings(record=True, action="always") as caught:
        drafts = canary.drawn_drafts()
    assert isinstance(drafts.distributions, DraftDistributions)
    assert {str(one.message).partition(" ")[0] for one in caught} == {"Drafts(laws=)", "Drafts.laws"}
    with pytest.warns(DeprecationWarning, match="laws"):
        assert attrs.evolve(drafts, laws=None).distributions is None


def test_old_calls_of_a_strategy_with_new_names_reach_it():
    assert [TopK().asks(start(top_k=k)) for k in (0, 2)] == [TopK().applies_to(start(top_k=k)) for k in (0, 2)]


def test_a_class_with_both_names_is_left_as_it_is():
    class Both(LogitsProcessor):
        supports_branches, takes_branches = True, False

        def allocate(self, *, num_rows, vocab_size, device): ...
        def start_row(self, start): ...
        def apply(self, logits, context): ...

    assert (Both().supports_branches, Both().takes_branches) == (True, False)


def test_a_subclass_of_a_strategy_with_new_names_extends_it_by_old_ones():

    class Extended(TopK):
        def asks(self, start):
            return start.row == 7 or super().asks(start)

    one = Extended()
    assert one.applies_to(start(7))
    assert one.applies_to(start(top_k=2)) == TopK().applies_to(start(top_k=2))


def test_the_old_name_of_a_capability_is_the_new_one():
    def offered(name: str) -> Component:
        return Component(name="one", factory=print, summary="", interface_version=1, provides={name})

    assert offered("sampling.laws").provides == offered("sampling.distributions").provides
