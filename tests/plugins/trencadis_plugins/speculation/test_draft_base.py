from __future__ import annotations

import random
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from support.strategies.draft_models import (
    LIMITS,
    VOCAB_SIZE,
    context_of,
    draft_model,
    greedy,
    logits_behind,
    runs,
    save_llama,
)
from trencadis.errors import ConfigValueError, ContractError, InvalidRequestError
from trencadis.interfaces import Vocabulary
from trencadis.records import Bucket, Request, SamplingParams, Shape
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.speculation import draft_view


def vocabulary(tokens: list[bytes], *, eos: int | None = None) -> Vocabulary:
    index = {token: i for i, token in enumerate(tokens)}
    return Vocabulary(
        tokens=tuple(tokens),
        special_token_ids=frozenset() if eos is None else frozenset({eos}),
        eos_token_id=eos,
        encode=lambda text: tuple(index[char.encode()] for char in text),
    )


def test_the_model_is_loaded_when_its_memory_is_asked_for_and_freed_at_the_end(tiny: Path) -> None:
    made = draft_model(tiny, limits=None)
    assert made._backend is None
    assert made.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, floats, bytes each
    backend = made._backend
    made.allocate(LIMITS)
    assert made._backend is backend
    made.propose(draft_view([[3, 4]]))
    made.close()
    made.close()
    with pytest.raises(ContractError, match="after close"):
        made.propose(draft_view([[3, 4]]))


def test_the_cache_is_smaller_by_what_the_draft_model_keeps(tiny: Path) -> None:
    backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256)
    engine = make_engine(speculator=draft_model(tiny, limits=None), backend=backend, num_blocks=64)
    engine.close()  # of the speculator, too
    plain = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256)
    assert drain(make_engine(backend=plain, num_blocks=64)) == {}


def test_threads_of_the_target_stay_as_they_are(tiny: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        draft_model(tiny)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_sequence_that_ends_gives_its_blocks_back(tiny: Path) -> None:
    made = draft_model(tiny)
    made.on_finished(slot=9, token_ids=np.array([1], np.int32))
    before = made.ready.memory.num_free_blocks
    made.propose(draft_view([[3] * 30, [4] * 5]))
    assert made.ready.memory.num_free_blocks < before
    for slot in (0, 1):
        made.on_finished(slot=slot, token_ids=np.array([1], np.int32))
    assert made.ready.memory.num_free_blocks == before


def test_sequences_that_find_no_block_get_no_drafts_and_the_others_get_theirs(tiny: Path) -> None:
    made = draft_model(tiny, limits=attrs.evolve(LIMITS, num_blocks=12))
    histories = [[3 + i] * 30 for i in range(3)]
    assert [len(run) for run in runs(made.propose(draft_view(histories)))] == [4, 0, 0]
    # Who was not drafted for in the call gives way.
    assert runs(made.propose(draft_view([histories[2]], slots=[2]))) == [greedy(tiny, histories[2], 4)]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("budget", [5, 16, 64])
@pytest.mark.parametrize("options", [{}, {"layout": "padded"}])
def test_drafts_do_not_depend_on_the_budget_or_the_layout(tiny: Path, budget: int, options: dict[str, str]) -> None:
    context = context_of(**options)
    made = draft_model(
        tiny,
        context=attrs.evolve(
            context, make=lambda noun, name: Exact() if noun == "bucketing" else context.make(noun, name)
        ),
        limits=attrs.evolve(LIMITS, max_num_batched_tokens=budget),
    )
    rng = random.Random(budget)
    histories = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
    requests = _greedy(6)
    for _ in range(4):
        found = runs(made.propose(draft_view(histories, requests=requests)))
        assert found == [greedy(tiny, history, 4) for history in histories]
        for history, run in zip(histories, found, strict=True):
            history.extend([*run[: rng.randrange(5)], rng.randrange(3, VOCAB_SIZE)])


class Exact:
    """A bucketing of which nothing is prepared."""

    def buckets(self, limits: object) -> tuple[()]:
        return ()

    def bucket_for(self, shape: object) -> object:
        assert isinstance(shape, Shape)
        return Bucket.of(shape)


@pytest.mark.parametrize(("call", "num_new"), [("submit", 1), ("guess", 1), ("submit", 80)])
def test_a_failed_forward_leaves_no_false_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, call: str, num_new: int
) -> None:
    made = draft_model(tiny)
    runner, history, request = made.ready.runner, [5, 6, 7, 8], _greedy(1)
    new = [3 + i % 90 for i in range(num_new)]  # 80: more than a forward takes
    if call == "submit":
        runner._guess = None  # token by token
    made.propose(draft_view([history], requests=request))
    with monkeypatch.context() as broken:
        broken.setattr(runner, "_backend", Broken())
        if call == "guess":
            broken.setattr(runner, "_guess", Broken().guess)
        with pytest.raises(RuntimeError, match="the device is gone"):
            made.propose(draft_view([history + new], requests=request))
    assert runs(made.propose(draft_view([[*history, *new, 9]], requests=request))) == [
        greedy(tiny, [*history, *new, 9], 4)
    ]


