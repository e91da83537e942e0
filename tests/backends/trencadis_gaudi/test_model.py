from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch

from support.backends import tiny_encoders
from trencadis.clock import SystemClock
from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.records import ModelSource
from trencadis_gaudi import model as module
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.model import load_model


@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())


def test_model_is_loaded_and_checked(habana, model_path):
    loaded = load_model(ModelSource(path=str(model_path("gemma3"))), habana, check=True)
    assert [layer.window for layer in loaded.layers] == [7, 0, 7]
    assert (loaded.facts.embedding_size, loaded.dtype) == (48, torch.float32)


def test_encoder_is_refused_with_the_backend_that_serves_it(habana, tmp_path):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    with pytest.raises(ModelLoadError, match="only embeds") as caught:
        load_model(ModelSource(path=str(path)), habana, check=False)
    assert "torch" in caught.value.hint


def test_gaudi_computes_in_bfloat16_and_says_so_if_asked_for_more(habana, model_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_moved", lambda model, source, habana: model)
    real = attrs.evolve(habana, emulated=None)
    source = ModelSource(path=str(model_path("llama")), dtype="float32")
    assert load_model(source, real, check=False).facts.dtype == "bfloat16"
    assert "dtype = float32: a Gaudi computes in bfloat16" in caplog.text


def test_device_without_room_for_the_weights_is_named(habana):
    def full(device):
        raise RuntimeError("synStatus 2 out of memory")

    real = attrs.evolve(habana, emulated=None)
    with pytest.raises(OutOfMemoryError, match="no room for the weights of here: synStatus 2"):
        module._moved(SimpleNamespace(to=full), ModelSource(path="here"), real)
