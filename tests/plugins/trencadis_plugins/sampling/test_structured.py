from __future__ import annotations

import json
import re
from concurrent.futures import Future

import attrs
import jsonschema_rs
import numpy as np
import pytest
import torch

from support.strategies.structured_scene import PROMPT, VOCAB_SIZE, Scene, random_schema
from trencadis.errors import ContractError, InvalidRequestError
from trencadis.interfaces import SamplingContext
from trencadis.records import SamplingParams, StructuredOutput
from trencadis.text import load_tokenizer, vocabulary_of
from trencadis_plugins.sampling.chain import build_chain, standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.sampling.structured import Structured, _banned, _banned_on_device


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_of(load_tokenizer("demo"))


@pytest.fixture
def make_sampler(vocabulary):
    def make(num_rows=8, **options):
        sampler = StandardSampler(standard_chain("vllm", vocabulary=lambda: vocabulary))
        sampler.allocate(num_rows=num_rows, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        return sampler

    return make


@pytest.fixture
def make_scene(make_sampler, vocabulary, start):
    return lambda: Scene(make_sampler(), vocabulary, start)


# ------------------------------------------------------------------------------------------------- what is written


@pytest.mark.representatives(6)
@pytest.mark.parametrize("seed", range(24))
def test_random_logits_at_a_high_temperature_write_json_of_the_schema(seed, make_scene):
    """Eight schemas beside each other; after a while closing signs are likely, so that every text ends."""
    rng, scene = np.random.default_rng(seed), make_scene()
    schemas = [random_schema(rng) for _ in range(8)]
    for row, schema in enumerate(schemas):
        params = {"structured": StructuredOutput.json_schema(schema), "temperature": [5.0, 0.0, 1.0][row % 3]}
        scene.begin(row, 100 * seed + row, params)
    for row, output in scene.write(range(8)).items():
        value = json.loads(scene.text(output), parse_float=lambda _: 0.5)  # 1e999 is JSON, but no float
        assert jsonschema_rs.is_valid(schemas[row], value), (schemas[row], value)


def test_texts_of_every_kind_beside_free_ones(make_scene):
    scene = make_scene()
    wanted = [
        StructuredOutput.json_object(),
        StructuredOutput.regex(r"([0-9]{2}-){1,3}[a-f]+é?"),
        StructuredOutput.choice(["<|end|>", "two\nlines", "é😀"]),
        StructuredOutput.grammar('start: "(" start ")" | "x" | "y" start'),
    ]
    for row, one in enumerate(wanted):
        scene.begin(row, row, {"structured": one, "temperature": 5.0})
    scene.begin(4, 4, {"temperature": 5.0})
    texts = {row: scene.text(output) for row, output in scene.write(range(4)).items()}
    assert isinstance(json.loads(texts[0]), dict)
    assert re.fullmatch(r"([0-9]{2}-){1,3}[a-f]+é?", texts[1])
    assert texts[2] in {"<|end|>", "two\nlines", "é😀"}
    depth = re.sub(r"[^()]", "", texts[3])
    assert re.fullmatch(r"[y(]*x\)*", texts[3])
    assert depth == "(" * (len(depth) // 2) + ")" * (len(depth) // 2)
    free, alone = make_scene(), make_scene()
    for one in (free, alone):
        one.begin(4, 4, {"temperature": 5.0})
    free.begin(0, 0, {"structured": wanted[0], "temperature": 5.0})
    for _ in range(5):
        assert free.step([4, 0])[4] == alone.step([4])[4]


def test_rows_that_do_not_ask_stay_bit_equal_and_tokens_without_a_name_are_never_allowed(vocabulary, start, context_of):
    processor = Structured(lambda: vocabulary)
    processor.allocate(num_rows=4, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    starts = [start(0), start(1, structured=StructuredOutput.regex("[^q]+"), eos=(0,))]
    for one in starts:
        processor.start_row(one)
    logits = torch.randn((2, VOCAB_SIZE))
    changed = processor.apply(logits.clone(), context_of(starts))
    assert torch.equal(changed[0], logits[0])
    allowed = torch.isfinite(changed[1])
    assert not allowed[4096:].any()
    assert not allowed[0]
    assert torch.equal(changed[1][allowed], logits[1][allowed])
    assert allowed.sum() > 3000


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 95, 96, 100, 200])
def test_masks_are_unfolded_alike_on_host_and_device(vocab_size):
    """Tokens beyond the words are banned; words beyond the tokens do not matter."""
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 3)).astype(np.int32)
    banned = _banned(words, torch.zeros((7, vocab_size)))
    assert banned.shape == (5, vocab_size)
    for row in range(5):
        for token in range(vocab_size):
            allowed = token < 96 and int(words[row, token // 32]) >> (token % 32) & 1
            assert bool(banned[row, token]) == (not allowed)
    fitting = np.zeros((5, -(-vocab_size // 32)), np.int32)
    fitting[:, :3] = words[:, : fitting.shape[1]]
    assert torch.equal(_banned_on_device(torch.from_numpy(fitting), vocab_size), banned)


# ------------------------------------------------------------------------------------------------- drafts


@pytest.mark.representatives(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quality", ["right", "some right", "random", "forbidden"])
def test_text_with_drafts_is_the_text_without(seed, quality, make_scene):
    rng = np.random.default_rng(seed)
    wanted = [
        StructuredOutput.json_schema(random_schema(rng)),
        StructuredOutput.json_object(),
        StructuredOutput.regex("(ab|a b|cd)+[0-9]{3}"),
        StructuredOutput.grammar('start: "(" start ")" | "x"+'),
    ]
    params = [{"structured": one, "temperature": 5.0 if row % 2 else 0.0} for row, one in enumerate(wanted)]

    def fresh():
        scene = make_scene()
        for row, one in enumerate(params):
            scene.begin(row, 10 * seed + row, one)
        return scene

    plain = fresh()
    expected = plain.write(range(4))

    def draft(row, output):
        known = [*expected[row], 0, 0, 0][len(output) : len(output) + 3]
        if quality == "some right":
            known = [t if rng.random() < 0.7 else int(rng.integers(4096)) for t in known]
        elif quality == "random":
            known = rng.integers(0, 4096, rng.integers(0, 4)).tolist()
        elif quality == "forbidden":
            known = [1, 2, 4095]
        return known

    drafted = fresh()
    assert drafted.write(range(4), draft=draft) == expected
    if quality == "right":
        assert drafted.num_steps < plain.num_steps / 2


def test_nothing_is_allowed_behind_a_forbidden_draft(vocabulary, start):
    processor = Structured(lambda: vocabulary)
    processor.allocate(num_rows=1, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    processor.start_row(start(0, PROMPT, structured=StructuredOutput.regex("abc"), eos=(0,)))
    tokens = torch.full((1, 32), -1, dtype=torch.int32)
    a, z = vocabulary.encode("a")[0], vocabulary.encode("z")[0]
    tokens[0, :6] = torch.tensor([*PROMPT, a, z, a])
    context = SamplingContext(rows=(0,) * 4, positions=(2, 3, 4, 5), tokens=tokens)
    logits = torch.zeros((4, VOCAB_SIZE))
    changed = processor.apply(logits.clone(), context)
    allowed = torch.isfinite(changed).sum(1).tolist()
    assert 0 < allowed[0] < 5
    assert 0 < allowed[1] < 5
    assert allowed[2:] == [0, 0]
    assert set(processor.failures) == {(0, 4), (0, 5)}


# ------------------------------------------------------------------------------------------------- rows that come and go


def test_a_sequence_goes_on_in_another_row_as_if_nothing_had_happened(make_scene):
    params = {"structured": StructuredOutput.json_object(), "temperature": 5.0}
    straight = make_scene()
    straight.begin(0, 7, params)
    expected = straight.write([0])[0]
    scene = make_scene()
    scene.begin(0, 7, params)
    output = [token for _ in range(9) for token in scene.step([0])[0]]
    scene.begin(0, 8, {"structured": StructuredOutput.regex("a+"), "temperature": 5.0})
    scene.step([0])
    scene.begin(3, 7, params, output)
    assert output + scene.write([3])[3] == expected


def test_a_step_that_is_taken_again_gets_the_same_mask(make_scene):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.json_object(), "temperature": 5.0})
    for _ in range(6):
        scene.step([0])
    again = scene.step([0])[0]
    for back in (1, 3):
        expected = scene.tokens[0, scene.lengths[0] - back].item()
        scene.lengths[0] -= back
        assert scene.step([0])[0] == [expected]
        scene.lengths[0] += back - 1
    assert again


def test_an_end_that_does_not_end_is_repeated(make_scene, start):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.choice(["yes", "no"]), "ignore_eos": True})
    scene.sampler.start_row(
        start(0, PROMPT, structured=StructuredOutput.choice(["yes", "no"]), ignore_eos=True, row_seed=3)
    )
    output = [token for _ in range(8) for token in scene.step([0])[0]]
    text = scene.text([token for token in output if token])
    assert text in {"yes", "no"}
    assert output[-1] == output[-2] == 0


def test_stop_tokens_that_are_text_are_no_ends(vocabulary, start, context_of):
    comma = vocabulary.encode(",")[0]
    for stops, ends in (((comma,), {0}), ((2,), {0, 2})):
        processor = Structured(lambda: vocabulary)
        processor.allocate(num_rows=1, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        row = start(0, PROMPT, structured=StructuredOutput.regex("a*"), stop_token_ids=stops, eos=(0, *stops))
        processor.start_row(row)
        allowed = torch.isfinite(processor.apply(torch.zeros((1, VOCAB_SIZE)), context_of([row]))[0])
        assert {0, 2, comma} & set(allowed.nonzero().flatten().tolist()) == ends


def test_min_tokens_gives_way_to_a_text_that_is_complete(make_scene):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.regex("a{1,9}"), "min_tokens": 5, "temperature": 5.0})
    scene.begin(1, 3, {"structured": StructuredOutput.regex("a"), "min_tokens": 5, "temperature": 0.0})
    outputs = scene.write([0, 1])
    assert scene.text(outputs[1]) == "a"
    assert re.fullmatch("a{1,9}", scene.text(outputs[0]))
    assert len(outputs[0]) >= 5 or scene.text(outputs[0]) == "a" * 9


# ------------------------------------------------------------------------------------------------- ahead


def test_masks_are_computed_before_they_are_asked_for(make_scene):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.json_object(), "temperature": 5.0})
    structured = scene.sampler._chain[0]
    for _ in range(20):
        structured._rows[0].ahead.result()
        scene.step([0])
    assert (structured.num_masks, structured.num_ready) == (20, 20)


