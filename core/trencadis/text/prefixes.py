"""Prefixes that the operator lists as shared: from the configuration to token ids."""

from __future__ import annotations

from trencadis.config import Config
from trencadis.errors import ConfigValueError
from trencadis.files import read_text
from trencadis.text.tokenizer import load_configured_tokenizer

__all__ = ["read_prefixes"]

_FILE_MARK = "@"


def read_prefixes(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of ``[cache] shared_prefixes``; loads the tokenizer only if there are any.

    The last tokens of a text may be others where it goes on; that costs one block at most, since whole blocks are compared.

    Raises:
        ConfigValueError: A file cannot be read, or an entry is empty.
        ModelLoadError: The tokenizer cannot be loaded.
    """
    texts = [_text(entry) for entry in config.cache.shared_prefixes]
    if not texts:
        return ()
    tokenizer = load_configured_tokenizer(config)
    return tuple(tuple(tokenizer.encode(text)) for text in texts)


def _text(entry: str) -> str:
    text = entry
    if entry.startswith(_FILE_MARK):
        try:
            text = read_text(entry.removeprefix(_FILE_MARK))
        except (OSError, ValueError) as error:
            raise ConfigValueError(
                f"[cache] shared_prefixes: {entry!r} cannot be read: {error}.",
                hint="Correct the path after @, or write the text itself.",
            ) from error
    if not text:
        raise ConfigValueError(
            f"[cache] shared_prefixes: {entry!r} is empty, so it says nothing about what is shared.", hint="Remove it."
        )
    return text
