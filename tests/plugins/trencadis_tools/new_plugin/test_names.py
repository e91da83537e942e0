from __future__ import annotations

import pytest

from trencadis.errors import ConfigValueError
from trencadis_tools.new_plugin import PluginNames


def refusal(noun: str, name: str) -> str:
    with pytest.raises(ConfigValueError) as caught:
        PluginNames.read(noun, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("noun", "name", "project", "class_name"),
    [
        ("scheduling", "lottery", "scheduling-lottery", "Lottery"),
        ("kv_connector", "fair_lottery2", "kv-connector-fair-lottery2", "FairLottery2"),
        ("kv-connector", "fair-lottery2", "kv-connector-fair-lottery2", "FairLottery2"),
        ("KV_Connector", "fair-lottery2", "kv-connector-fair-lottery2", "FairLottery2"),
    ],
)
@pytest.mark.representatives(4)
def test_names_follow_from_noun_and_name_with_dashes_or_underscores(noun, name, project, class_name):
    names = PluginNames.read(noun, name)
    assert names.project == f"trencadis-{project}"
    assert names.package == f"trencadis_{project}".replace("-", "_")
    assert names.entry_point == project
    assert names.class_name == class_name


def test_unknown_noun_is_refused_with_the_choices_and_a_suggestion():
    assert "Choose one of: bucketing, scheduling," in refusal("schedulin", "lottery")
    assert 'Did you mean "scheduling"?' in refusal("schedulin", "lottery")


PLAIN = ("", "Lottery", "2fast", "-x", "x-", "x__y", "a b", "a/b", "..", "lotterý", "x" * 25, "../../etc")
TAKEN = ("auto", "none", "options", "config", "lambda", "class", "bucket", "step-stats", "names")


def test_a_name_that_is_no_plain_word_or_has_another_meaning_is_refused():
    for names, words in ((PLAIN, "Use lower-case letters"), (TAKEN, "another meaning")):
        assert [name for name in names if words not in refusal("scheduling", name)] == []
    assert "single dashes or underscores" in refusal("scheduling", "fair__lottery")
