"""What a component may know of the tokenizer: the bytes of token ids."""

from __future__ import annotations

from collections.abc import Callable

import attrs

__all__ = ["Vocabulary"]


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """The tokens of a model's tokenizer. Compared and hashed by identity.

    Attributes:
        tokens: Bytes of each token id from 0, which may be part of a character; empty for an id without a token. The model may have
            more logits than there are tokens, and fewer.
        special_token_ids: Tokens that are control signs, not text.
        eos_token_id: The tokenizer's own end-of-sequence token, or None. The model may name others.
        encode: Token ids of a text within another, as the tokenizer would write it; signs in it are text. Their bytes are the text's,
            unless the tokenizer normalises it or lacks tokens for it. Pure; from any thread.
        fault: Returns why ``tokens`` are not what the tokenizer decodes, in words; empty: they are. The first call takes up to a second.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_id: int | None
    encode: Callable[[str], tuple[int, ...]]
    fault: Callable[[], str] = lambda: ""
