"""The MTP layer of a checkpoint as a drafter: token for token what a slow reference drafts, and never another text."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from support.backends.quantised_checkpoints import FORMATS, quantise_checkpoint
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
from support.strategies.heads import save_verifier
from support.strategies.mtp import NUM_LAYERS, reference_drafts, reference_logprobs, save_mtp
from trencadis.errors import ModelLoadError
from trencadis.records import SamplingParams

FULL = ["full_attention"] * NUM_LAYERS
PLACE = f"model.layers.{NUM_LAYERS}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("glm"))


def check_drafts(asked: Asked, model: Path, *, every: int) -> None:
    assert asked.drafts
    for tokens, drafts in asked.drafts[::every]:
        assert drafts == reference_drafts(model, tokens, len(drafts)), len(tokens)


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    ("kind", "pack", "one_call"),
    [("glm4_moe", "auto", True), ("glm4_moe", "off", False), ("deepseek_v3", "auto", False)],
)
def test_drafts_are_those_of_the_reference(tmp_path: Path, kind: str, pack: str, one_call: bool) -> None:
    """Prompts in chunks, several sequences side by side, drafts that stand and fall, files in shards."""
    path, backend = save_mtp(tmp_path, kind, num_shards=3), {"torch": {"pack": pack}}
    engine = open_engine(path, "mtp", backend=backend)
    assert (engine._executor._rank.backend._runner._decoder is not None) is one_call
    asked = Asked(engine)
    found = texts(serve(engine, GREEDY))
    engine.close()
    plain = open_engine(path, None, backend=backend)
    assert found == texts(serve(plain, GREEDY))
    plain.close()
    check_drafts(asked, path, every=11)
    assert not asked.num_missing


@pytest.mark.parametrize("name", ["shared_head.head", "embed_tokens"])
def test_a_layer_with_weights_of_its_own_uses_them(tmp_path: Path, name: str) -> None:
    """Files repeat the model's embeddings and output projection; where they have others, the layer has them."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(7)
        tensors[f"{PLACE}.{name}.weight"] = torch.randn(97, 32, generator=generator) * 0.4

    path = save_mtp(tmp_path, change=change)
    engine = open_engine(path, "mtp")
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    check_drafts(asked, path, every=9)