class Broken:
    def submit(self, batch: object) -> None:
        raise RuntimeError("the device is gone")

    guess = submit


@pytest.mark.parametrize("lacking", ["target", "draft"])
def test_model_without_a_tokenizer_ends_the_start_and_names_the_setting(tiny: Path, lacking: str) -> None:
    def none() -> Vocabulary:
        raise InvalidRequestError("the vocabulary needs a tokenizer, and model.tokenizer is none.", hint="Give ids.")

    vocabularies = {"target": vocabulary([b"a"]), "draft": vocabulary([b"a"])}
    context = context_of(vocabularies=vocabularies)
    named = context.named_model
    if lacking == "target":
        context = attrs.evolve(context, vocabulary=none)
    else:
        context = attrs.evolve(context, named_model=lambda path: attrs.evolve(named(path), vocabulary=none))
    with pytest.raises(
        ConfigValueError, match=r"\[speculation\] the draft model .* has tokenizer = \"auto\""
    ) as raised:
        draft_model(tiny, tokenizer="auto", context=context)
    assert 'the vocabulary needs a tokenizer, and model.tokenizer is none. Set tokenizer = "same"' in str(raised.value)


def test_a_draft_model_with_another_tokenizer_drafts_what_both_know(tmp_path: Path) -> None:
    # Draft token i is target token 96 - i; four of the draft model's tokens are none of the target's, and two the other way.
    path = save_llama(tmp_path / "other", seed=11)
    names = [chr(0x100 + i).encode() for i in range(VOCAB_SIZE)]
    target = [*reversed(names[4:]), b"\xc4\x80\xc4\x81", b"\xff", b"", b""]
    vocabularies = {"target": vocabulary(target), "draft": vocabulary(names)}
    to_draft = {i: names.index(name) for i, name in enumerate(target[:93])}
    to_target = {ours: theirs for theirs, ours in to_draft.items()}
    made = draft_model(path, tokenizer="auto", context=context_of(vocabularies=vocabularies), sampling="probabilistic")
    history = [5, 60, 93, 7, 92]  # 93 is two tokens of the draft model, which the target does not have alone
    text = [to_draft[5], to_draft[60], 0, 1, to_draft[7], to_draft[92]]
    drafts = made.propose(draft_view([history, [5, 94]], requests=_greedy(2)))
    found, cannot = runs(drafts)
    assert cannot == [], "no text of the draft model is written like that"
    expected = []
    for _ in range(4):
        logits = logits_behind(path, text)[0].clone()
        logits[:4] = -torch.inf
        text.append(int(logits.argmax()))
        expected.append(to_target[text[-1]])
    assert found == expected


def test_distributions_of_another_vocabulary_are_distributions_of_the_target(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "other", seed=11)
    names = [chr(0x100 + i).encode() for i in range(VOCAB_SIZE)]
    target = list(reversed(names))
    context = context_of(vocabularies={"target": vocabulary(target), "draft": vocabulary(names)})
    made = draft_model(path, tokenizer="auto", context=context, sampling="probabilistic")
    params = SamplingParams(temperature=1.5)
    drafts = made.propose(draft_view([[5, 60]], requests=[attrs.evolve(one, params=params) for one in _greedy(1)]))
    assert drafts.distributions is not None
    distribution = (logits_behind(path, [96 - 5, 96 - 60])[0] / 1.5).softmax(-1).flip(0)
    assert torch.allclose(
        drafts.distributions.probabilities[int(drafts.distributions.rows[0])], distribution, atol=1e-5
    )


def _greedy(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0)
    return [Request(request_id=str(i), prompt_token_ids=(1,), params=params) for i in range(count)]
