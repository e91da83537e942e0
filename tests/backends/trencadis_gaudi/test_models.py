"""Models on the emulated device: how they are loaded and changed for graphs, and every family next to the backend ``torch``."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
import transformers as hf

from support.backends import families, gaudi_engines, tiny_encoders, tiny_models
from trencadis.clock import SystemClock
from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.records import ModelSource
from trencadis_gaudi import model as module
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.model import load_model
from trencadis_gaudi.static_modules import make_static

MODES = ("lazy", "compile", "eager")
SERVED = [kind for kind in (*families.SERVED, *families.PUBLISHED) if kind not in families.REFUSED_ON_GAUDI]
FEW_SIZES = {"strategy_options": {"limit": 1}}
FACTORS = {"short_factor": [1.1] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 128}
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **FACTORS},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128},
    "phimoe": {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3, **FACTORS},
}
KINDS = (*ROPES, "padding", "latent")


def texts(path, *, num_requests=2, num_drawn=0, **options):
    """Return the tokens of greedy requests, and then of drawn ones, but for those that were aborted; and the engine."""
    engine = gaudi_engines.open_engine(path, **options)
    served = gaudi_engines.serve(engine, 3, num_requests=num_requests, greedy=True)
    served |= gaudi_engines.serve(engine, 4, num_requests=num_drawn)
    engine.close()
    found = gaudi_engines.tokens(served)
    return {name: found[name] for name, one in served.items() if one.finish_reason.value != "abort"}, engine


def frozen(mode):
    return {"mode": mode, "emulated_frozen": mode != "eager", **FEW_SIZES}


# --------------------------------------------------------------------------------------------------------- loading
@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())


def test_model_is_loaded_and_checked(habana, model_path):
    loaded = load_model(ModelSource(path=str(model_path("gemma3"))), habana, check=True)
    assert [layer.window for layer in loaded.layers] == [7, 0, 7]
    assert (loaded.facts.embedding_size, loaded.dtype) == (48, torch.float32)


def test_encoder_is_refused_with_the_backend_that_serves_it(habana, tmp_path):
    source = ModelSource(path=str(tiny_encoders.save_encoder("bert", tmp_path)))
    with pytest.raises(ModelLoadError, match="only embeds") as caught:
        load_model(source, habana, check=False)
    assert "torch" in caught.value.hint


def test_gaudi_computes_in_bfloat16_and_says_so_if_asked_for_more(habana, model_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_moved", lambda model, source, habana: model)
    source = ModelSource(path=str(model_path("llama")), dtype="float32")
    assert load_model(source, attrs.evolve(habana, emulated=None), check=False).facts.dtype == "bfloat16"
    assert "dtype = float32: a Gaudi computes in bfloat16" in caplog.text


def test_device_without_room_for_the_weights_is_named(habana):
    def full(device):
        raise RuntimeError("synStatus 2 out of memory")

    real = attrs.evolve(habana, emulated=None)
    with pytest.raises(OutOfMemoryError, match="no room for the weights of here: synStatus 2"):
        module._moved(SimpleNamespace(to=full), ModelSource(path="here"), real)


# ------------------------------------------------------------------------------------ modules that change for graphs
def make(kind):
    sizes = {**tiny_models._COMMON, "num_hidden_layers": 2}
    match kind:
        case "phimoe":
            config = hf.PhimoeConfig(**sizes, rope_parameters=ROPES[kind], num_local_experts=4, num_experts_per_tok=2)
        case "padding":
            config = hf.GPT2Config(
                vocab_size=131, n_positions=256, n_embd=48, n_layer=2, n_head=4, pad_token_id=0, initializer_range=0.3
            )
        case "latent":
            config = hf.DeepseekV3Config(**{**sizes, **families._LATENT, "first_k_dense_replace": 2})
        case _:
            config = hf.LlamaConfig(**sizes, rope_parameters=ROPES[kind])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = 2
    return model


@pytest.mark.representatives(len(KINDS))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_stay_the_same_when_modules_are_changed_for_a_graph(kind):
    model, tokens = make(kind), torch.tensor([tiny_models.prompt(100)])
    before = model(tokens, use_cache=False).logits
    make_static(model, in_graphs=True)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_are_captured_and_generate_what_the_backend_torch_does(tmp_path, kind, mode):
    make(kind).save_pretrained(tmp_path)
    expected, _ = texts(tmp_path, num_requests=3, backend="torch")
    assert texts(tmp_path, num_requests=3, **frozen(mode))[0] == expected


@pytest.mark.parametrize(
    ("name", "modes"), [("DeepseekV2RotaryEmbedding", (True, False)), ("Gemma3nTextAltUp", (True,))]
)
def test_modules_without_an_equivalent_are_refused_in_words(name, modes):
    model = torch.nn.Sequential(type(name, (torch.nn.Module,), {})())
    for in_graphs in modes:
        with pytest.raises(ModelLoadError, match=f"{name} .* a Gaudi") as caught:
            make_static(model, in_graphs=in_graphs)
        assert "torch" in caught.value.hint
    if False not in modes:
        make_static(model, in_graphs=False)


# --------------------------------------------------------------------------------------------------------- families
@pytest.mark.representatives(1, ci=3)
@pytest.mark.parametrize("kind", SERVED)
def test_family_generates_what_the_backend_torch_does(tmp_path, kind):
    """In lazy mode, captured as requests come."""
    path = families.save_family(kind, tmp_path)
    assert texts(path, check_model=True, warmup=False, **FEW_SIZES)[0] == texts(path, backend="torch")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVED[::22])
@pytest.mark.parametrize("mode", MODES)
def test_family_compiles_nothing_after_the_warm_up_in_any_mode(tmp_path, kind, mode):
    """A few of them: the modes differ in how a forward is captured, families in what it computes."""
    path = families.save_family(kind, tmp_path)
    assert texts(path, check_model=True, **frozen(mode))[0] == texts(path, backend="torch")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.REFUSED_ON_GAUDI)
def test_family_that_a_gaudi_cannot_run_is_refused_in_words(tmp_path, kind):
    with pytest.raises(ModelLoadError, match=families.REFUSED_ON_GAUDI[kind]):
        gaudi_engines.open_engine(families.save_family(kind, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.REFUSED)
def test_family_that_the_backend_torch_refuses_is_refused_for_the_same_reason(tmp_path, kind):
    path, said = families.save_family(kind, tmp_path), []
    for backend in ("torch", "gaudi"):
        with pytest.raises(ModelLoadError) as caught:
            gaudi_engines.open_engine(path, backend=backend, check_model=True)
        said.append(str(caught.value).replace(" and packed layers", "")[:60])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("depth", "mode"),
    [
        (2, "lazy"),
        *(pytest.param(depth, mode, marks=pytest.mark.nightly) for depth in (1, 5, 12, 32) for mode in MODES),
    ],
)
def test_tokens_are_those_of_the_torch_backend_however_many_layers_there_are(tmp_path, depth, mode):
    """And no more graphs of torch.compile than for few layers. One size of each phase: a layer does not know which of many it is."""
    with torch.random.fork_rng():
        torch.manual_seed(depth)
        sizes = {**tiny_models._COMMON, "num_hidden_layers": depth, "initializer_range": 0.1}
        hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    expected, _ = texts(tmp_path, num_requests=3, num_drawn=5, backend="torch", **FEW_SIZES)
    found, engine = texts(tmp_path, num_requests=3, num_drawn=5, **frozen(mode))
    assert {name: found[name] for name in expected if name in found} == expected
    habana = engine._executor._rank.backend.habana
    assert (habana.dynamo.num_graph_breaks, habana.dynamo.num_limit_hits) == (0, 0)
    if mode == "compile":
        # For each of three sizes: the first layer, whose inputs differ in memory, and all others.
        assert sum(key.startswith(b"compiled") for key in habana.emulated._recipes) <= 6
