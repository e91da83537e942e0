from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.nouns import ALL_NOUNS
from trencadis.errors import ConfigError, TrencadisError
from trencadis.records import ModelSource
from trencadis_testing.conform import Conformance, parse, suite_class

MINE = """
from trencadis.interfaces import BucketingStrategy, ConnectorPair, EvictionPolicy, SchedulingPolicy
from trencadis.records import Bucket
from trencadis_testing.doubles import LoopConnector

class Oldest(EvictionPolicy):
    def __init__(self, loses: bool = False): self.blocks, self.loses = {}, loses
    def on_free(self, blocks, *, depths, now_s): self.blocks.update(dict.fromkeys(blocks))
    def on_hit(self, blocks, *, now_s): self.forget(blocks)
    def victims(self, num_blocks): return [self.blocks.popitem()[0] for _ in range(num_blocks)]
    def forget(self, blocks):
        for block in blocks: self.loses or self.blocks.pop(block, None)

class Exact(BucketingStrategy):
    def __init__(self, limits): pass
    def buckets(self, limits): return ()
    def bucket_for(self, shape): return Bucket.of(shape)

class Picky(SchedulingPolicy):
    def admit(self, request, *, num_waiting, num_waiting_tokens): return "no" if num_waiting > 2 else ""

def shelf() -> ConnectorPair: return LoopConnector().pair()

class Stuck(Oldest):
    def close(self): raise OSError("no key")
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a module, and no test file."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def conform(
    here: Path, *values: str, more: tuple[str, ...] = (), has_all_plugins: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``here``, with the kit's plugin or with every installed one: importing the others takes longer than the rest."""
    options = [word for value in values for word in ("--trencadis-conform", value)]
    script = Path(sys.executable).with_name(
        "pytest"
    )  # unlike python -m pytest it does not look into the current folder
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not has_all_plugins:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options += ["-p", "trencadis_testing.pytest_plugin"]
    return subprocess.run(
        [str(script), "-p", "no:cacheprovider", *options, *more],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
def test_suites_run_against_classes_without_any_test_file(here):
    values = (
        "eviction=mine:Oldest",
        "bucketing=mine:Exact",
        "kv_connector=mine:shelf",
        "bucketing=exponential,limit=4",
    )
    run = conform(here, *values, more=("-v", "-rA"), has_all_plugins=True)
    assert run.returncode == 0, run.stdout[-3000:]
    for node in (
        "PASSED eviction=mine:Oldest::EvictionConformance::test_forgotten_blocks_are_no_candidates[2]",
        "PASSED eviction=mine:Oldest::EvictionConformance::test_same_victims_in_a_process_that_hashes_differently",
        "PASSED bucketing=mine:Exact::BucketingConformance::test_bucket_covers_every_legal_shape[tiny]",
        "PASSED kv_connector=mine:shelf::KVConnectorConformance::test_message_is_taken_once",
        "PASSED bucketing=exponential,limit=4::BucketingConformance::test_bucket_covers_every_legal_shape[tiny]",
    ):
        assert node in run.stdout


@pytest.mark.slow
def test_failure_names_the_class_and_the_test_and_the_run_fails(here):
    run = conform(here, "eviction=mine:Oldest,loses=true", more=("-k", "forgotten"))
    assert run.returncode == 1
    assert "FAILED eviction=mine:Oldest,loses=true::EvictionConformance::test_forgotten_blocks" in run.stdout
    assert "a forgotten block was evicted" in run.stdout
    assert "deselected" in run.stdout


@pytest.mark.slow
def test_tests_of_a_path_are_collected_as_well(here):
    (here / "test_own.py").write_text("def test_own(): pass\n")
    alone = conform(here, "eviction=mine:Oldest", more=("-k", "own or empty", "-rA"))
    both = conform(here, "eviction=mine:Oldest", more=("-k", "own or empty", "-rA", "test_own.py"))
    assert "test_own" not in alone.stdout
    assert "PASSED test_own.py::test_own" in both.stdout
    assert "PASSED eviction=mine:Oldest::EvictionConformance::test_empty_calls_are_harmless" in both.stdout


def test_bad_value_is_a_usage_error_in_words(here):
    run = conform(here, "eviction=mine:Newest")
    assert run.returncode == 4, run.stdout
    assert "has no attribute 'Newest'" in run.stderr
    assert "Traceback" not in run.stderr + run.stdout


# ------------------------------------------------------------------------------------------------- in this process


def test_value_is_read_into_noun_target_options_and_suite_attributes():
    text = "scheduling=my.policies:Picky,limit=3,suite.may_refuse=true"
    assert parse(text) == Conformance(
        text=text,
        noun="scheduling",
        target="my.policies:Picky",
        options={"limit": "3"},
        attributes={"may_refuse": "true"},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduling", "no noun and target"),
        ("=fcfs", "no noun and target"),
        ("scheduling=", "no noun and target"),
        ("scheduler=fcfs", 'Did you mean "scheduling"?'),
        ("scheduling=fcfs,limit", "'limit' is no option"),
    ],
)
def test_value_of_another_form_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_every_noun_has_a_suite(noun):
    import importlib

    from trencadis_testing.conform import _suite_of

    module, name = _suite_of(noun)
    suite = getattr(importlib.import_module(module), name)
    assert any(test.startswith("test_") for test in dir(suite))


def test_attributes_of_a_suite_are_read_as_the_type_they_have():
    suite = suite_class(parse("scheduling=fcfs,suite.may_refuse=true,suite.max_steps=12"))
    assert (suite.may_refuse, suite.max_steps) == (True, 12)
    assert suite_class(parse("sampling=greedy,suite.honours=logprobs+masks")).honours == {"logprobs", "masks"}
    assert suite_class(parse("backend=torch,suite.source=/tmp/model")).source == ModelSource(path="/tmp/model")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("eviction=nowhere:Oldest", "No module named 'nowhere'"),
        ("eviction=mine_of_this_test:Picky", "is no subclass of EvictionPolicy"),
        ("eviction=mine_of_this_test:Oldest,limit=3", "It takes: loses"),
        ("eviction=mine_of_this_test:Stuck", "close() raised OSError: no key."),
        ("eviction=lur", 'Did you mean "lru"?'),
    ],
)
def test_target_that_cannot_be_used_is_refused(here, monkeypatch, value, message):
    (here / "mine.py").rename(here / "mine_of_this_test.py")
    monkeypatch.syspath_prepend(here)
    with pytest.raises(TrencadisError) as caught:
        suite_class(parse(value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduling=fcfs,suite.may=1", "It has: declares, counts_tokens, may_refuse, max_steps"),
        ("scheduling=fcfs,suite.max_steps=many", "must be a whole number"),
        ("scheduling=fcfs,suite.may_refuse=perhaps", "must be true or false"),
        ("scheduling=fcfs,limt=3", "no such flag"),
    ],
)
def test_attribute_or_option_that_does_not_exist_is_refused(text, message):
    with pytest.raises(TrencadisError) as caught:
        suite_class(parse(text))
    assert message in str(caught.value)


def test_a_component_gets_the_inner_one_that_its_options_name():
    policy = suite_class(parse("scheduling=fair_share,inner=priority"))().make()
    assert type(policy.inner).__name__ == "Priority"
