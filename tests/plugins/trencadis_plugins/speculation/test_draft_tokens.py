from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.interfaces import Vocabulary
from trencadis_plugins.speculation.draft_tokens import Translation


def vocabulary(*tokens: bytes, eos: int | None = None, special: frozenset[int] = frozenset()) -> Vocabulary:
    longest = sorted((token for token in tokens if token), key=len, reverse=True)

    def encode(text: str) -> tuple[int, ...]:
        """The longest token first."""
        rest, found = text.encode(), []
        while rest:
            token = next((one for one in longest if rest.startswith(one)), None)
            if token is None:
                raise AssertionError(f"no token for {rest!r}")
            found.append(tokens.index(token))
            rest = rest[len(token) :]
        return tuple(found)

    return Vocabulary(
        tokens=tokens,
        special_token_ids=special | ({eos} if eos is not None else set()),
        eos_token_id=eos,
        encode=encode,
    )


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_equal_tokenizers_keep_their_ids_whatever_stands_behind() -> None:
    same = vocabulary(b"a", b"b", b"c")
    longer = vocabulary(b"a", b"b", b"c", b"<mask>")
    for target, draft in ((same, same), (same, longer)):
        found = Translation.between(target, draft, target_size=5, draft_size=4)
        assert found.is_identity
        assert found.to_target.tolist() == [0, 1, 2, 3]
        assert found.to_draft.tolist() == [0, 1, 2, 3, -1]
        assert not found.closed.any()
        assert found.tokens(array(0, 4)) is None
    cut = Translation.identity(2, 3)
    assert cut.closed.tolist() == [False, False, True]


def test_tokens_are_matched_by_their_bytes_and_ends_by_what_they_are() -> None:
    target = vocabulary(b"<end>", b"a", b"b", b"ab", b"", eos=0)
    draft = vocabulary(b"b", b"ab", b"zz", b"a", b"</s>", b"<end>", eos=4)
    found = Translation.between(target, draft, target_size=6, draft_size=6)
    assert found.to_draft.tolist() == [4, 3, 0, 1, -1, -1]
    assert found.to_target.tolist() == [2, 3, -1, 1, 0, -1]
    assert found.closed.tolist() == [False, False, True, False, False, True]


def test_a_sign_is_not_the_text_that_looks_like_it() -> None:
    target = vocabulary(b"a", b"<|user|>", special=frozenset({1}))
    draft = vocabulary(b"x", b"a", b"<|user|>")
    assert Translation.between(target, draft, target_size=2, draft_size=3).to_draft.tolist() == [1, -1]


def test_runs_that_the_draft_model_lacks_are_written_in_its_own_tokens() -> None:
    target = vocabulary(b"a", b"xyz", b"yx", b"b", b"\xff", b"")
    draft = vocabulary(b"b", b"a", b"x", b"y", b"zy")
    found = Translation.between(target, draft, target_size=6, draft_size=5)
    written = found.tokens(array(0, 1, 2, 3, 0))
    assert written is not None
    assert [draft.tokens[i] for i in written.tolist()] == [b"a", b"x", b"y", b"zy", b"x", b"b", b"a"]
    assert written.dtype == np.int32
    assert found.tokens(array(0, 4)) is None, "not UTF-8"
    assert found.tokens(array(0, 5)) is None, "no bytes"


@pytest.mark.parametrize("seed", range(10))
def test_a_translated_text_has_the_same_bytes_and_the_same_beginning(seed: int) -> None:
    rng = random.Random(seed)
    letters = [bytes([97 + i]) for i in range(4)]
    pairs = [one + other for one in letters for other in letters]
    target = vocabulary(*letters, *rng.sample(pairs, 8))
    draft = vocabulary(*rng.sample(letters + rng.sample(pairs, 6), 10), *letters)
    found = Translation.between(target, draft, target_size=12, draft_size=len(draft.tokens))
    text = [rng.randrange(12) for _ in range(40)]
    written = found.tokens(np.array(text, np.int32))
    assert written is not None
    assert b"".join(draft.tokens[i] for i in written) == b"".join(target.tokens[i] for i in text)
    first = max((i + 1 for i in range(30) if found.to_draft[text[i]] >= 0), default=0)
    shorter = found.tokens(np.array(text[:first], np.int32))
    assert shorter is not None
    assert written[: len(shorter)].tolist() == shorter.tolist()
