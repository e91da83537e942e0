"""What a component may know of the tokenizer: the bytes of token ids."""

from __future__ import annotations

from collections.abc import Callable

import attrs

__all__ = ["Vocabulary"]


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """The tokens of a model's tokenizer. Compared and hashed by identity.

    Attributes:
        tokens: Bytes of each token id, from 0 on. A token may be part of a character; an id without a token has none (``b""``). The model
            may have more logits than there are tokens, and fewer.
        special_token_ids: Tokens that are control signs, such as the beginning of a turn, and not text.
        eos_token_id: The tokenizer's own end-of-sequence token, or None. The model may name others.
        encode: ``encode(text)`` gives the token ids of a text as it stands within another: without a token for the beginning, and control
            signs written in it are text. The bytes of the ids are those of the text, unless the tokenizer normalises it or lacks tokens
            for it. Pure; from any thread.
        fault: ``fault()`` says in words why ``tokens`` are not what the tokenizer decodes; empty: they are. What constrains text by bytes,
            as a grammar does, asks first. The first call takes up to a second.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_id: int | None
    encode: Callable[[str], tuple[int, ...]]
    fault: Callable[[], str] = lambda: ""
