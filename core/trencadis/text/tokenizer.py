"""The model's tokenizer: a thin face over transformers, imported when a tokenizer is loaded that is not remembered."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from trencadis.config import Config
from trencadis.errors import ConfigValueError, InvalidRequestError, ModelLoadError, TrencadisError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.files import read_text
from trencadis.startup import release_freed
from trencadis.text.byte_fallback import ByteFallback
from trencadis.text.gguf_tokenizer import load_gguf_tokenizer
from trencadis.text.model_path import resolve_model_path
from trencadis.text.plain_tokenizer import PlainTokenizer
from trencadis.text.remembered import RememberedTokenizer
from trencadis.text.token_bounds import max_bytes_per_token
from trencadis.text.token_bytes import ByteTable, TokenBytes, is_byte_level

__all__ = [
    "NO_TOKENIZER",
    "NoTokenizer",
    "Tokenizer",
    "load_configured_tokenizer",
    "load_tokenizer",
    "needs_tokenizer",
    "read_prefixes",
]

NO_TOKENIZER = "none"
"""The value of ``model.tokenizer`` that serves token ids alone."""

_BEGINNINGS = ("\n", "a", ".")
"""Texts to encode another after; a token may join one of them to it, which no token does with all."""
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names under which ``tokenizer.json`` alone says everything; both are the same class of transformers."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Patterns of which a directory with a tokenizer has at least one file."""


def load_configured_tokenizer(config: Config) -> Tokenizer:
    """Load the tokenizer that a configuration names.

    Raises:
        ModelLoadError: See :func:`load_tokenizer`.
    """
    model = config.model
    found = load_tokenizer(
        model.tokenizer or model.path,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        remembers=config.cache.models != "off",
    )
    release_freed()
    return found


