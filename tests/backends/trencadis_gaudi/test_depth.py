"""Models of many layers: the tokens of the backend ``torch``, greedy and seeded, and no more graphs of torch.compile than for few layers."""

from __future__ import annotations

import pytest

from support.backends import gaudi_engines, tiny_models

DEPTHS = (1, 2, 5, 12, 32)
# One size of each phase is enough: a layer does not know which of many it is.
OPTIONS = {"strategy_options": {"limit": 1}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """``deep(depth)``: the path of a model of so many layers, and the texts that the backend ``torch`` generates with it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    found = {}

    def make(depth):
        if depth not in found:
            path = tmp_path_factory.mktemp("deep")
            with torch.random.fork_rng():
                torch.manual_seed(depth)
                sizes = {**tiny_models._COMMON, "num_hidden_layers": depth, "initializer_range": 0.1}
                AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(path)
            found[depth] = path, texts(gaudi_engines.open_engine(path, backend="torch", **OPTIONS))
        return found[depth]

    return make


def texts(engine):
    """The tokens of greedy requests, then of drawn ones."""
    served = gaudi_engines.serve(engine, 3, num_requests=3, greedy=True) | gaudi_engines.serve(
        engine, 4, num_requests=5
    )
    assert not {one.error for one in served.values()} - {""}
    engine.close()
    # An aborted request ends where it was.
    return {name: one.token_ids.tolist() for name, one in served.items() if one.finish_reason.value != "abort"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile", "eager"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_are_those_of_the_torch_backend_however_many_layers_there_are(deep, depth, mode):
    path, expected = deep(depth)
    engine = gaudi_engines.open_engine(path, mode=mode, emulated_frozen=mode != "eager", **OPTIONS)
    habana = engine._executor._rank.backend.habana
    found = texts(engine)
    assert {name: found[name] for name in expected if name in found} == expected
    assert (habana.dynamo.num_graph_breaks, habana.dynamo.num_limit_hits) == (0, 0)
    if mode == "compile":
        # For each of three sizes: the first layer, whose inputs differ in memory, and all others.
        assert sum(key.startswith(b"compiled") for key in habana.emulated._recipes) <= 6
