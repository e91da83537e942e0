from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from trencadis.config import Config
from trencadis.errors import (
    ConfigValueError,
    EngineEndedError,
    ModelLoadError,
    PluginError,
    TrencadisError,
)
from trencadis.records import SamplingParams
from trencadis.registry import Registry
from trencadis_remote.process.connect import connect_frontend
from trencadis_testing.fakes import fake_text

House = Callable[..., tuple[Config, Registry]]


def error_of(config: Config, registry: Registry) -> TrencadisError:
    with pytest.raises(TrencadisError) as caught:
        connect_frontend(config, registry)
    return caught.value


def test_a_frontend_over_another_process_serves(process_house: House) -> None:
    frontend = connect_frontend(*process_house())
    client = frontend.submit((5, 6), SamplingParams(max_tokens=9), request_id="a")
    while not client.is_finished:
        frontend.step()
    assert client.output().outputs[0].token_ids == tuple(fake_text((5, 6), 9, vocab_size=4096))
    assert frontend.engine.model.architecture == "Fake"
    frontend.close()
    frontend.close()


@pytest.mark.slow
def test_how_far_the_warm_up_of_the_other_process_is_can_be_drawn_here(
    process_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int | None]] = []

    @contextlib.contextmanager
    def track(what: str, **_: Any) -> Iterator[Any]:
        yield lambda done, total=None: seen.append((done, total))

    monkeypatch.setattr("trencadis.client.factory.track", track)
    house = process_house(
        engine={"warmup": True},
        backend={
            "name": "trencadis_testing.fakes:FakeBackend",
            "options": {"vocab_size": 4096, "eos": -1, "max_model_len": 64, "strict": False, "layout": "padded"},
        },
        bucketing={"name": "exponential"},
    )
    connect_frontend(*house, show_progress=True).close()
    done, total = seen[-1]
    assert total is not None
    assert done == total > 1
    assert seen == sorted(seen, key=lambda one: one[0])


def test_a_plugin_given_in_code_is_named_as_what_cannot_travel(process_house: House) -> None:
    config, registry = process_house()
    registry.register(types.ModuleType("my_experiment"))
    error = error_of(config, registry)
    assert type(error) is PluginError
    assert "my_experiment, given in code" in str(error)
    assert 'placement = "thread"' in str(error)


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize(("policy", "words"), [("Vanishes", "ended with exit code 7"), ("Circles", "scheduling")])
def test_a_policy_that_ends_or_holds_up_the_process_is_named(process_house: House, policy: str, words: str) -> None:
    name = f"support.strategies.hostile_policies:{policy}"
    config, registry = process_house(scheduling={"name": name, "fallback": "fcfs"}, engine={"watchdog_s": 1.0})
    frontend = connect_frontend(config, registry)
    client = frontend.submit((5, 6), SamplingParams(max_tokens=9), request_id="a")

    def serve() -> None:
        while not client.is_finished:
            frontend.step()

    with pytest.raises(EngineEndedError, match=words) as caught:
        serve()
    assert f'while scheduling component "{name}" of support.strategies.hostile_policies' in str(caught.value)
    assert "was being called" in str(caught.value)
    frontend.close()


def test_a_source_is_named_as_here(process_house: House) -> None:
    config, registry = process_house(bucketing={"name": "exact", "options": {}})
    config = attrs.evolve(config, scheduling=attrs.evolve(config.scheduling, name="fcfz"))
    registry.sources = {"scheduling.name": "serve.toml"}
    error = error_of(config, registry)
    assert "serve.toml" in str(error)
    assert 'Did you mean "fcfs"?' in str(error)


def test_a_missing_tokenizer_is_said_before_the_child_is_ready(process_house: House) -> None:
    config, registry = process_house()
    config = attrs.evolve(config, model=attrs.evolve(config.model, tokenizer="/no/such/place"))
    error = error_of(config, registry)
    assert isinstance(error, ModelLoadError)
    assert "/no/such/place" in str(error)
    assert not isinstance(error, ConfigValueError)
