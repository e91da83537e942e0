from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.backends import families, tiny_models
from support.backends.decoder_scene import BLOCK_SIZE, Scene, make_pass
from support.backends.held_forms import FORMS
from trencadis.interfaces import GuessBatch, LayerGate
from trencadis.records import TableWrites
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.linear import decoder_pass
from trencadis_torch.linear.decoder_pass import DecoderPasses, queries_together
from trencadis_torch.linear.native import native
from trencadis_torch.linear.native_decoder import PARTS
from trencadis_torch.runner import GatedPass

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")

KINDS = families.IN_ONE_CALL
LENGTHS = (23, 11, 120)


@pytest.fixture
def in_threads(monkeypatch):
    """Tiny products would run in one thread alone."""
    return lambda count: monkeypatch.setattr(decoder_pass, "threads_for", lambda _: count)


@pytest.fixture(autouse=True)
def two_threads(in_threads):
    in_threads(2)


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("kind", "form"), [*zip(KINDS, itertools.cycle(FORMS), strict=False)])
def test_bits_of_logits_keys_and_values_are_those_of_the_modules(kind, form):
    found, expected = (Scene(kind, form=form, in_one_call=one) for one in (True, False))
    passes = (
        ([0], [0], [23], range(23)),
        ([1, 2], [0, 0], [2, 1], [1, 2]),
        ([2, 0, 1], [1, 23, 2], [250, 1, 5], [249, 250, 255]),
        ([0, 1, 2], [24, 7, 251], [1, 1, 1], [0, 1, 2]),
    )
    for rows, starts, lengths, tokens in passes:
        one, other = (scene.logits(rows, starts, lengths, list(tokens)) for scene in (found, expected))
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(found.content(), expected.content(), strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_are_those_of_transformers(kind, tmp_path):
    path = tiny_models.save_model(kind, tmp_path)
    scene = Scene(kind)
    tokens = scene.rows.tokens[0, :30].tolist()
    expected = tiny_models.reference_logits(path, tokens)
    found = scene.logits([0], [0], [30], list(range(30)))
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def alone(schedule, form):
    """Return logits of all tokens, computed module by module in one thread: the same chunks, one row at a time; and the cache then."""
    scene, found = Scene("qwen3", form=form, in_one_call=False), {}
    for rows, starts, lengths in schedule:
        for row, start, length in zip(rows, starts, lengths, strict=True):
            logits = scene.logits([row], [start], [length], list(range(length)))
            found.update({(row, start + i): one for i, one in enumerate(logits)})
    return found, scene.content()


@st.composite
def schedules(draw):
    """Passes that compute all rows in chunks, several rows at a time."""
    done, passes = [0, 0, 0], []
    while any(have < n for have, n in zip(done, LENGTHS, strict=True)):
        left = [row for row, n in enumerate(LENGTHS) if done[row] < n]
        rows = draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        lengths = [min(draw(st.sampled_from([1, 2, 3, 9, 40, 90])), LENGTHS[row] - done[row]) for row in rows]
        passes.append((rows, [done[row] for row in rows], lengths))
        for row, length in zip(rows, lengths, strict=True):
            done[row] += length
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=10,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=schedules(), threads=st.sampled_from([1, 2]), data=st.data())
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_threads_nor_on_what_is_asked_for(
    form, in_threads, schedule, threads, data
):
    expected, content = alone(schedule, form)
    in_threads(threads)
    scene = Scene("qwen3", form=form)
    for rows, starts, lengths in schedule:
        places = [(row, start + i) for row, start, n in zip(rows, starts, lengths, strict=True) for i in range(n)]
        asked = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=6))
        found = scene.logits(rows, starts, lengths, asked)
        assert torch.equal(found, torch.stack([expected[places[i]] for i in asked]))
    assert all(torch.equal(one, other) for one, other in zip(scene.content(), content, strict=True))


def test_a_tokens_bits_do_not_depend_on_the_others_that_are_asked_for():
    """The last tokens of a chunk, whose number times the query heads of a KV head is no multiple of what the kernel takes together."""
    scene, length = Scene("qwen3"), 71
    every = scene.logits([2], [0], [length], list(range(length)))
    for token in (0, 63, 64, 66, 70):
        assert torch.equal(scene.logits([2], [0], [length], [token])[0], every[token])


@pytest.mark.parametrize(("num_groups", "queries"), [(1, 192), (2, 96), (3, 64), (4, 48), (7, 192), (8, 24)])
def test_queries_of_a_call_of_the_last_layer_begin_where_those_of_the_kernel_do(num_groups, queries):
    assert queries_together(192, num_groups) == queries
    assert queries * num_groups % 192 == 0


