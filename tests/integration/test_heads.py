"""Heads that draft from the model's hidden states: token for token what a slow reference drafts, and never another text."""

from __future__ import annotations

import functools
import itertools
import logging
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from support.strategies.head_engines import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Asked,
    check_trees,
    open_engine,
    serve,
    texts,
    tree_tables,
)
from support.strategies.heads import reference_drafts, reference_logprobs, save_head, save_verifier
from trencadis import LLM
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.errors import CapabilityError, ConfigValueError, TrencadisError
from trencadis.interfaces import HeadBatch
from trencadis.records import Request, SamplingParams


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module", params=[False, True], ids=["speculators", "own format"])
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), own_format=request.param)


def check_drafts(asked: Asked, verifier: Path, head: Path, *, every: int) -> None:
    assert asked.drafts
    for tokens, drafts in asked.drafts[::every]:
        assert drafts == reference_drafts(verifier, head, tokens, len(drafts)), len(tokens)


@pytest.mark.parametrize("layers", ["in one call", "layer by layer"])
def test_drafts_are_those_of_the_reference(verifier: Path, head: Path, layers: str) -> None:
    """Prompts in chunks, several sequences side by side, drafts that stand and fall."""
    backend = {"torch": {"pack": "auto" if layers == "in one call" else "off"}}
    engine = open_engine(verifier, head, backend=backend)
    assert (engine._executor._rank.backend._runner._decoder is not None) is (layers == "in one call")
    asked = Asked(engine)
    found = texts(serve(engine, GREEDY))
    engine.close()
    plain = open_engine(verifier, None, backend=backend)
    assert found == texts(serve(plain, GREEDY))
    plain.close()
    check_drafts(asked, verifier, head, every=7)
    assert not asked.num_missing


@pytest.mark.representatives(4)
@pytest.mark.parametrize("scene", ["float32", "bfloat16", "shared embeddings", "another length each"])
def test_drafts_made_in_one_call_are_those_made_one_by_one(tmp_path: Path, scene: str) -> None:
    """Texts longer than what attention weighs together; caches that are read as they are and decoded ones."""
    verifier = save_verifier(tmp_path / "verifier", tie_word_embeddings=scene == "shared embeddings")
    head = save_head(tmp_path / "head", own_format=scene == "shared embeddings")
    drafts = []
    for in_one_call in (True, False):
        kept = "bfloat16" if scene == "bfloat16" else "auto"
        engine = open_engine(verifier, head, backend={"torch": {"kv_dtype": kept}})
        drafter = engine._executor._rank.backend._drafter
        assert drafter._head.loop is not None
        if not in_one_call:
            drafter._head.loop = None
        if scene == "another length each":
            length = engine._scheduler.drafting._length.strategy
            length.choose = lambda view: 1 + (view.slots + len(view.slots)) % view.max_draft_tokens
        asked = Asked(engine)
        serve(engine, attrs.evolve(GREEDY, max_tokens=90))
        engine.close()
        drafts.append(asked.drafts)
    assert len(drafts[0]) > 200
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("in_one_call", [True, False])
def test_drafts_end_before_the_first_that_is_unlikely(verifier: Path, tmp_path: Path, in_one_call: bool) -> None:
    """Sequences that have all theirs make room for the others, which go on with their own."""
    head, least = save_head(tmp_path), 0.4
    tables = {"name": "head", "head": {"max_draft_tokens": 4, "min_probability": least}}
    engine = open_engine(verifier, head, speculation=tables)
    if not in_one_call:
        engine._executor._rank.backend._drafter._head.loop = None
    asked = Asked(engine)
    serve(engine, GREEDY)
    engine.close()
    check_drafts(asked, verifier, head, every=5)
    assert {len(drafts) for _, drafts in asked.drafts} >= {1, 2, 3}
    assert asked.num_missing
    for tokens, drafts in asked.drafts[::5]:
        chances = [
            float(reference_logprobs(verifier, head, tokens, drafts[:i]).max().exp()) for i in range(len(drafts) + 1)
        ]
        assert min(chances[:-1]) >= least
        assert len(drafts) == 4 or chances[-1] < least


@pytest.mark.parametrize("keeps_normed", [False, True])
def test_the_residual_is_what_the_configuration_says(verifier: Path, tmp_path: Path, keeps_normed: bool) -> None:
    head = save_head(tmp_path, norm_before_residual=keeps_normed)
    engine = open_engine(verifier, head)
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:1])
    engine.close()
    check_drafts(asked, verifier, head, every=3)


