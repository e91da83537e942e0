from __future__ import annotations

import numpy as np
import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import StructuredOutput
from trencadis.text import load_tokenizer, vocabulary_of
from trencadis_plugins.sampling.grammar import Grammars
from trencadis_plugins.sampling.grammar_state import GrammarState, LeftGrammarError

WANTED = (
    StructuredOutput.json_object(),
    StructuredOutput.json_schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["ab", "abc", "b"]}, "n": {"type": "integer"}},
            "required": ["n"],
        }
    ),
    StructuredOutput.regex("(a|ab|abc)*[x-z]?"),
    StructuredOutput.choice(["to be", "to be or not", "not"]),
    StructuredOutput.grammar('start: "(" start ")" | "x"+'),
)


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_of(load_tokenizer("demo"))


@pytest.fixture(scope="module")
def walk_of(vocabulary):
    grammars = Grammars(lambda: vocabulary)

    def make(wanted, ends=(0,)):
        return GrammarState(
            grammars.matcher(wanted),
            vocabulary=vocabulary,
            eos_token_id=grammars.eos_token_id,
            end_token_ids=ends,
        )

    return make


def _tokens(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _outputs(state, rng, count):
    """Random beginnings of texts, all of them legal."""
    output = []
    yield list(output)
    for _ in range(count):
        allowed = _tokens(state.mask(output))
        text = allowed[allowed != 0]
        if not len(text):
            return
        output.append(int(rng.choice(text)))
        yield list(output)


@pytest.mark.parametrize("wanted", WANTED, ids=lambda one: one.kind)
def test_a_mask_is_a_function_of_the_output_whatever_the_way_there(walk_of, wanted):
    rng = np.random.default_rng(0)
    wandering = walk_of(wanted)
    outputs = [output for seed in range(4) for output in _outputs(walk_of(wanted), np.random.default_rng(seed), 12)]
    for _ in range(150):
        output = outputs[rng.integers(len(outputs))]
        found, expected = wandering.mask(output), walk_of(wanted).mask(output)
        assert np.array_equal(found, expected)
        assert wandering.has_mask(output)
        if rng.random() < 0.5:
            token = int(rng.choice(_tokens(expected))) if rng.random() < 0.7 else int(rng.integers(4096))
            try:
                again = walk_of(wanted).mask([*output, token])
            except LeftGrammarError:
                with pytest.raises(LeftGrammarError, match=f"token {token} has come after"):
                    wandering.advance(token)
            else:
                assert np.array_equal(wandering.advance(token), again)


@pytest.mark.parametrize("wanted", WANTED, ids=lambda one: one.kind)
def test_a_mask_allows_what_can_be_gone_on_with_and_nothing_else(walk_of, vocabulary, wanted):
    """The other definition: a token is allowed if the output with it is a beginning, too."""
    state, rng = walk_of(wanted), np.random.default_rng(1)
    for output in _outputs(walk_of(wanted), np.random.default_rng(7), 8):
        allowed = set(_tokens(state.mask(output)).tolist())
        assert allowed
        for token in {*rng.integers(1, 4096, 40).tolist(), *list(allowed)[:40]} - {0}:
            # What is forced may be offered in its canonical tokens alone.
            if token in allowed:
                assert state.mask([*output, token]).any()


def test_the_end_is_allowed_where_the_text_may_end_and_alone_behind_it(walk_of, vocabulary):
    state = walk_of(StructuredOutput.regex("ab?"))
    a, b = vocabulary.encode("a")[0], vocabulary.encode("b")[0]
    assert 0 not in _tokens(state.mask([]))
    assert set(_tokens(state.mask([a]))) == {0, b}
    assert _tokens(state.mask([a, b])).tolist() == [0]
    assert _tokens(state.mask([a, 0])).tolist() == [0]
    assert _tokens(state.mask([a, 0, b, 0])).tolist() == [0]
    for output in ([0], [b], [a, b, b], [b, 0]):
        with pytest.raises(LeftGrammarError, match="no text of the grammar"):
            state.mask(output)
    with pytest.raises(LeftGrammarError):
        state.advance(a)
    assert set(_tokens(state.mask([a]))) == {0, b}


def test_a_sequence_may_have_ends_of_its_own(walk_of, vocabulary):
    state = walk_of(StructuredOutput.regex("a?"), ends=(2, 3))
    assert set(_tokens(state.mask([]))) == {2, 3, vocabulary.encode("a")[0]}
    assert _tokens(state.advance(3)).tolist() == [2, 3]
    beyond = walk_of(StructuredOutput.regex("a"), ends=(2, 99_999))
    assert _tokens(beyond.mask(list(vocabulary.encode("a")))).tolist() == [2]


def test_a_text_that_no_token_goes_on_with_is_an_error_not_an_empty_mask(vocabulary):
    import attrs

    lame = attrs.evolve(
        vocabulary, tokens=tuple(t if b"q" not in t else b"" for t in vocabulary.tokens), encode=lambda _: ()
    )
    grammars = Grammars(lambda: lame)
    state = GrammarState(
        grammars.matcher(StructuredOutput.regex("[ab]q")), vocabulary=lame, eos_token_id=0, end_token_ids=(0,)
    )
    first = _tokens(state.mask([]))
    with pytest.raises(InvalidRequestError, match="structured output"):
        state.mask([int(first[0])])
