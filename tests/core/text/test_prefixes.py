from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from trencadis.config import Config
from trencadis.config.schema import CacheConfig
from trencadis.errors import ConfigValueError
from trencadis.text import Tokenizer, read_prefixes


def config_with(*entries: str) -> Config:
    return attrs.evolve(Config(), cache=CacheConfig(shared_prefixes=entries))


def test_without_prefixes_no_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis.text.tokenizer.load_configured_tokenizer", lambda *_, **__: pytest.fail("loaded"))
    assert read_prefixes(config_with()) == ()


def test_texts_and_files_become_the_tokens_that_prompts_begin_with(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_bytes(b"You answer in verse.\r\nBriefly.")
    given = read_prefixes(config_with("Once upon a time", f"@{file}"))
    assert given == (
        tuple(tokenizer.encode("Once upon a time")),
        tuple(tokenizer.encode("You answer in verse.\r\nBriefly.")),
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("@/no/such/file", r"'@/no/such/file' cannot be read.*after @"),
        ("", r"'' is empty"),
        ("@", r"'@' cannot be read"),
    ],
)
def test_an_entry_that_says_nothing_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigValueError, match=f"(?s){message}"):
        read_prefixes(config_with(entry))