def test_a_head_that_reads_the_model_s_embeddings_and_output_needs_no_table(verifier: Path, tmp_path: Path) -> None:
    """What the files lack is the model's own; drafts are of its tokens."""

    def without(tensors: dict[str, Any]) -> None:
        for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
            tensors.pop(name)

    engine = open_engine(verifier, save_head(tmp_path / "without", change=without))
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()

    def as_the_model(tensors: dict[str, Any]) -> None:
        import torch
        from safetensors.torch import load_file

        own = load_file(verifier / "model.safetensors")
        tensors["embed_tokens.weight"], tensors["lm_head.weight"] = (
            own["model.embed_tokens.weight"].clone(),
            own["lm_head.weight"].clone(),
        )
        tensors["d2t"] = torch.zeros(97, dtype=torch.int64)
        tensors.pop("t2d")

    check_drafts(asked, verifier, save_head(tmp_path / "with", change=as_the_model), every=5)


@pytest.mark.parametrize("rule", ["match", "token", "block", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_is_that_of_no_speculation(verifier: Path, head: Path, rule: str, params: SamplingParams) -> None:
    """Of the rules that draw, a seed's text is another one by their nature: theirs is compared where there is nothing to draw."""
    if params is SEEDED and rule != "match":
        params = SamplingParams(temperature=0.7, top_k=1, seed=5, max_tokens=24, ignore_eos=True)
    engine = open_engine(verifier, head, acceptance={"name": rule})
    found = texts(serve(engine, params))
    assert engine.totals.num_draft_tokens
    engine.close()
    plain = open_engine(verifier, None)
    assert found == texts(serve(plain, params))
    plain.close()


SCENES: dict[str, dict[str, Any]] = {
    "recomputed": {"cache": {"num_blocks": 50}},
    "swapped": {"cache": {"num_blocks": 50, "swap_bytes": 1 << 24}, "engine": {"preemption": "swap"}},
    "one at a time": {"engine": {"max_num_seqs": 1}},
    "bfloat16 keys": {"backend": {"torch": {"kv_dtype": "bfloat16"}}},
}


@pytest.mark.representatives(4)
@pytest.mark.parametrize("scene", SCENES)
def test_preemption_and_swaps_carry_the_head_s_keys_and_values(verifier: Path, tmp_path: Path, scene: str) -> None:
    head = save_head(tmp_path)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine = open_engine(verifier, head, **SCENES[scene])
    asked = Asked(engine)
    ends = serve(engine, long)
    engine.close()
    plain = open_engine(verifier, None, **SCENES[scene])
    assert texts(ends) == texts(serve(plain, long))
    plain.close()
    if scene in ("recomputed", "swapped"):
        assert any(end.num_preemptions for end in ends.values()), "the cache was too large to preempt"
    if scene != "bfloat16 keys":
        check_drafts(asked, verifier, head, every=9)


def test_a_prefix_hit_brings_the_head_s_keys_and_values(verifier: Path, head: Path) -> None:
    """The same prompt again: all but its last block is found, the head's part of it too, and its drafts are those of before."""
    engine = open_engine(verifier, head)
    asked = Asked(engine)
    first = serve(engine, GREEDY, [PROMPTS[1]])
    before, asked.drafts = list(asked.drafts), []
    again = serve(engine, GREEDY, [PROMPTS[1]])
    engine.close()
    assert again["0"].num_cached_tokens >= 36
    assert texts(again) == texts(first)
    assert asked.drafts == before
    check_drafts(asked, verifier, head, every=5)


def test_a_step_that_did_not_compute_the_newest_position_has_no_drafts(verifier: Path, head: Path) -> None:
    engine = open_engine(verifier, head)
    engine.add(Request(request_id="a", prompt_token_ids=tuple(PROMPTS[0]), params=GREEDY))
    engine.step()
    ints = [np.array(one, np.int32) for one in ([0, 0, 3], [4, 9, 4], [2, 3, 3])]
    found = engine._executor.draft(HeadBatch(rows=ints[0], positions=ints[1], num_drafts=ints[2]))  # type: ignore[attr-defined]
    assert found.shape == (3, 3)
    assert (found[0] >= 0).tolist() == [True, True, False]
    assert (found[1:] == -1).all()
    engine.close()


def test_a_draft_length_may_rest_and_the_head_goes_on_where_it_was(verifier: Path, head: Path) -> None:
    """Its keys and values are written in every step, drafted for or not."""
    engine = open_engine(verifier, head)
    asked = Asked(engine)
    length = engine._scheduler.drafting._length.strategy
    steps = itertools.count()
    inner = length.choose
    length.choose = lambda view: inner(view) * (next(steps) % 3 == 2)  # type: ignore[method-assign]
    length.rest = lambda: 0  # type: ignore[method-assign]
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    check_drafts(asked, verifier, head, every=2)


@pytest.mark.parametrize("tree", ["none", "top_k"])
def test_the_demo_s_head_drafts_what_the_demo_writes(tree: str) -> None:
    """It was taught on answers to other prompts; the quantities are far below those of its card."""
    prompt = [{"role": "user", "content": "Tell me of a journey over the sea, and of those who came home."}]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    found = []
    for name in ("none", "head"):
        with LLM(
            model={"path": "demo", "head": "" if name == "none" else "demo-head"},
            speculation={"name": name, "head": {"tree": tree, "max_draft_tokens": 6, "tree_depth": 6}},
            draft_length={"name": "fixed"},
            cache={"num_blocks": 64},
        ) as llm:
            (output,) = llm.chat([prompt], params)
            found.append((output.outputs[0].token_ids, llm.totals()["num_steps"]))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= 64 / 2


# ------------------------------------------------------------------------------------------------------------- trees


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    ("tree", "pack"), [("top_k", "auto"), ("top_k", "off"), ("static", "auto"), ("sequoia", "auto")]
)
def test_trees_are_those_of_the_reference(verifier: Path, tmp_path: Path, tree: str, pack: str) -> None:
    """A tree's nodes are the likeliest tokens after those before, computed along each path alone; accepted ones are read on from."""
    head, backend = save_head(tmp_path), {"torch": {"pack": pack}}
    engine = open_engine(verifier, head, backend=backend, **tree_tables(tree))
    asked = Asked(engine)
    found = texts(serve(engine, GREEDY))
    engine.close()
    plain = open_engine(verifier, None, backend=backend)
    assert found == texts(serve(plain, GREEDY))
    plain.close()
    check_trees(asked, tree, functools.partial(reference_logprobs, verifier, head), every=5)
    assert not asked.num_missing


@pytest.mark.parametrize("rule", ["match", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_with_trees_is_that_of_no_speculation(
    verifier: Path, head: Path, rule: str, params: SamplingParams
) -> None:
    """Of the rule that draws, a seed's text is another one by its nature: it is compared where there is nothing to draw."""
    if params is SEEDED and rule != "match":
        params = SamplingParams(temperature=0.7, top_k=1, seed=5, max_tokens=24, ignore_eos=True)
    engine = open_engine(verifier, head, **tree_tables("top_k", rule))
    found = texts(serve(engine, params))
    assert engine.totals.num_draft_tokens
    engine.close()
    plain = open_engine(verifier, None)
    assert found == texts(serve(plain, params))
    plain.close()


@pytest.mark.representatives(3)
@pytest.mark.parametrize("scene", ["recomputed", "swapped", "one at a time"])
def test_trees_stand_preemption_and_prefix_hits(verifier: Path, tmp_path: Path, scene: str) -> None:
    head, long = save_head(tmp_path), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine = open_engine(verifier, head, **SCENES[scene], **tree_tables("top_k"))
    asked = Asked(engine)
    ends = serve(engine, long)
    again = serve(engine, long, PROMPTS[3:])
    engine.close()
    plain = open_engine(verifier, None, **SCENES[scene])
    assert texts(ends) == texts(serve(plain, long))
    plain.close()
    assert texts(again) == texts(ends)[3:]
    if scene == "one at a time":
        assert again["0"].num_cached_tokens >= 64
    else:
        assert any(end.num_preemptions for end in ends.values()), "the cache was too large to preempt"
    check_trees(asked, "top_k", functools.partial(reference_logprobs, verifier, head), every=9)


def test_what_a_tree_left_serves_the_next_chain(verifier: Path, tmp_path: Path) -> None:
    """The head's keys and values of accepted nodes lie where those of a chain would: a chain drafts from them what it drafts anyway."""
    head = save_head(tmp_path)
    engine = open_engine(verifier, head, **tree_tables("static"))
    speculator, steps = engine._scheduler.drafting._speculator.strategy, itertools.count()
    inner = speculator.propose
    speculator.propose = lambda view: inner(  # type: ignore[method-assign]
        attrs.evolve(view, linear_only=np.ones_like(view.linear_only) if next(steps) % 2 else view.linear_only)
    )
    engine._scheduler.drafting._speculator.strategy = speculator
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    chains = [
        one
        for one, parents in zip(asked.drafts, asked.parents, strict=True)
        if parents == [*range(-1, len(parents) - 1)]
    ]
    assert len(chains) > 10
    for tokens, drafts in chains[::4]:
        assert drafts == reference_drafts(verifier, head, tokens, len(drafts))


# ---------------------------------------------------------------------------------------------------------- refusals


def broken(name: str) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        if name == "missing":
            tensors.pop("layers.0.self_attn.k_proj.weight")
        elif name == "unknown":
            tensors["layers.0.self_attn.q_norm.weight"] = tensors["norm.weight"].clone()
        elif name == "shape":
            tensors["fc.weight"] = tensors["fc.weight"][:, :40].clone()
        elif name == "tokens":
            tensors["d2t"] = tensors["d2t"] + 90

    return change


@pytest.mark.representatives(9)
@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        ("missing", {}, "lack ['layers.0.self_attn.k_proj.weight']"),
        ("unknown", {}, "q_norm.weight'], which are not known"),
        ("shape", {}, "fc.weight is (32, 40)"),
        ("tokens", {}, "d2t names tokens beyond the model's 97"),
        ("", {"speculators_model_type": "dflash"}, "which is no EAGLE-3"),
        ("", {"norm_before_fc": True}, "norm_before_fc"),
        ("", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc reads 3 hidden states"),
        ("", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "the model has layers 0 to 3"),
        ("", {"eagle_aux_hidden_state_layer_ids": None}, "the layers [2, 2, 1]"),
    ],
)
def test_a_head_that_is_another_one_is_refused(
    verifier: Path, tmp_path: Path, change: str, settings: dict[str, Any], says: str
) -> None:
    head = save_head(tmp_path, change=broken(change), **settings)
    with pytest.raises(TrencadisError) as raised:
        open_engine(verifier, head)
    assert "model.head" in str(raised.value)
    assert says in str(raised.value)


def test_no_head_and_no_directory_are_said(verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(TrencadisError, match=r"no config\.json and \*\.safetensors there"):
        open_engine(verifier, tmp_path)
    config, registry = configure(
        {"path": str(verifier), "tokenizer": "none"}, config_file=None, tables={"speculation": {"name": "head"}}
    )
    with pytest.raises(CapabilityError, match=r"(?s)none was loaded.*model\.head"):
        build_engine(config, registry=registry)


def test_a_padded_layout_is_refused(verifier: Path, head: Path) -> None:
    with pytest.raises(ConfigValueError, match=r'model\.head does not go with \[backend\.torch\] layout = "padded"'):
        open_engine(verifier, head, backend={"torch": {"layout": "padded"}}, bucketing={"name": "exponential"})


def test_the_log_says_what_the_head_reads(verifier: Path, head: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.torch"):
        open_engine(verifier, head).close()
    assert "EAGLE-3, from what the layers 1, 2, 3 begin with" in caplog.text


def test_a_store_brings_the_head_s_keys_and_values_to_another_engine(verifier: Path, tmp_path: Path) -> None:
    """Blocks on disk hold the head's layer beside the model's: the second engine computes no prompt, and drafts the same."""
    head = save_head(tmp_path / "head")
    store = {"kv_connector": {"name": "filesystem", "filesystem": {"path": str(tmp_path / "store")}}}
    drafts, cached = [], []
    for _ in range(2):
        engine = open_engine(verifier, head, **store)
        asked = Asked(engine)
        ends = serve(engine, GREEDY, [PROMPTS[3]])
        engine.close()
        drafts.append(asked.drafts)
        cached.append(ends["0"].num_cached_tokens)
        check_drafts(asked, verifier, head, every=6)
    assert cached[0] == 0
    assert cached[1] >= 60
    assert drafts[1][-3:] == drafts[0][-3:]


def test_a_store_knows_blocks_with_a_head_from_those_without(verifier: Path, tmp_path: Path) -> None:
    store = {"kv_connector": {"name": "filesystem", "filesystem": {"path": str(tmp_path / "store")}}}
    for head in (None, save_head(tmp_path / "head"), save_head(tmp_path / "other", norm_before_residual=False)):
        engine = open_engine(verifier, head, **store)
        ends = serve(engine, GREEDY, [PROMPTS[3]])
        engine.close()
        assert ends["0"].num_cached_tokens == 0
