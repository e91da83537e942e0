"""Keys that were renamed are accepted under their former name, with a warning, from every source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.config.load import load_config
from trencadis.errors import ConfigError
from trencadis.interfaces import setting


@attrs.frozen(kw_only=True)
class ShelfConfig:
    """A table with a renamed key."""

    max_items: int = setting(5, "Most items.", formerly="max_things", since="0.1")


PATH = "kv_connector.shelf.max_items"
FORMER = "kv_connector.shelf.max_things"


def loaded(tmp_path: Path, text: str = "", **sources: Any) -> Any:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return load_config(
        components={"kv_connector": {"shelf": ShelfConfig}}, file=file, **{"environ": {}, "flags": (), **sources}
    )


@pytest.mark.parametrize(
    ("sources", "place"),
    [
        ({"text": "[kv_connector.shelf]\nmax_things = 7\n"}, "serve.toml"),
        ({"environ": {"TRENCADIS_KV_CONNECTOR__SHELF__MAX_THINGS": "7"}}, "environment"),
        ({"flags": ["--kv_connector.shelf.max-things", "7"]}, "flag --kv_connector.shelf.max-things"),
        ({"overrides": {FORMER: 7}}, "argument"),
    ],
)
def test_a_former_name_sets_the_value_and_the_present_one_is_named_once(
    sources: dict[str, Any], place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = loaded(tmp_path, **sources)
    assert resolved.values[PATH] == 7
    assert resolved.sources[PATH].startswith(place)
    (warning,) = caplog.messages
    assert re.match(rf"{FORMER} \({place}.*\) is now called {PATH};", warning)


@pytest.mark.parametrize(
    "sources",
    [
        {"text": "[kv_connector.shelf]\nmax_things = 7\nmax_items = 7\n"},
        {
            "environ": {
                "TRENCADIS_KV_CONNECTOR__SHELF__MAX_THINGS": "7",
                "TRENCADIS_KV_CONNECTOR__SHELF__MAX_ITEMS": "8",
            }
        },
        {"flags": ["--kv_connector.shelf.max-things=7", "--kv_connector.shelf.max-items=8"]},
    ],
)
def test_both_names_in_one_source_are_refused(sources: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{FORMER} .*is the former name of {PATH}, which is given too"):
        loaded(tmp_path, **sources)


def test_a_stronger_source_wins_whichever_name_it_uses(tmp_path: Path) -> None:
    text = "[kv_connector.shelf]\nmax_items = 6\n"
    assert loaded(tmp_path, text, flags=["--kv_connector.shelf.max-things=7"]).values[PATH] == 7
    text = text.replace("max_items", "max_things")
    assert loaded(tmp_path, text, flags=["--kv_connector.shelf.max-items=8"]).values[PATH] == 8


def test_former_names_are_not_listed(tmp_path: Path) -> None:
    settings = loaded(tmp_path).settings
    assert FORMER not in {one.path for one in settings}
    assert settings.keys_of("kv_connector.shelf") == ["max_items"]
