from __future__ import annotations

import pytest

from trencadis.errors import ConfigValueError
from trencadis_tools.new_plugin import PluginNames


def refusal(noun: str, name: str) -> str:
    with pytest.raises(ConfigValueError) as caught:
        PluginNames.read(noun, name)
    return str(caught.value)


def test_names_follow_from_noun_and_name():
    names = PluginNames.read("scheduling", "lottery")
    assert names.project == "trencadis-scheduling-lottery"
    assert names.package == "trencadis_scheduling_lottery"
    assert names.entry_point == "scheduling-lottery"
    assert names.class_name == "Lottery"


@pytest.mark.parametrize(
    ("noun", "name"),
    [("kv_connector", "fair_lottery2"), ("kv-connector", "fair-lottery2"), ("KV_Connector", "fair-lottery2")],
)
def test_dashes_and_underscores_are_the_same(noun, name):
    names = PluginNames.read(noun, name)
    assert (names.noun, names.name) == ("kv_connector", "fair_lottery2")
    assert names.project == "trencadis-kv-connector-fair-lottery2"
    assert names.class_name == "FairLottery2"


def test_unknown_noun_is_refused_with_the_choices_and_a_suggestion():
    assert "Choose one of: bucketing, scheduling," in refusal("schedulin", "lottery")
    assert 'Did you mean "scheduling"?' in refusal("schedulin", "lottery")


@pytest.mark.parametrize(
    "name", ["", "Lottery", "2fast", "-x", "x-", "x__y", "a b", "a/b", "..", "lotterý", "x" * 25, "../../etc"]
)
def test_name_that_is_no_plain_word_is_refused(name):
    assert "Use lower-case letters" in refusal("scheduling", name)


@pytest.mark.parametrize(
    "name", ["auto", "none", "options", "config", "lambda", "class", "bucket", "step-stats", "names"]
)
def test_name_with_another_meaning_is_refused(name):
    assert "another meaning" in refusal("scheduling", name)


def test_message_of_a_refused_name_allows_what_is_accepted():
    assert PluginNames.read("scheduling", "fair_lottery").name == PluginNames.read("scheduling", "fair-lottery").name
    assert "single dashes or underscores" in refusal("scheduling", "fair__lottery")
