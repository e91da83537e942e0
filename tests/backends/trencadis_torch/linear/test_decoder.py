from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from support.backends import families, tiny_models
from support.backends.decoder_scene import BLOCK_SIZE, CPU, Scene, fused_model
from support.backends.held_forms import FORMS
from support.backends.passes import make_pass
from trencadis.interfaces import GuessBatch, LayerGate
from trencadis.records import TableWrites
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.linear import decoder_pass
from trencadis_torch.linear.angles import Angles, Frequencies, ModuleAngles, simplified
from trencadis_torch.linear.decoder import attach, decoder_of, read_decoder
from trencadis_torch.linear.decoder_pass import DecoderPasses, queries_together
from trencadis_torch.linear.native import native
from trencadis_torch.linear.native_decoder import PARTS, native_decoder
from trencadis_torch.linear.replacement import replace_modules
from trencadis_torch.linear.structure import OtherwiseError
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.runner import GatedPass

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


def replaced(kind, **settings):
    adapter.register()
    model = tiny_models.make_model(kind)
    for name, value in settings.items():
        setattr(model.config, name, value)
    replace_modules(model, native=native())
    return model


def read(model):
    return read_decoder(model, native_decoder(), panel=native().panel)


def test_sizes_are_the_models():
    model = replaced("qwen3")
    found, config = read(model), model.config
    assert (found.vocab_size, found.intermediate_size) == (config.vocab_size, config.intermediate_size)
    assert found.structure.num_layers == config.num_hidden_layers == len(found.attention)
    assert [one.index for one in found.attention] == list(range(config.num_hidden_layers))
    one = found.attention[0]
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert (one.num_heads, one.num_kv_heads, one.head_dim) == heads
    assert one.options.scale == pytest.approx(config.head_dim**-0.5)


def scaled_logits(model):
    plain = model.forward

    def forward(**options):
        made = plain(**options)
        made.logits = made.logits * torch.arange(131.0)
        return made

    model.forward = forward


def scaled(module, factor):
    """What a module gives is multiplied in its layer."""
    module.register_forward_hook(
        lambda _, __, made: (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "its attention is its own in 3 of 3 layers"),
    ],
)
def test_a_decoder_that_is_not_plain_is_left_with_the_reason(kind, reason):
    with pytest.raises(OtherwiseError) as caught:
        read(replaced(kind))
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: setattr(model.model.layers[1], "mlp", nn.Identity()),
            "a layer has not one attention and one MLP",
        ),
        (lambda model: model.model.layers[1].register_forward_hook(lambda _, __, y: y + 1), "something else is added"),
        (
            lambda model: model.model.layers[1].register_forward_pre_hook(lambda _, x: (x[0] + 1,)),
            "something happens between its layers",
        ),
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "its angles are dynamic"),
        (lambda model: setattr(model, "lm_head", nn.Linear(48, 131)), "its output projection is not packed"),
        (lambda model: model.model.layers[0].self_attn.options.update(dropout=1), "its attention takes"),
        (lambda model: model.model.layers[0].self_attn.options.update(more=1), "its attention takes"),
        (lambda model: setattr(model.model, "norm", nn.Identity()), "its last norm is its own"),
        (lambda model: scaled(model.model.embed_tokens, torch.arange(48.0)), "its embeddings are not"),
        (lambda model: scaled_logits(model), "its logits are not those"),
    ],
)
def test_a_model_that_differs_in_one_place_is_left_with_the_reason(change, reason):
    model = replaced("llama")
    assert read(model).structure.num_layers == 3
    change(model)
    with pytest.raises(OtherwiseError, match=reason):
        read(model)


def test_weights_are_held_once():
    model, _ = fused_model("llama", "float32")
    decoder = decoder_of(model)
    first = model.model.layers[0]
    assert decoder.structure.layers[0].qkv.weights == first.self_attn.qkv.packed.weights.data_ptr()
    assert decoder.structure.layers[0].attention_norm.weight == first.input_layernorm.weight.data_ptr()


def test_shared_embeddings_are_read_out_of_the_output_projection():
    adapter.register()
    model = tiny_models.make_model("llama")
    model.config.tie_word_embeddings = True
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    replace_modules(model, native=native())
    found = read(model)
    assert found.structure.embeddings is None
    assert found.structure.num_embeddings == 131


@pytest.mark.parametrize("as_it_is", [False, True])
def test_angles_are_those_of_the_models_own_module_however_far_they_were_computed_at_once(as_it_is):
    rotary = tiny_models.make_model("llama").model.rotary_emb
    source = ModuleAngles(rotary, (), spread=False, once=False)
    angles = Angles(source if as_it_is else simplified(source, 512))
    assert isinstance(angles.source, ModuleAngles if as_it_is else Frequencies)
    for reach in (3, 256, 257, 700):
        angles.reach(reach)
        assert len(angles.cosines) >= reach
        expected = rotary(torch.empty(1, 1, 1), torch.arange(reach)[None])
        assert torch.equal(angles.cosines[:reach], expected[0][0])
        assert torch.equal(angles.sines[:reach], expected[1][0])


def test_angles_that_are_no_multiples_of_the_position_stay_their_modules_own():
    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

        def forward(self, x, positions):
            turns = positions[..., None].float().clamp(max=900) * self.frequencies
            both = torch.cat([turns, turns], -1)
            return both.cos(), both.sin()

    source = ModuleAngles(Bent(), (), spread=False, once=False)
    assert simplified(source, 4096) is source
    assert isinstance(simplified(source, 800), Frequencies)


def test_a_model_goes_layer_by_layer_again_when_nothing_is_attached():
    model, layers = fused_model("llama", "float32")
    decoder = decoder_of(model)
    try:
        attach(model, None)
        assert decoder_of(model) is None
        assert Scene("llama").runner._decoder is None
    finally:
        attach(model, decoder)
    assert Scene("llama").runner._decoder is not None
    assert choose_kernel("native", device=CPU, layout="ragged", layers=layers) is not None


def test_what_nothing_was_attached_to_has_no_decoder():
    model = tiny_models.make_model("gpt2")
    assert decoder_of(model) is None
    assert len(attention_layers(model)) == 3


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

    inputs = scene.runner.inputs(make_pass(None, [0], [0], [7]))
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
