"""Samplers without a static form, on a device that refuses to compile after its warm-up."""

from __future__ import annotations

import os

import pytest

_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "typical_p": 0.9, "xtc_probability": 0.5},
    {"mirostat_mode": 2, "mirostat_tau": 2.0, "logprobs": 3},
    {"temperature": 0.0, "no_repeat_ngram_size": 2, "bad_words_ids": ((5, 6), (7,))},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "top_n_sigma": 1.5, "top_k": 20},
    {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "presence_penalty": 0.5},
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from support.backends import tiny_models

    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _environment_as_before():
    """What the interface to the vendor's software sets in the environment is taken back."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.mark.slow
def test_samplers_on_the_host_compile_nothing_and_choose_what_the_torch_backend_chooses(model_path, monkeypatch):
    from support.backends import gaudi_engines

    monkeypatch.setattr(gaudi_engines, "_KINDS", _KINDS)
    texts = {}
    for backend, options in (("gaudi", {"emulated_frozen": True}), ("torch", {"device": "cpu"})):
        engine = gaudi_engines.open_engine(model_path, backend=backend, **options)
        served = gaudi_engines.serve(engine, 3, num_requests=20)
        assert not {one.error for one in served.values()} - {""}
        assert engine.totals.num_failed_steps == 0
        if backend == "gaudi":
            assert engine.totals.num_compilations == engine.totals.num_unprepared == 0
        engine.close()
        # An aborted request ends where it was.
        texts[backend] = {
            name: one.token_ids.tolist() for name, one in served.items() if one.finish_reason.value != "abort"
        }
    assert texts["gaudi"] == texts["torch"]