def test_a_mask_that_is_ready_is_not_computed_again_and_the_device_is_not_waited_for(make_scene, monkeypatch):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.json_object(), "temperature": 5.0})
    structured = scene.sampler._chain[0]
    looked = []
    outputs = structured._outputs
    monkeypatch.setattr(structured, "_outputs", lambda context, index: looked.extend(index) or outputs(context, index))
    for _ in range(5):
        scene.step([0])
    assert looked == []
    scene.step([0], drafts={0: [5, 6]})
    assert looked == [0, 1, 2]


def test_what_fails_ahead_is_an_error_of_the_row_that_needs_it(make_scene):
    scene = make_scene()
    scene.begin(0, 3, {"structured": StructuredOutput.json_object()})
    failed = Future()
    failed.set_exception(ValueError("structured output: the library gave up"))
    scene.sampler._chain[0]._rows[0].ahead = failed
    scene.step([0])
    (error,) = scene.row_errors
    assert (error.index, error.message) == (0, "structured output: the library gave up")


def test_a_text_that_has_left_its_grammar_ends_in_words_and_no_other_request_does(make_scene):
    """As where an acceptance rule lets a draft stand that the grammar forbids, and nothing else noticed it."""
    scene = make_scene()
    for row in (0, 1):
        scene.begin(row, row, {"structured": StructuredOutput.regex("abc"), "temperature": 5.0})
    scene.step([0, 1])
    scene.tokens[0, scene.lengths[0]] = 2000
    scene.lengths[0] += 1
    scene.step([0, 1])
    (error,) = scene.row_errors
    assert (error.index, error.is_invalid) == (0, False)
    assert "structured output: token 2000 has come after" in error.message


