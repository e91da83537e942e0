"""Heads that draft from the model's hidden states: token for token what a slow reference drafts, and never another text.

``speculators`` and ``own format`` are EAGLE-3 heads of a small Llama; the others are MTP layers of checkpoints of their own.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from support.backends.quantised_checkpoints import FORMATS, quantise_checkpoint
from support.strategies import heads, mtp
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
from support.strategies.heads import save_head, save_verifier
from support.strategies.mtp import NUM_LAYERS, save_mtp
from trencadis import LLM
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.errors import CapabilityError, TrencadisError
from trencadis.interfaces import HeadBatch
from trencadis.records import FinishedSequence, Request, SamplingParams

LONG = attrs.evolve(GREEDY, max_tokens=60)
MTP = ("glm4_moe", "deepseek_v3")
PLACE = f"model.layers.{NUM_LAYERS}"


@attrs.frozen
class Pair:
    """A model and its head: as they are opened, and the log-probabilities after a text and drafts by the slow reference."""

    model: Path
    head: Path | str
    logprobs: Callable[[list[int], list[int]], torch.Tensor]

    def open(self, **tables: Any) -> tuple[Any, Asked]:
        engine = open_engine(self.model, self.head, **tables)
        return engine, Asked(engine)

    def serve(
        self, params: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS, **tables: Any
    ) -> tuple[Asked, dict[str, FinishedSequence]]:
        """Serve prompts; the texts must be those of an engine that drafts nothing."""
        engine, asked = self.open(**tables)
        ends = serve(engine, params, prompts)
        engine.close()
        assert texts(ends) == plain_texts(self.model, params, prompts, backend=tables.get("backend", {}))
        return asked, ends

    def check(self, asked: Asked, *, every: int) -> None:
        assert asked.drafts
        for tokens, drafts in asked.drafts[::every]:
            for count, draft in enumerate(drafts):
                assert draft == self.logprobs(tokens, drafts[:count]).argmax(), len(tokens)


PLAIN: dict[str, list[list[int]]] = {}


def plain_texts(model: Path, params: SamplingParams, prompts: list[list[int]], **backend: Any) -> list[list[int]]:
    """Return the texts without drafts, which depend on nothing but these; each is made once."""
    key = repr((model, params, prompts, backend))
    if key not in PLAIN:
        engine = open_engine(model, None, **backend)
        PLAIN[key] = texts(serve(engine, params, prompts))
        engine.close()
    return PLAIN[key]


def eagle(model: Path, head: Path) -> Pair:
    return Pair(model, head, functools.partial(heads.reference_logprobs, model, head))


def layer(model: Path, *, reads: Path | None = None) -> Pair:
    """Return the pair of a checkpoint's MTP layer, whose reference reads the same files or others."""
    return Pair(model, "mtp", functools.partial(mtp.reference_logprobs, reads or model))


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @functools.cache
    def make(kind: str) -> Pair:
        path = tmp_path_factory.mktemp("pair")
        if kind in MTP:
            return layer(save_mtp(path, kind, num_shards=3))
        return eagle(save_verifier(path / "model"), save_head(path / "head", own_format=kind == "own format"))

    return make


