from __future__ import annotations

import attrs
import pytest

from trencadis.api import load_with_plugins
from trencadis.errors import ModelLoadError
from trencadis_tools.doctor.loading import LARGEST_BYTES, check_loading
from trencadis_tools.doctor.model import facts_of


def check(found, weights_bytes=0, **overrides) -> None:
    settings = {"model.path": "demo", "backend.torch.num_threads": 1, **overrides}
    resolved, registry = load_with_plugins(environ={}, overrides=settings)
    facts = attrs.evolve(facts_of({}, 0), weights_bytes=weights_bytes)
    check_loading(found, resolved.config, registry, resolved.sources, facts)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({}, "safetensors, bfloat16; held as bfloat16 (100 %); runs in one call"),
        ({"model.dtype": "bfloat16"}, "held as bfloat16, rows too (100 %); runs in one call"),
        ({"backend.torch.quantization": "int8"}, "held as int8 ("),
        ({"backend.torch.pack": "off"}, "loaded whole: its layers are not packed; runs layer by layer"),
    ],
)
def test_a_model_that_is_named_is_loaded_to_say_how_it_is_held_and_runs(found, told, overrides, said) -> None:
    check(found, **overrides)
    ((kind, message),) = told()
    assert kind == "ok"
    assert message.startswith("model demo: ")
    assert said in message


def test_the_default_model_is_not_loaded(found, told) -> None:
    resolved, registry = load_with_plugins(environ={})
    check_loading(found, resolved.config, registry, resolved.sources, None)
    assert told() == []


@pytest.mark.parametrize(
    ("weights_bytes", "overrides"), [(LARGEST_BYTES + 1, {}), (0, {"parallel.tensor": 2})], ids=["large", "ranks"]
)
def test_a_large_or_divided_model_is_not_loaded_and_doctor_says_what_tells_it(
    found, told, weights_bytes, overrides
) -> None:
    check(found, weights_bytes, **overrides)
    ((kind, message),) = told()
    assert kind == "ok"
    assert "not loaded here" in message
    assert "-v says how it" in message


def test_a_model_that_cannot_be_loaded_is_an_error(found, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        check(found, **{"model.path": str(tmp_path)})
