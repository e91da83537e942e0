"""A tokenizer of the package ``tokenizers`` with what transformers made of it: the part of a tokenizer of transformers that is used here.

    a tokenizer of transformers ─▶ facts_of: nothing of its class stands in the way ─▶ facts, and its Rust part as JSON
    facts, JSON ─▶ PlainTokenizer: the same ids, texts and templates, and transformers is not imported

What classes of transformers do when they load, such as adding tokens, writing post-processors and mending patterns, they have done to
the Rust part by then. It is taken as it is, so that none of their rules is written a second time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

__all__ = ["PlainTokenizer", "TokenizerFacts", "facts_of"]

_USED: Final = (
    *("__call__", "encode", "_encode_plus", "set_truncation_and_padding", "_convert_encoding", "__len__"),
    *("get_vocab", "get_added_vocab", "added_tokens_decoder", "backend_tokenizer", "convert_ids_to_tokens"),
    *("apply_chat_template", "get_chat_template", "special_tokens_map"),
)
"""All that is used of a tokenizer of transformers and does not end in the facts."""


@attrs.frozen(kw_only=True)
class TokenizerFacts:
    """What transformers knows of a tokenizer beside its Rust part.

    Attributes:
        special_tokens: By the name that chat templates know them by.
        all_special_ids: Ids of those and of further special tokens; None in it: a token that the vocabulary lacks.
        eos_token_id: None: it has none.
        bos_token_id: None: it has none.
        chat_template: One, or several by name, or None.
        splits_special_tokens: Control signs in a text are spelt out as text, unless asked otherwise.
    """

    special_tokens: Mapping[str, str]
    all_special_ids: Sequence[int | None]
    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: str | Mapping[str, str] | None
    splits_special_tokens: bool

    def to_json(self) -> str:
        """Return them as one line. Pure."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> TokenizerFacts:
        """Return what :meth:`to_json` wrote. Pure.

        Raises:
            ValueError: It is something else.
            TypeError: The same.
        """
        return cls(**json.loads(text))


def facts_of(hf: Any) -> TokenizerFacts | None:
    """Return the facts of a tokenizer of transformers; None: its class does more than its Rust part on the way of a text.

    Args:
        hf: The tokenizer, imported with transformers.
    """
    from transformers import PreTrainedTokenizerFast

    own, base = type(hf), PreTrainedTokenizerFast
    if not issubclass(own, base) or any(_of(own, name) is not _of(base, name) for name in _USED):
        return None
    if not own.__module__.startswith(("transformers.", "trencadis.")):  # a model's code may change unseen
        return None
    template = hf.chat_template
    return TokenizerFacts(
        special_tokens=dict(hf.special_tokens_map),
        all_special_ids=list(hf.all_special_ids),
        eos_token_id=hf.eos_token_id,
        bos_token_id=hf.bos_token_id,
        chat_template=dict(template) if isinstance(template, Mapping) else template,
        splits_special_tokens=bool(hf.split_special_tokens),
    )


def _of(owner: type, name: str) -> Any:
    """Return a method or property as the first class that has it defines it."""
    return next((vars(one)[name] for one in owner.__mro__ if name in vars(one)), None)


class PlainTokenizer:
    """Answers what :class:`~trencadis.text.Tokenizer` asks of a tokenizer of transformers. May be used from several threads.

    Args:
        rust: A tokenizer of the package ``tokenizers``; neither cuts nor fills texts from now on.
        facts: Facts that transformers knows beside it.

    Attributes:
        backend_tokenizer: The first.
        all_special_ids: See :class:`TokenizerFacts`.
        special_tokens_map: The same.
        eos_token_id: The same.
        bos_token_id: The same.
        chat_template: The same.
    """

    def __init__(self, rust: Any, facts: TokenizerFacts) -> None:
        rust.no_truncation()
        rust.no_padding()
        self.backend_tokenizer = rust
        self.all_special_ids = list(facts.all_special_ids)
        self.special_tokens_map = dict(facts.special_tokens)
        self.eos_token_id = facts.eos_token_id
        self.bos_token_id = facts.bos_token_id
        self.chat_template = facts.chat_template
        self._splits = facts.splits_special_tokens
        self._special = frozenset(
            token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special
        )

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        verbose: bool = True,
    ) -> dict[str, list[int]]:
        """Return the token ids of a text as ``input_ids``. Pure.

        Args:
            text: To be encoded.
            add_special_tokens: With those that the post-processor adds.
            split_special_tokens: Spell out control signs as text; None: as the facts say.
            verbose: Changes nothing.
        """
        rust = self.backend_tokenizer
        splits = self._splits if split_special_tokens is None else split_special_tokens
        if splits and not self._special.isdisjoint(rust.encode(text, add_special_tokens=False).ids):
            rust = self._speller
        return {"input_ids": list(rust.encode(text, add_special_tokens=add_special_tokens).ids)}

    @functools.cached_property
    def _speller(self) -> Any:
        """Another one, which spells out control signs: to set that in the one that other threads use would change their texts."""
        made = type(self.backend_tokenizer).from_str(self.backend_tokenizer.to_str())
        made.encode_special_tokens = True
        return made

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Pure."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token, added ones included. Pure."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of added tokens. Pure."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items())}

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return a token; None: there is none. Pure."""
        token: str | None = self.backend_tokenizer.id_to_token(token_id)
        return token