def test_a_state_that_is_lost_is_an_error_in_words_of_the_row_that_needs_it(make_scene):
    scene = make_scene()
    for row in (0, 1):
        scene.begin(row, row, {"structured": StructuredOutput.json_object()})
    del scene.sampler._chain[0]._rows[1]
    scene.step([0, 1])
    (error,) = scene.row_errors
    assert error.index == 1
    assert "structured output: what this request asks for is lost" in error.message


# ------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_compiled_is_refused_before_it_runs(vocabulary):
    sampler = StandardSampler(standard_chain("vllm", vocabulary=lambda: vocabulary))
    (compiled,) = sampler.prepare(SamplingParams(structured=StructuredOutput.regex("a+")), tenant="")
    assert not compiled.result().matcher().is_error()
    assert sampler.prepare(SamplingParams(), tenant="") == ()
    (refused,) = sampler.prepare(SamplingParams(structured=StructuredOutput.regex("(a")), tenant="")
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        refused.result()


def test_a_chain_without_it_refuses_structured_output():
    sampler = StandardSampler(build_chain("vllm", chain=["temperature"]))
    with pytest.raises(InvalidRequestError, match="no structured in it"):
        sampler.check(SamplingParams(structured=StructuredOutput.json_object()))


def test_without_a_tokenizer_nothing_is_pretended():
    sampler = StandardSampler(standard_chain("vllm"))
    (refused,) = sampler.prepare(SamplingParams(structured=StructuredOutput.json_object()), tenant="")
    with pytest.raises(ContractError, match="without a tokenizer"):
        refused.result()


def test_the_tokenizer_is_read_when_somebody_asks(vocabulary, start):
    reads = []
    processor = Structured(lambda: reads.append(1) or vocabulary)
    processor.allocate(num_rows=2, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    processor.start_row(start(0))
    assert processor.prepare(SamplingParams(), tenant="") == ()
    assert not reads
    processor.start_row(attrs.evolve(start(1, structured=StructuredOutput.json_object())))
    assert reads


def test_first_token_of_another_engine_is_one_that_the_grammar_could_begin_with(vocabulary, start):
    sampler = StandardSampler(standard_chain("vllm", vocabulary=lambda: vocabulary))
    begins = start(0, PROMPT, (), row_seed=1, eos=(0,), structured=StructuredOutput.choice(["yes", "no"]))
    allowed = [token for token in range(VOCAB_SIZE) if sampler.can_start_with(begins, token)]
    assert allowed
    for token in allowed:
        text = vocabulary.tokens[token]
        assert text
        assert b"yes".startswith(text) or b"no".startswith(text)
    assert not sampler.can_start_with(begins, 0), "nothing is no text of it"
