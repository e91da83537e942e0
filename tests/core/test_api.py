from __future__ import annotations

import pytest

from trencadis import api


def test_each_name_of_the_facade_is_found_in_the_module_it_comes_from() -> None:
    for name in api.__all__:
        found = getattr(api, name)
        assert found is getattr(api, name)
        home = getattr(found, "__module__", None)
        assert home in (None, "types") or home.startswith("trencadis."), name


def test_the_facade_offers_what_it_finds_and_nothing_else() -> None:
    assert sorted(api._HOMES) == sorted(api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'engine_of'"):
        api.engine_of  # noqa: B018
