"""Token ids of the target and of a draft model with another tokenizer, by the bytes that they stand for.

    target ids ─▶ draft ids, token by token; runs of tokens that the draft model lacks are written anew in its own
    draft ids ─▶ target ids; what the target lacks is never drafted

Shapes: V vocabulary of the draft model, T vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from trencadis.interfaces import Vocabulary
from trencadis.records import BoolArray, Int32Array

__all__ = ["Translation"]


def _nothing(token_id: int) -> bytes:
    return b""


def _cannot(text: bytes) -> Int32Array | None:
    return None


@attrs.frozen(kw_only=True, eq=False)
class Translation:
    """From one vocabulary to another.

    Attributes:
        to_draft: Draft token of each target token, -1 for none, int32 ``[T]``.
        to_target: Target token of each draft token, -1 for none, int32 ``[V]``.
        is_identity: Where both have a token, it has one id.
        bytes_of: Bytes of a target token; empty: they cannot be told.
        encode: Draft tokens of some bytes; None if they are no text.
    """

    to_draft: Int32Array
    to_target: Int32Array
    is_identity: bool
    bytes_of: Callable[[int], bytes] = _nothing
    encode: Callable[[bytes], Int32Array | None] = _cannot

    @classmethod
    def identity(cls, target_size: int, draft_size: int) -> Translation:
        """Return that of two models with one tokenizer; one may have more tokens after those of the other. Pure."""
        shared = min(target_size, draft_size)
        to_draft, to_target = np.full(target_size, -1, np.int32), np.full(draft_size, -1, np.int32)
        to_draft[:shared] = to_target[:shared] = np.arange(shared)
        return cls(to_draft=to_draft, to_target=to_target, is_identity=True)

    @classmethod
    def between(cls, target: Vocabulary, draft: Vocabulary, *, target_size: int, draft_size: int) -> Translation:
        """Return that of two tokenizers. Pure; O(vocabulary).

        Signs match signs of the same bytes and text matches text; the end-of-sequence tokens match each other.

        Source: the intersection of vocabularies of Timor et al., "Accelerating LLM inference with lossless speculative
        decoding algorithms for heterogeneous vocabularies", 2025, section 4 (token-level intersection).

        Args:
            target: Tokens of the target.
            draft: Tokens of the draft model.
            target_size: Logits of the target, T.
            draft_size: Logits of the draft model, V.
        """
        shared = min(len(target.tokens), len(draft.tokens), target_size, draft_size)
        if target.tokens[:shared] == draft.tokens[:shared] and not any(target.tokens[shared:]):
            return cls.identity(target_size, draft_size)
        ours = _by_bytes(draft, draft_size)
        to_draft, to_target = np.full(target_size, -1, np.int32), np.full(draft_size, -1, np.int32)
        for key, token_id in _by_bytes(target, target_size).items():
            other = ours.get(key, -1)
            if other >= 0:
                to_draft[token_id], to_target[other] = other, token_id
        return cls(
            to_draft=to_draft,
            to_target=to_target,
            is_identity=False,
            bytes_of=lambda token_id: target.tokens[token_id] if token_id < len(target.tokens) else b"",
            encode=lambda text: _encoded(draft, text, draft_size),
        )

    @property
    def closed(self) -> BoolArray:
        """Draft tokens that the target lacks, bool ``[V]``."""
        closed: BoolArray = self.to_target < 0
        return closed

    def tokens(self, token_ids: Int32Array) -> Int32Array | None:
        """Return a text of target tokens in draft tokens; None if it cannot be written so. Pure.

        The same beginning gives the same beginning, up to the last run of tokens that the draft model lacks.
        """
        found: Int32Array = self.to_draft[token_ids]
        missing = found < 0
        if not missing.any():
            return found
        edges = np.flatnonzero(np.diff(missing)) + 1
        parts = []
        for run, is_missing in zip(np.split(np.arange(len(found)), edges), _first_of(missing, edges), strict=True):
            if not is_missing:
                parts.append(found[run])
                continue
            pieces = [self.bytes_of(token_id) for token_id in token_ids[run].tolist()]
            written = self.encode(b"".join(pieces)) if all(pieces) else None
            if written is None:
                return None
            parts.append(written)
        return np.concatenate(parts).astype(np.int32)


def _first_of(flags: BoolArray, edges: np.ndarray) -> list[bool]:
    firsts = np.concatenate([[0], edges])
    return [bool(flag) for flag in flags[firsts]]


def _by_bytes(vocabulary: Vocabulary, size: int) -> dict[tuple[bool, bytes], int]:
    """Return token ids by kind and bytes; of two alike the lower one."""
    found: dict[tuple[bool, bytes], int] = {}
    for token_id, token in enumerate(vocabulary.tokens[:size]):
        is_end = token_id == vocabulary.eos_token_id
        key = (True, b"") if is_end else (token_id in vocabulary.special_token_ids, token)
        if token or is_end:
            found.setdefault(key, token_id)
    return found


def _encoded(vocabulary: Vocabulary, text: bytes, size: int) -> Int32Array | None:
    try:
        ids = np.array(vocabulary.encode(text.decode()), np.int32)
    except UnicodeDecodeError:
        return None
    return ids if len(ids) and int(ids.max()) < size else None