@pytest.fixture(scope="module")
def pair(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("speculators")


@pytest.mark.representatives(1, ci=4)
@pytest.mark.parametrize("kind", ["speculators", "own format", *MTP])
@pytest.mark.parametrize("pack", ["auto", "off"])
def test_drafts_are_those_of_the_reference(pair_of: Callable[[str], Pair], kind: str, pack: str) -> None:
    """Prompts in chunks, several sequences side by side, drafts that stand and fall; layers in one call or one by one."""
    pair, tables = pair_of(kind), {"backend": {"torch": {"pack": pack}}}
    engine, _ = pair.open(**tables)
    is_one_call = engine._executor._rank.backend._runner._decoder is not None
    engine.close()
    assert is_one_call is (pack == "auto" and kind != "deepseek_v3")
    asked, _ = pair.serve(**tables)
    pair.check(asked, every=11)
    assert not asked.num_missing


@pytest.mark.representatives(1, ci=4)
@pytest.mark.parametrize(
    ("kind", "tree", "pack", "params"),
    [
        ("speculators", "top_k", "auto", GREEDY),
        ("speculators", "top_k", "off", SEEDED),
        ("speculators", "static", "auto", GREEDY),
        ("speculators", "sequoia", "auto", SEEDED),
        ("glm4_moe", "top_k", "auto", SEEDED),
        ("glm4_moe", "static", "auto", GREEDY),
        ("deepseek_v3", "top_k", "auto", GREEDY),
    ],
)
def test_trees_are_those_of_the_reference(
    pair_of: Callable[[str], Pair], kind: str, tree: str, pack: str, params: SamplingParams
) -> None:
    """A tree's nodes are the likeliest tokens after those before, computed along each path alone; accepted ones are read on from."""
    pair = pair_of(kind)
    asked, _ = pair.serve(params, backend={"torch": {"pack": pack}}, **tree_tables(tree))
    check_trees(asked, tree, pair.logprobs, every=9)
    assert not asked.num_missing


@pytest.mark.representatives(1, ci=4)
@pytest.mark.parametrize("scene", ["float32", "bfloat16", "shared embeddings", "another length each"])
def test_drafts_made_in_one_call_are_those_made_one_by_one(tmp_path: Path, scene: str) -> None:
    """Texts longer than what attention weighs together; caches that are read as they are and decoded ones."""
    model = save_verifier(tmp_path / "model", tie_word_embeddings=scene == "shared embeddings")
    pair = eagle(model, save_head(tmp_path / "head", own_format=scene == "shared embeddings"))
    drafts = []
    for in_one_call in (True, False):
        engine, asked = pair.open(backend={"torch": {"kv_dtype": "bfloat16" if scene == "bfloat16" else "auto"}})
        drafter = engine._executor._rank.backend._drafter
        assert drafter._head.loop is not None
        if not in_one_call:
            drafter._head.loop = None
        if scene == "another length each":
            length = engine.stage("speculation")._length.strategy
            length.choose = lambda view: 1 + (view.slots + len(view.slots)) % view.max_draft_tokens
        serve(engine, attrs.evolve(GREEDY, max_tokens=90))
        engine.close()
        drafts.append(asked.drafts)
    assert len(drafts[0]) > 200
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("in_one_call", [True, False])
def test_drafts_end_before_the_first_that_is_unlikely(pair: Pair, in_one_call: bool) -> None:
    """Sequences that have all theirs make room for the others, which go on with their own."""
    least = 0.4
    engine, asked = pair.open(speculation={"name": "head", "head": {"max_draft_tokens": 4, "min_probability": least}})
    if not in_one_call:
        engine._executor._rank.backend._drafter._head.loop = None
    serve(engine, GREEDY)
    engine.close()
    pair.check(asked, every=5)
    assert {len(drafts) for _, drafts in asked.drafts} >= {1, 2, 3}
    assert asked.num_missing
    for tokens, drafts in asked.drafts[::5]:
        chances = [float(pair.logprobs(tokens, drafts[:i]).max().exp()) for i in range(len(drafts) + 1)]
        assert min(chances[:-1]) >= least
        assert len(drafts) == 4 or chances[-1] < least


# ------------------------------------------------------------------------------------------------------------- files


def normed(model: Path, folder: Path) -> Pair:
    return eagle(model, save_head(folder, norm_before_residual=True))


def not_normed(model: Path, folder: Path) -> Pair:
    return eagle(model, save_head(folder, norm_before_residual=False))


def without_tables(model: Path, folder: Path) -> Pair:
    """What the files lack is the model's own; drafts are of its tokens."""

    def without(tensors: dict[str, Any]) -> None:
        for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
            tensors.pop(name)

    def as_the_model(tensors: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        own = load_file(model / "model.safetensors")
        tensors["embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = own["lm_head.weight"].clone()
        tensors["d2t"] = torch.zeros(97, dtype=torch.int64)
        tensors.pop("t2d")

    head = save_head(folder / "without", change=without)
    return attrs.evolve(eagle(model, save_head(folder / "with", change=as_the_model)), head=head)


def own_weights(name: str, _: Path, folder: Path) -> Pair:
    """Files repeat the model's embeddings and output projection; where they have others, the layer has them."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        drawn = torch.randn(97, 32, generator=torch.Generator().manual_seed(7))
        tensors[f"{PLACE}.{name}.weight"] = drawn * 0.4

    return layer(save_mtp(folder, change=change))


def not_repeated(_: Path, folder: Path) -> Pair:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{PLACE}.shared_head.head.weight"], tensors[f"{PLACE}.embed_tokens.weight"]

    return layer(save_mtp(folder / "without", change=change), reads=save_mtp(folder / "with"))


def quantised(form: str, _: Path, folder: Path) -> Pair:
    """The layer computes with what its weights stand for; so does the model here, whose packed products may round what goes in."""
    quantise_checkpoint(save_mtp(folder / "model"), FORMATS[form], folder / "quantised", folder / "floats")
    return layer(folder / "quantised", reads=folder / "floats")


FILES: dict[str, Callable[[Path, Path], Pair]] = {
    "residual normed": normed,
    "residual not normed": not_normed,
    "no tables": without_tables,
    "own output projection": functools.partial(own_weights, "shared_head.head"),
    "own embeddings": functools.partial(own_weights, "embed_tokens"),
    "model's not repeated": not_repeated,
    "fp8": functools.partial(quantised, "fp8"),
    "gptq": functools.partial(quantised, "gptq"),
}


@pytest.mark.representatives(1, ci=8)
@pytest.mark.parametrize("files", FILES)
def test_a_head_is_what_its_files_say(pair: Pair, tmp_path: Path, files: str) -> None:
    made = FILES[files](pair.model, tmp_path)
    asked, _ = made.serve(GREEDY, PROMPTS[:2], backend={"torch": {"pack": "off" if files in FORMATS else "auto"}})
    made.check(asked, every=9)


# ------------------------------------------------------------------------------------------- preemption and caches

SCENES: dict[str, dict[str, Any]] = {
    "recomputed": {"cache": {"num_blocks": 50}},
    "swapped": {"cache": {"num_blocks": 50, "swap_bytes": 1 << 24}, "engine": {"preemption": "swap"}},
    "one at a time": {"engine": {"max_num_seqs": 1}},
    "bfloat16 keys": {"backend": {"torch": {"kv_dtype": "bfloat16"}}},
}


@pytest.mark.representatives(1, ci=5)
@pytest.mark.parametrize(
    ("kind", "scene", "tree"),
    [
        ("speculators", "recomputed", ""),
        ("speculators", "bfloat16 keys", ""),
        ("speculators", "one at a time", "top_k"),
        ("speculators", "swapped", "top_k"),
        ("glm4_moe", "swapped", ""),
        ("glm4_moe", "recomputed", ""),
        ("speculators", "swapped", ""),
        ("speculators", "recomputed", "top_k"),
        ("glm4_moe", "swapped", "top_k"),
        ("glm4_moe", "recomputed", "top_k"),
    ],
)
def test_preemption_and_swaps_carry_the_head_s_keys_and_values(
    pair_of: Callable[[str], Pair], kind: str, scene: str, tree: str
) -> None:
    pair, tables = pair_of(kind), {**SCENES[scene], **(tree_tables(tree) if tree else {})}
    asked, ends = pair.serve(LONG, **tables)
    if scene in ("recomputed", "swapped"):
        assert any(end.num_preemptions for end in ends.values()), "the cache was too large to preempt"
    if tree:
        check_trees(asked, tree, pair.logprobs, every=31)
    elif scene != "bfloat16 keys":
        pair.check(asked, every=29)


@pytest.mark.parametrize("kind", ["own format", "glm4_moe"])
@pytest.mark.parametrize("tree", ["", "top_k"])
def test_a_prefix_hit_brings_the_head_s_keys_and_values(pair_of: Callable[[str], Pair], kind: str, tree: str) -> None:
    """The same prompt again: all but its last block is found, the head's part of it too, and its drafts are those of before."""
    pair = pair_of(kind)
    engine, asked = pair.open(**(tree_tables(tree) if tree else {}))
    first = serve(engine, GREEDY, [PROMPTS[1]])
    before, asked.drafts = list(asked.drafts), []
    again = serve(engine, GREEDY, [PROMPTS[1]])
    engine.close()
    assert again["0"].num_cached_tokens >= 36
    assert texts(again) == texts(first)
    assert asked.drafts == before
    if not tree:
        pair.check(asked, every=9)


def test_a_step_that_did_not_compute_the_newest_position_has_no_drafts(pair: Pair) -> None:
    engine, _ = pair.open()
    engine.add(Request(request_id="a", prompt_token_ids=tuple(PROMPTS[0]), params=GREEDY))
    engine.step()
    ints = [np.array(one, np.int32) for one in ([0, 0, 3], [4, 9, 4], [2, 3, 3])]
    found = engine._executor.draft(HeadBatch(rows=ints[0], positions=ints[1], num_drafts=ints[2]))
    engine.close()
    assert found.shape == (3, 3)
    assert (found[0] >= 0).tolist() == [True, True, False]
    assert (found[1:] == -1).all()


def test_a_draft_length_may_rest_and_the_head_goes_on_where_it_was(pair: Pair) -> None:
    """Its keys and values are written in every step, drafted for or not."""
    engine, asked = pair.open()
    length, steps = engine.stage("speculation")._length.strategy, itertools.count()
    inner = length.choose
    length.choose = lambda view: inner(view) * (next(steps) % 3 == 2)
    length.rest = lambda: 0
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    pair.check(asked, every=2)


def test_what_a_tree_left_serves_the_next_chain(pair: Pair) -> None:
    """The head's keys and values of accepted nodes lie where those of a chain would: a chain drafts from them what it drafts anyway."""
    engine = open_engine(pair.model, pair.head, **tree_tables("static"))
    speculator, steps = engine.stage("speculation")._speculator.strategy, itertools.count()
    inner = speculator.propose
    speculator.propose = lambda view: inner(
        attrs.evolve(view, linear_only=np.ones_like(view.linear_only) if next(steps) % 2 else view.linear_only)
    )
    engine.stage("speculation")._speculator.strategy = speculator
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    both = zip(asked.drafts, asked.parents, strict=True)
    asked.drafts = [one for one, parents in both if parents == [*range(-1, len(parents) - 1)]]
    assert len(asked.drafts) > 10
    pair.check(asked, every=4)


def test_a_store_brings_the_head_s_keys_and_values_to_an_engine_with_the_same_head(pair: Pair, tmp_path: Path) -> None:
    """Blocks on disk hold the head's layer beside the model's: the second engine computes no prompt, and drafts the same."""
    store = {"kv_connector": {"name": "filesystem", "filesystem": {"path": str(tmp_path / "store")}}}
    drafts, cached = [], []
    for _ in range(2):
        asked, ends = pair.serve(GREEDY, [PROMPTS[3]], **store)
        pair.check(asked, every=6)
        drafts.append(asked.drafts)
        cached.append(ends["0"].num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 60
    assert drafts[1][-3:] == drafts[0][-3:]
    for head in (None, not_normed(pair.model, tmp_path / "other").head):
        engine = open_engine(pair.model, head, **store)
        assert serve(engine, GREEDY, [PROMPTS[3]])["0"].num_cached_tokens == 0
        engine.close()


@pytest.mark.parametrize("tree", ["none", "top_k"])
def test_the_demo_s_head_drafts_what_the_demo_writes(tree: str) -> None:
    """It was taught on answers to other prompts; the quantities are far below those of its card."""
    prompt = [{"role": "user", "content": "Tell me of a journey over the sea, and of those who came home."}]
    found = []
    for name in ("none", "head"):
        with LLM(
            model={"path": "demo", "head": "" if name == "none" else "demo-head"},
            speculation={"name": name, "head": {"tree": tree, "max_draft_tokens": 6, "tree_depth": 6}},
            draft_length={"name": "fixed"},
            cache={"num_blocks": 64},
        ) as llm:
            (output,) = llm.chat([prompt], attrs.evolve(GREEDY, max_tokens=64))
            found.append((output.outputs[0].token_ids, llm.totals()["num_steps"]))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= 64 / 2


# ---------------------------------------------------------------------------------------------------------- refusals


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for found in [one for one in tensors if one.startswith(name)]:
            del tensors[found]

    return change


def cut(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: tensors[name][:, :40].clone()})


K_PROJ = "layers.0.self_attn.k_proj.weight"
FULL = ["full_attention"] * NUM_LAYERS
LACKS = "lacks 1 weights of its MTP layer:"
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.representatives(1, ci=20)
@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (without(K_PROJ), {}, f"lack ['{K_PROJ}']"),
        (lambda t: t.update({"layers.0.q_norm.weight": t["norm.weight"].clone()}), {}, "q_norm.weight'], which are not known"),
        (cut("fc.weight"), {}, "fc.weight is (32, 40)"),
        (lambda t: t.update(d2t=t["d2t"] + 90), {}, "d2t names tokens beyond the model's 97"),
        (None, {"speculators_model_type": "dflash"}, "which is no EAGLE-3"),
        (None, {"norm_before_fc": True}, "norm_before_fc"),
        (None, {LAYERS: [1, 2]}, "fc reads 3 hidden states"),
        (None, {LAYERS: [1, 2, 4]}, "the model has layers 0 to 3"),
        (None, {LAYERS: None}, "the layers [2, 2, 1]"),
    ],
)  # fmt: skip
def test_a_head_that_is_another_one_is_refused(
    pair: Pair, tmp_path: Path, change: Any, settings: dict[str, Any], says: str
) -> None:
    head = save_head(tmp_path, change=change, **settings)
    with pytest.raises(TrencadisError) as raised:
        open_engine(pair.model, head)
    assert "model.head" in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.representatives(1, ci=20)
@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (without(f"{PLACE}.hnorm"), {}, f"{LACKS} {PLACE}.hnorm.weight"),
        (without(f"{PLACE}.shared_head.norm"), {}, f"{LACKS} {PLACE}.shared_head.norm.weight"),
        (without(f"{PLACE}."), {}, "weights of its MTP layer: "),
        (cut(f"{PLACE}.eh_proj.weight"), {}, f"{PLACE}.eh_proj.weight of its MTP layer has another shape than [32, 64]"),
        (without(f"{PLACE}.mlp.experts.3."), {}, f"{PLACE}.mlp.experts.gate_up_proj of its MTP layer has another shape than [8, 64, 32]"),
        (None, {"num_nextn_predict_layers": 0}, "num_mtp_layers = 0: config.json names no MTP layer"),
        (None, {"num_nextn_predict_layers": 2}, "num_mtp_layers = 2, and one"),
        (None, {"layer_types": FULL}, "its MTP layer is not described"),
        (None, {"layer_types": FULL, "mtp_layer_types": ["sliding_attention"]}, "its MTP layer is sliding_attention"),
        (None, None, "(llama): num_mtp_layers = None: config.json names no"),
    ],
)  # fmt: skip
def test_a_layer_that_is_another_one_is_refused(tmp_path: Path, change: Any, settings: Any, says: str) -> None:
    path = save_verifier(tmp_path) if settings is None else save_mtp(tmp_path, change=change, **settings)
    with pytest.raises(TrencadisError) as raised:
        open_engine(path, "mtp")
    assert "model.head mtp: " in str(raised.value)
    assert says in str(raised.value)


def test_no_head_a_directory_without_one_and_a_padded_layout_are_refused_in_words(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(TrencadisError, match=r"no config\.json and \*\.safetensors there"):
        open_engine(pair.model, tmp_path)
    with pytest.raises(TrencadisError, match=r'model\.head does not go with \[backend\.torch\] layout = "padded"'):
        pair.open(backend={"torch": {"layout": "padded"}}, bucketing={"name": "exponential"})
    model = {"path": str(pair.model), "tokenizer": "none"}
    config, registry = configure(model, config_file=None, tables={"speculation": {"name": "head"}})
    with pytest.raises(CapabilityError, match=r"(?s)none was loaded.*model\.head"):
        build_engine(config, registry=registry)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("speculators", "EAGLE-3, from what the layers 1, 2, 3 begin with"),
        ("glm4_moe", "Head mtp: the MTP layer of"),
    ],
)
def test_the_log_says_what_a_head_reads(
    pair_of: Callable[[str], Pair], kind: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.torch"):
        pair_of(kind).open()[0].close()
    assert says in caplog.text