def test_no_logits_can_be_asked_for_and_keys_and_values_are_written():
    found, expected = Scene("llama"), Scene("llama", in_one_call=False)
    assert found.logits([0], [0], [9], []).shape == (0, 131)
    expected.logits([0], [0], [9], [0])
    assert all(torch.equal(one, other) for one, other in zip(found.content(), expected.content(), strict=True))


def test_buffers_are_used_again(monkeypatch):
    scene = Scene("llama")
    scene.logits([0], [0], [40], [39])
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(size) or empty(*size, **options))
    for start in (40, 41, 42):
        scene.logits([0], [start], [1], [0])
    scene.logits([1], [0], [33], [32])
    assert made == [(1, 131)] * 4  # the logits alone


def test_a_pass_that_waits_at_layers_goes_module_by_module(monkeypatch):
    scene = Scene("llama")
    expected = scene.logits([0], [0], [7], [6])
    waited = []

    class Gate(LayerGate):
        def __init__(self):
            pass

        def wait(self, layer):
            waited.append(layer)

    inputs = scene.runner.inputs(make_pass([0], [0], [7]))
    inputs = type(inputs)(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        attention=GatedPass(inputs.attention, Gate()),
        firsts=inputs.firsts,
    )
    with torch.inference_mode():
        found = scene.runner.forward(inputs, np.array([6]))
    assert waited == [0, 1, 2]
    assert torch.equal(found, expected)


def test_a_token_without_an_embedding_is_refused():
    scene = Scene("llama")
    scene.rows.tokens[0, 2] = 131
    with pytest.raises(IndexError, match="a token id has no embedding"):
        scene.logits([0], [0], [4], [3])


def test_where_time_goes_can_be_measured():
    scene = Scene("llama")
    passes = scene.runner._decoder
    assert isinstance(passes, DecoderPasses)
    assert isinstance(scene.cache.kernel, NativeAttention)
    passes.watch()
    before = passes.spent()
    scene.logits([0], [0], [200], [199])
    spent = passes.spent()
    assert set(spent) == set(PARTS)
    assert not any(before.values())
    assert {name for name, seconds in spent.items() if not seconds} == {"router", "experts"}


def one_by_one(
    scene: Scene, row: int, start: int, tokens: list[int], count: int, closed: np.ndarray, least: float
) -> list[int]:
    """Return the most likely open tokens after a text, up to the first that is less likely than a probability, from a pass for each."""
    found: list[int] = []
    for _ in range(count):
        scene.rows.tokens[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        logits = scene.logits([row], [start], [len(tokens)], [len(tokens) - 1])[0]
        open_logits = logits.masked_fill(torch.from_numpy(closed), -torch.inf)
        if float(open_logits.softmax(-1).max()) < least:
            break
        found.append(int(open_logits.argmax()))
        start, tokens = start + len(tokens), found[-1:]
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("ends", [False, True], ids=["all", "likely"])
def test_guesses_are_the_most_likely_tokens_computed_one_by_one(kind, closes, ends):
    scene, other = Scene(kind), Scene(kind)
    texts, starts, counts = {2: 5, 0: 1, 1: 17}, [0, 0, 0], [1, 6, 3]
    given = {row: scene.rows.tokens[row, :length].tolist() for row, length in texts.items()}
    vocab_size = scene.logits([0], [0], [1], [0]).shape[1]
    closed = np.zeros(vocab_size, np.bool_)
    if closes:
        for row, length in texts.items():
            closed[int(scene.logits([row], [0], [length], [length - 1])[0].argmax())] = True
    least = 0.2 if ends else 0.0
    expected = [one_by_one(other, row, 0, given[row], n, closed, least) for row, n in zip(texts, counts, strict=True)]
    before = scene.content()
    none = np.empty(0, np.int32)
    with torch.inference_mode():
        found = scene.runner.guess(
            GuessBatch(
                rows=np.array(list(texts), np.int32),
                starts=np.array(starts, np.int32),
                query_lens=np.array(list(texts.values()), np.int32),
                token_ids=np.concatenate([given[row] for row in texts]).astype(np.int32),
                num_guesses=np.array(counts, np.int32),
                table_writes=TableWrites(rows=none, columns=none, block_ids=none),
                closed=closed if closes else None,
                min_probability=least,
            )
        )
    assert [row[row >= 0].tolist() for row in found] == expected
    assert (sum(map(len, expected)) < sum(counts)) == ends
    # Keys and values of a sequence with all its guesses are left alone: behind its last one there may be no block.
    changed = {
        int(block)
        for was, now in zip(before, scene.content(), strict=True)
        for block in (was != now).flatten(1).any(1).nonzero()
    }
    reached = {
        int(block)
        for (row, length), n in zip(texts.items(), counts, strict=True)
        for block in scene.rows.tables[row, : -(-(length + n - 1) // BLOCK_SIZE)]
    }
    assert changed <= reached
