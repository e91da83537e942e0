from __future__ import annotations

import pytest

from support.nouns import ALL_NOUNS
from trencadis.config import settings_of
from trencadis_tools.new_plugin.nouns import STAGE, STARTS


def test_every_noun_has_a_start_and_so_have_stages():
    assert set(STARTS) == {*ALL_NOUNS, STAGE}


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_contract_is_what_the_registry_expects_of_a_factory(noun):
    assert STARTS[noun].contract == ALL_NOUNS[noun].contract.__name__


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_option_does_not_hide_a_key_of_the_nouns_own_table(noun):
    assert STARTS[noun].option.name not in settings_of().keys_of(noun)
