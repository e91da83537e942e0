from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokenizer_zoo import TEXTS, over_the_zoo, zoo_tokenizer
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import Vocabulary
from trencadis.records import StructuredOutput
from trencadis.text import vocabulary_of
from trencadis_plugins.sampling.grammar import Grammars
from trencadis_plugins.sampling.grammar_tokens import TokenTable

TOKENS = (b"", b"ab", b"abc", b"cd", b"a", b"d", b"</s>")
FEW = Vocabulary(tokens=TOKENS, special_token_ids=frozenset({6}), eos_token_id=6, encode=lambda _: (1,))


def _bytes(table: TokenTable, text: str) -> list[bytes]:
    return [table.tokens[token] for token in table(text)]


@over_the_zoo
def test_forced_text_has_exactly_its_bytes_whatever_the_tokenizer_makes_of_it(name: str) -> None:
    vocabulary = vocabulary_of(zoo_tokenizer(name))
    table = TokenTable(vocabulary, eos_token_id=0)
    for text in TEXTS.values():
        assert b"".join(_bytes(table, text)) == text.encode()


def test_the_tokenizers_own_tokens_are_taken_where_their_bytes_are_the_texts() -> None:
    assert _bytes(TokenTable(FEW, 6), "ab") == [b"ab"]


def test_the_fewest_tokens_are_taken_otherwise_and_bytes_without_a_token_stand_beyond_the_vocabulary() -> None:
    table = TokenTable(FEW, 6)
    assert _bytes(table, "abcd") == [b"ab", b"cd"], "the longest first would leave d alone with a token less to spare"
    assert _bytes(table, "aXd") == [b"a", b"X", b"d"]
    assert table("aXd")[1] >= len(TOKENS)
    assert table("") == []


@given(st.text(max_size=400))
def test_every_text_has_tokens_of_its_bytes(text: str) -> None:
    assert b"".join(_bytes(TokenTable(FEW, 6), text)) == text.encode()


def test_a_text_may_go_on_into_a_token_that_holds_more_than_what_is_forced() -> None:
    """No token is ``b`` alone: after ``a`` the grammar forces it, and two tokens have it with what follows."""
    tokens = (b"a", b"bc", b"bd", b"c", b"</s>")
    few = Vocabulary(tokens=tokens, special_token_ids=frozenset({4}), eos_token_id=4, encode=lambda _: ())
    matcher = Grammars(lambda: few).matcher(StructuredOutput.choice(["abc", "abd"]))
    assert matcher.try_consume_tokens([0]) == 1
    mask = matcher.compute_bitmask()
    assert [token for token in range(5) if mask[token // 8] >> token % 8 & 1] == [1, 2]


def test_a_kind_that_no_token_begins_is_refused_before_it_runs() -> None:
    with pytest.raises(InvalidRequestError, match="no token of this model's tokenizer begins a text of this kind"):
        Grammars(lambda: FEW).matcher(StructuredOutput.choice(["Xa"]))


def test_a_tokenizer_whose_texts_are_not_its_bytes_is_refused_with_the_reason() -> None:
    strange = attrs.evolve(FEW, fault=lambda: "token 1 has the bytes b'ab', and the tokenizer decodes 'a b'")
    with pytest.raises(InvalidRequestError, match=r"structured output cannot be served .*token 1 has the bytes b'ab'"):
        Grammars(lambda: strange).matcher(StructuredOutput.choice(["ab"]))