def load_tokenizer(
    path: str, *, revision: str = "", trust_remote_code: bool = False, remembers: bool = False
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: A directory, a ``.gguf`` file, a hub id, or a built-in name as ``"demo"``. Nothing is downloaded for the first two.
            ``"none"``: no tokenizer; see :class:`NoTokenizer`.
        revision: Commit or tag of a hub id; empty for the newest.
        trust_remote_code: Run tokenizer code that comes with the model.
        remembers: Use what transformers has made of the same files before, without importing it; see :class:`RememberedTokenizer`.

    Raises:
        ModelLoadError: There is no tokenizer, or it cannot be read.
    """
    if path == NO_TOKENIZER:
        return NoTokenizer()
    place = Path(resolve_model_path(path))
    if place.suffix == ".gguf" and not place.is_file():
        raise ModelLoadError(
            f"the model file {str(place)!r} does not exist.", hint="Correct model.path or model.tokenizer."
        )
    if place.is_dir() and not any(file for pattern in _TOKENIZER_FILES for file in place.glob(pattern)):
        raise ModelLoadError(
            f"the directory {str(place)!r} holds no tokenizer: tokenizer.json is missing.",
            hint="Name a directory or hub id that has one in model.path or model.tokenizer; or set model.tokenizer to "
            f'"{NO_TOKENIZER}" and give token ids instead of texts.',
        )
    try:
        load = functools.partial(_load, place, path, revision=revision, trust_remote_code=trust_remote_code)
        if not (remembers and place.exists()):
            return Tokenizer(load())
        remembered = RememberedTokenizer(place, trust_remote_code=trust_remote_code)
        known = remembered.recall()
        if known is not None:
            return Tokenizer(known)
        loaded = load()
        remembered.remember(loaded)
        return Tokenizer(loaded)
    except ModelLoadError:
        raise
    except BaseException as error:  # code in Rust that panics raises a class beside Exception
        reraise_interrupt(error)
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"the tokenizer of {path!r} cannot be loaded: {first_line}",
            hint="Give a directory with tokenizer.json, a .gguf file or a hub id in model.path or model.tokenizer.",
        ) from error


_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])


def _in_words(method: _MethodT) -> _MethodT:
    """Make what foreign code raises the error of a request: the one door to the tokenizer, whose Rust may panic."""

    @functools.wraps(method)
    def guarded(self: Tokenizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TrencadisError:
            raise
        except BaseException as error:  # a panic is no Exception
            reraise_interrupt(error)
            raise InvalidRequestError(
                f"the tokenizer failed: {as_words(error).rstrip('.')}.",
                hint="Give another text, or token ids; the fault is the tokenizer's.",
            ) from error

    return cast("_MethodT", guarded)


class Tokenizer:
    """Text to token ids and back. May be used from several threads.

    Whatever the libraries behind it raise on a text or on token ids, a panic of Rust included, is an ``InvalidRequestError``.

    Args:
        hf: A tokenizer of transformers, or what answers as one.

    Attributes:
        is_remembered: It was loaded without transformers.
        vocab_size: Tokens it knows, added ones included; the model's own vocabulary may be padded beyond it.
        special_token_ids: Tokens that are control signs, not text.
        byte_fallback: Tokens that stand for one byte; None without such.
        next_token: A token after which the end of a text shows whether it stays: one written in Python may change it, as that of CTRL,
            whose ``o@@`` is ``o`` before another token. Empty for one in Rust.
        eos_token_id: The tokenizer's own end-of-sequence token; None without one.
        bos_token_id: The tokenizer's own beginning-of-sequence token; None without one.
        has_text: Whether token ids have texts.
    """

    has_text = True

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self.is_remembered = isinstance(hf, PlainTokenizer)
        self._fast = getattr(hf, "backend_tokenizer", None)
        self.vocab_size = len(hf)
        self.special_token_ids: frozenset[int] = frozenset(hf.all_special_ids)
        if self._fast is not None:
            added = self._fast.get_added_tokens_decoder().items()
            self.special_token_ids |= {token_id for token_id, token in added if token.special}
        self.byte_fallback = self._find_byte_fallback()
        self.next_token: list[int] = (
            [] if self._fast is not None else self._hf.encode("a", add_special_tokens=False)[:1]
        )
        self.eos_token_id: int | None = hf.eos_token_id
        self.bos_token_id: int | None = hf.bos_token_id

    @_in_words
    def encode(self, text: str, *, add_special_tokens: bool = True, may_be_empty: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prompt. Pure.

        Args:
            text: The prompt.
            add_special_tokens: With those that this tokenizer adds by default, such as a beginning-of-sequence token.
            may_be_empty: No token is an answer, too.

        Raises:
            InvalidRequestError: ``text`` has no token.
        """
        ids = tuple(self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        if not ids and not may_be_empty:
            raise InvalidRequestError(f"the prompt {text!r} has no tokens.", hint="Give at least one character.")
        return ids

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The special tokens with which a prompt begins: those that this tokenizer adds, or else its beginning-of-sequence token."""
        ids = self.encode("a")
        plain = self.encode("a", add_special_tokens=False)
        starts = [start for start in range(len(ids)) if ids[start : start + len(plain)] == plain]
        if starts and starts[0]:
            return ids[: starts[0]]
        return () if self.bos_token_id is None else (self.bos_token_id,)

    @_in_words
    def encode_literally(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it stands within another, control signs spelt out as text; none for no text. Pure.

        Nothing is put in front of it, as many tokenizers put a space before a text. Their bytes are those of the text, unless the
        tokenizer normalises it or lacks tokens for it.
        """
        wanted = text.encode()
        for beginning in self._beginnings:
            own = self._last(self._spelt(beginning + text), wanted)
            if own is not None:
                return own
        return self._spelt(text)

    def _spelt(self, text: str) -> tuple[int, ...]:
        return tuple(self._hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])

    def _last(self, ids: Sequence[int], wanted: bytes) -> tuple[int, ...] | None:
        """Return the last tokens, whose bytes are the wanted ones; None: no tokens end there."""
        begin, size = len(ids), 0
        while begin and size < len(wanted):
            begin -= 1
            size += len(self.token_bytes(ids[begin]))
        last = tuple(ids[begin:])
        return last if b"".join(map(self.token_bytes, last)) == wanted else None

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        """Texts after which a text is encoded as it is: without any if nothing is put before a text, which is the most usual."""
        return ("", *_BEGINNINGS) if self._last(self._spelt("a"), b"a") is not None else (*_BEGINNINGS, "")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, nothing tidied up; unknown ids have no text. Pure.

        With byte fallback, bytes that are no character are one U+FFFD for each maximal subpart, and destroy nothing beside them.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        ids = [token_id for token_id in token_ids if token_id not in hidden and self.knows(token_id)]
        return self.decode_certain(ids if self.byte_fallback is None else self.byte_fallback.rewritten(ids))

    @_in_words
    def decode_certain(self, token_ids: list[int]) -> str:
        """Return the text of ids that the tokenizer knows, whose byte tokens are valid UTF-8, as the library has it. Pure."""
        return self._decode(token_ids)

    def _find_byte_fallback(self) -> ByteFallback | None:
        if self.byte_table is not None:
            return None
        found = ByteFallback(self._hf.get_vocab(), self._decode)
        return found if found.byte_of else None

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text as the tokenizer itself has it."""
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=False))
        return str(self._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def knows(self, token_id: int) -> bool:
        """Return whether a token id has a token: a model may have more logits than its tokenizer has tokens. Pure."""
        if self._fast is None:
            return 0 <= token_id < self.vocab_size
        return self._fast.id_to_token(token_id) is not None

    @_in_words
    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which may be part of a character; empty for an unknown id. Pure.

        The bytes of a text's tokens, joined, are its UTF-8 bytes, unless the tokenizer normalises or adds a space in front.
        """
        return self._token_bytes(token_id)

    def all_token_bytes(self) -> tuple[bytes, ...]:
        """Return :meth:`token_bytes` of each id from 0 to the last that has a token. Pure; O(vocabulary)."""
        last = max(self._hf.get_vocab().values(), default=-1)
        return self._token_bytes.read(1 + max(last, *self.special_token_ids, self.vocab_size - 1))

    def added_by(self, token_ids: Sequence[int]) -> str:
        """Return the text that tokens add to one before them, control signs included. Pure."""
        return self._token_bytes.added_by(token_ids)

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """The most UTF-8 bytes of a text that become one token; None: there is no bound, or it is not known."""
        return max_bytes_per_token(self._fast)

    @cached_property
    def byte_table(self) -> Mapping[int, bytes] | None:
        """Bytes by token id, if the text of tokens is their bytes joined and read as UTF-8, whatever stands where; else None."""
        return ByteTable(self._fast) if is_byte_level(self._fast) else None

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._hf, self.special_token_ids)

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty if it has none."""
        template = getattr(self._hf, "chat_template", None) or ""
        return template if isinstance(template, str) else str(template.get("default", ""))

    def find_template(self, name: str = "", *, has_tools: bool = False) -> str:
        """Return the source of a chat template; empty if there is none. Pure.

        Args:
            name: Name of a template that comes with the model, or the source of one; empty: the model's default template.
            has_tools: The conversation comes with tools, for which some models have a template of their own.
        """
        several = getattr(self._hf, "chat_template", None)
        if not isinstance(several, dict):
            return name or self.chat_template
        if name:
            return str(several.get(name, name))
        return str(several.get("tool_use", self.chat_template)) if has_tools else self.chat_template

    @cached_property
    def special_tokens(self) -> Mapping[str, Any]:
        """Special tokens by the name that chat templates know them by, such as ``bos_token``."""
        return dict(self._hf.special_tokens_map)

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Tokens that were added to the vocabulary, or are special, by their text."""
        return dict(self._hf.get_added_vocab()) | {
            self._hf.convert_ids_to_tokens(token_id): token_id for token_id in self.special_token_ids
        }

    @cached_property
    def writes_chats(self) -> bool:
        """Whether code that comes with the model writes conversations, and no template."""
        if self.is_remembered:  # none with such code is
            return False
        from transformers import PreTrainedTokenizerBase

        return type(self._hf).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template

    @_in_words
    def write_chat(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token ids of a conversation as that code writes it. Pure.

        Raises:
            InvalidRequestError: It refuses the messages.
        """
        try:
            return tuple(self._hf.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments))
        except Exception as error:  # whatever it raises, the messages do not suit it
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}.") from error

    def encode_rendered(self, chat: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids of what :func:`trencadis.text.chat.render_chat` gives: the template writes all special tokens. Pure.

        Raises:
            InvalidRequestError: ``chat`` has no token.
        """
        return self.encode(chat, add_special_tokens=False) if isinstance(chat, str) else chat


def needs_tokenizer(what: str, *, field: str = "") -> InvalidRequestError:
    """Return the error for a request that needs a tokenizer where there is none. Pure."""
    return InvalidRequestError(
        f"{what} needs a tokenizer, and there is none (model.tokenizer = {NO_TOKENIZER!r}).",
        hint="Give token ids and parameters that need no text, or start with a tokenizer.",
        field=field,
    )


class NoTokenizer(Tokenizer):
    """Serves a model without a tokenizer: prompts are token ids, and output has no text. Whatever needs text is refused."""

    has_text = False

    def __init__(self) -> None:
        self._hf = self._fast = None
        self.is_remembered = False
        self.vocab_size = 0
        self.special_token_ids = frozenset()
        self.byte_fallback = self.eos_token_id = self.bos_token_id = None
        self.next_token = []
        self.opening = ()
        self.byte_table = None
        self.control_tokens = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, may_be_empty: bool = False) -> tuple[int, ...]:
        """Refuse a text.

        Raises:
            InvalidRequestError: Always.
        """
        raise needs_tokenizer("a text as prompt")

    def encode_literally(self, text: str) -> tuple[int, ...]:
        """Refuse a text.

        Raises:
            InvalidRequestError: Always.
        """
        raise needs_tokenizer("a text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return an empty text. Pure."""
        return ""

    def decode_certain(self, token_ids: list[int]) -> str:
        """Return an empty text. Pure."""
        return ""

    def knows(self, token_id: int) -> bool:
        """Return False: no token id has a text. Pure."""
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """Return no bytes. Pure."""
        return b""

    @property
    def chat_template(self) -> str:
        """Empty."""
        return ""


def _load(place: Path, path: str, *, revision: str, trust_remote_code: bool) -> Any:
    if place.is_dir() and _is_generic(place):
        # The same result as with AutoTokenizer, which imports the model code of every architecture and torch first.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(place), local_files_only=True)
    if place.is_file():
        return load_gguf_tokenizer(place)
    if not place.exists() and (place.is_absolute() or path.startswith(".")):
        raise FileNotFoundError("there is no such directory.")
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if place.is_dir():
        return AutoTokenizer.from_pretrained(str(place), local_files_only=True, **options)
    return AutoTokenizer.from_pretrained(path, revision=revision or "main", **options)


def _is_generic(directory: Path) -> bool:
    """Return whether ``tokenizer.json`` needs no class of its own. Reads the directory."""
    settings = directory / "tokenizer_config.json"
    if not (directory / "tokenizer.json").is_file() or not settings.is_file():
        return False
    content = json.loads(settings.read_text(encoding="utf-8"))
    return content.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in content


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
