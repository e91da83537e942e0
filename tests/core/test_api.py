from __future__ import annotations

import pytest

from trencadis import api


@pytest.mark.parametrize("name", api.__all__)
def test_each_name_of_the_facade_is_found_in_the_module_it_comes_from(name: str) -> None:
    found = getattr(api, name)
    assert found is getattr(api, name)
    home = getattr(found, "__module__", None)
    assert home is None or home.startswith("trencadis."), home


def test_the_facade_offers_what_it_finds_and_nothing_else() -> None:
    assert sorted(api._HOMES) == sorted(api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'engine_of'"):
        api.engine_of  # noqa: B018
