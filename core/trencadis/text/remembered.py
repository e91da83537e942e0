"""Tokenizers that transformers has loaded once are loaded again without it, if both were proven to be the same.

    files of a directory | description of a .gguf file, versions ─▶ key ─┬▶ in the package or the user's cache ─▶ PlainTokenizer
                                                                         └▶ transformers loads it ─▶ proven equal ─▶ kept

What is kept is plain JSON; a tokenizer written in Python, or with code of its own, is loaded by transformers each time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trencadis.caches import cache_directory, keep, kept
from trencadis.faults import reraise_interrupt
from trencadis.gguf_file import read_gguf
from trencadis.text.plain_tokenizer import PlainTokenizer, TokenizerFacts, facts_of

__all__ = ["SHIPPED", "RememberedTokenizer"]

SHIPPED: Final = Path(__file__).parents[1] / "demo" / "tokenizers"
"""What is kept of the models in this package, each in a file with the name of its key, whatever the versions."""

_FORM: Final = "1"
"""Format of what is kept; a change of it or of what is proven makes another one."""
_MAX_BYTES: Final = 256 * 2**20
"""All tokenizers that are kept; the largest that are published have some 20 MB."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx", ".npz"})
"""Endings of files that no tokenizer is read from."""
_TEMPLATES: Final = "additional_chat_templates"
"""Source: ``transformers.utils.hub.CHAT_TEMPLATE_DIR``."""
_FILE: Final = "tokenizer.json"

_TEXTS: Final = (
    *("", " ", "a", " a", "A b  c\td\r\n\ne ", "don't do not , . ! ? it 's we 're a - b", "1234567890 3.14 1e-5"),
    *("Schöne Grüße, naïve façade ﬁ Å e\u0301 ①", "你好，世界。 こんにちは 안녕하세요", "Привет مرحبا שלום नमस्ते"),
    *(
        "😀😁👩‍👩‍👧 🇪🇸",
        "a\x00b\x1fc\N{REPLACEMENT CHARACTER}d▁e<0x41>f",
        '{"a": [1, -2.5e3, null]}\\n<tag></tag> $x_{i}^2$',
    ),
)


class RememberedTokenizer:
    """The tokenizer of one place, as far as it is remembered.

    Args:
        place: A directory or a ``.gguf`` file, there.
        trust_remote_code: Code that comes with the model may run.
    """

    def __init__(self, place: Path, *, trust_remote_code: bool) -> None:
        self._file = b""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts(place):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        self.key = f"{'trusted' if trust_remote_code else 'plain'}-{digest.hexdigest()}"

    def _parts(self, place: Path) -> Iterator[bytes | memoryview]:
        """Yield names and contents of all that transformers could read; notes the directory's ``tokenizer.json``."""
        if not place.is_dir():
            file = read_gguf(place)
            end = min((tensor.offset for tensor in file.tensors.values()), default=len(file.mapped))
            yield memoryview(file.mapped)[:end]
            return
        templates = (place / _TEMPLATES).glob("*")
        for path in sorted(itertools.chain(place.iterdir(), templates)):
            if path.suffix not in _WEIGHTS and path.is_file():
                content = path.read_bytes()
                if path.name == _FILE:
                    self._file = content
                yield path.name.encode(errors="surrogateescape")
                yield content

    def recall(self) -> PlainTokenizer | None:
        """Return the tokenizer; None: it is not remembered, or what was kept is damaged."""
        shipped = SHIPPED / self.key
        content = shipped.read_bytes() if shipped.is_file() else kept(self._place)
        return None if content is None else self._read(content)

    @functools.cached_property
    def _place(self) -> Path:
        versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
        return cache_directory("tokenizers") / "-".join((self.key, _FORM, *versions))

    def _read(self, content: bytes) -> PlainTokenizer | None:
        from tokenizers import Tokenizer

        facts, _, rust = content.partition(b"\n")
        try:
            return PlainTokenizer(Tokenizer.from_buffer(rust or self._file), TokenizerFacts.from_json(facts))
        except BaseException as error:  # code in Rust that panics raises a class beside Exception
            reraise_interrupt(error)
            return None

    def remember(self, hf: Any) -> None:
        """Keep a tokenizer of transformers, if the one that would be recalled is proven to be the same."""
        content = self.proven(hf)
        if content is not None:
            keep(self._place, content, max_bytes=_MAX_BYTES)

    def proven(self, hf: Any) -> bytes | None:
        """Return what there is to keep; None: it was not proven to be the same.

        Args:
            hf: Tokenizer that transformers loaded from the place.
        """
        facts = facts_of(hf)
        if facts is None:
            return None
        try:
            hf("")  # from the first text on it neither cuts nor fills
            rust = hf.backend_tokenizer.to_str()
            for own in (b"", rust.encode()):  # most directories have it as it is: no second copy
                content = facts.to_json().encode() + b"\n" + own
                plain = self._read(content)
                if plain is not None and plain.backend_tokenizer.to_str() == rust:
                    return content if _are_same(hf, plain) else None
        except BaseException as error:  # it has parts that cannot be written down, or panics at a text
            reraise_interrupt(error)
        return None


def _are_same(hf: Any, plain: PlainTokenizer) -> bool:
    """Return whether two tokenizers give the same ids and tokens, for texts of many scripts and with all control signs."""
    if hf.get_vocab() != plain.get_vocab() or hf.get_added_vocab() != plain.get_added_vocab() or len(hf) != len(plain):
        return False
    signs = [*plain.get_added_vocab()]
    texts = (*_TEXTS, "".join(signs), " a ".join(signs), *(f"x {sign}y" for sign in plain.special_tokens_map.values()))
    ways = [
        {"add_special_tokens": adds, "split_special_tokens": splits}
        for adds in (True, False)
        for splits in (True, False)
    ]
    return all(
        hf(text, verbose=False, **way)["input_ids"] == plain(text, **way)["input_ids"] for text in texts for way in ways
    ) and all(hf.encode(text) == plain.encode(text) for text in texts)