def test_what_the_files_do_not_repeat_is_the_model_s(model: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{PLACE}.shared_head.head.weight"], tensors[f"{PLACE}.embed_tokens.weight"]

    engine = open_engine(save_mtp(tmp_path, change=change), "mtp")
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    check_drafts(asked, model, every=9)


@pytest.mark.parametrize("form", ["fp8", "gptq"])
def test_a_quantised_checkpoint_has_a_quantised_layer(model: Path, tmp_path: Path, form: str) -> None:
    """The layer computes with what its weights stand for; so does the model here, whose packed products may round what goes in."""
    quantise_checkpoint(model, FORMATS[form], tmp_path / "quantised", tmp_path / "floats")
    engine = open_engine(tmp_path / "quantised", "mtp", backend={"torch": {"pack": "off"}})
    asked = Asked(engine)
    serve(engine, GREEDY, PROMPTS[:2])
    engine.close()
    check_drafts(asked, tmp_path / "floats", every=9)


@pytest.mark.parametrize("rule", ["match", "token"])
def test_text_is_that_of_no_speculation(model: Path, rule: str) -> None:
    """Of a rule that draws, a seed's text is another one by its nature: it is compared where there is nothing to draw."""
    params = (
        SEEDED if rule == "match" else SamplingParams(temperature=0.7, top_k=1, seed=5, max_tokens=24, ignore_eos=True)
    )
    engine = open_engine(model, "mtp", acceptance={"name": rule})
    found = texts(serve(engine, params))
    assert engine.totals.num_draft_tokens
    engine.close()
    plain = open_engine(model, None)
    assert found == texts(serve(plain, params))
    plain.close()


SCENES: dict[str, dict[str, Any]] = {
    "recomputed": {"cache": {"num_blocks": 50}},
    "swapped": {"cache": {"num_blocks": 50, "swap_bytes": 1 << 24}, "engine": {"preemption": "swap"}},
}


@pytest.mark.parametrize("scene", SCENES)
def test_preemption_and_swaps_carry_its_keys_and_values(model: Path, scene: str) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine = open_engine(model, "mtp", **SCENES[scene])
    asked = Asked(engine)
    ends = serve(engine, long)
    engine.close()
    assert any(end.num_preemptions for end in ends.values()), "the cache was too large to preempt"
    plain = open_engine(model, None, **SCENES[scene])
    assert texts(ends) == texts(serve(plain, long))
    plain.close()
    check_drafts(asked, model, every=23)


def test_a_prefix_hit_brings_its_keys_and_values(model: Path) -> None:
    engine = open_engine(model, "mtp")
    asked = Asked(engine)
    first = serve(engine, GREEDY, [PROMPTS[1]])
    before, asked.drafts = list(asked.drafts), []
    again = serve(engine, GREEDY, [PROMPTS[1]])
    engine.close()
    assert again["0"].num_cached_tokens >= 36
    assert texts(again) == texts(first)
    assert asked.drafts == before
    check_drafts(asked, model, every=9)


def test_the_log_says_where_the_head_comes_from(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.torch"):
        open_engine(model, "mtp").close()
    assert "Head mtp: the MTP layer of" in caplog.text


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("kind", "tree"), [("glm4_moe", "top_k"), ("glm4_moe", "static"), ("deepseek_v3", "top_k")])
def test_trees_are_those_of_the_reference(tmp_path: Path, kind: str, tree: str) -> None:
    path = save_mtp(tmp_path, kind)
    for params in (GREEDY, SEEDED):
        engine = open_engine(path, "mtp", **tree_tables(tree))
        asked = Asked(engine)
        found = texts(serve(engine, params))
        engine.close()
        plain = open_engine(path, None)
        assert found == texts(serve(plain, params))
        plain.close()
        check_trees(asked, tree, functools.partial(reference_logprobs, path), every=13)


@pytest.mark.parametrize("scene", SCENES)
def test_trees_stand_preemption_and_prefix_hits(model: Path, scene: str) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine = open_engine(model, "mtp", **SCENES[scene], **tree_tables("top_k"))
    ends = serve(engine, long)
    again = serve(engine, long, PROMPTS[1:2])
    engine.close()
    assert any(end.num_preemptions for end in ends.values()), "the cache was too large to preempt"
    plain = open_engine(model, None, **SCENES[scene])
    assert texts(ends) == texts(serve(plain, long))
    plain.close()
    assert texts(again) == texts(ends)[1:2]


# ---------------------------------------------------------------------------------------------------------- refusals


def without(name: str) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for found in [one for one in tensors if one.startswith(f"{PLACE}.{name}")]:
            del tensors[found]

    return change


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PLACE}.eh_proj.weight"] = tensors[f"{PLACE}.eh_proj.weight"][:, :40].clone()


@pytest.mark.representatives(9)
@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (without("hnorm"), {}, f"lacks 1 weights of its MTP layer: {PLACE}.hnorm.weight"),
        (without("shared_head.norm"), {}, f"lacks 1 weights of its MTP layer: {PLACE}.shared_head.norm.weight"),
        (without(""), {}, "weights of its MTP layer: "),
        (cut, {}, f"{PLACE}.eh_proj.weight of its MTP layer has another shape than [32, 64]"),
        (
            without("mlp.experts.3."),
            {},
            f"{PLACE}.mlp.experts.gate_up_proj of its MTP layer has another shape than [8, 64, 32]",
        ),
        (None, {"num_nextn_predict_layers": 0}, "num_mtp_layers = 0: config.json names no MTP layer"),
        (None, {"num_nextn_predict_layers": 2}, "num_mtp_layers = 2, and one"),
        (None, {"layer_types": FULL}, "its MTP layer is not described"),
        (None, {"layer_types": FULL, "mtp_layer_types": ["sliding_attention"]}, "its MTP layer is sliding_attention"),
    ],
)
def test_a_layer_that_is_another_one_is_refused(
    tmp_path: Path, change: Any, settings: dict[str, Any], says: str
) -> None:
    path = save_mtp(tmp_path, change=change, **settings)
    with pytest.raises(ModelLoadError) as raised:
        open_engine(path, "mtp")
    assert "model.head mtp: " in str(raised.value)
    assert says in str(raised.value)


def test_a_family_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"model\.head mtp: .*\(llama\): num_mtp_layers = None: config\.json names no"
    ):
        open_engine(save_verifier(tmp_path), "mtp")
