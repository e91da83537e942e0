"""A KV connector of version 1 runs through the adapter: every method that it has is called, and its loads are exact."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.interfaces import ComponentContext, ConnectorPair, SupportsRemotePrefill
from trencadis.records import Request, SamplingParams
from trencadis.registry import load_with_plugins
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 14))


def built(name: str, path: str) -> tuple[ConnectorPair, Any]:
    """Return a connector as the registry builds it, and the module that it came from."""
    spec = importlib.util.spec_from_file_location("connector_canary", Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, registry = load_with_plugins(environ={}, overrides={}, extra_plugins=[module], entry_points=())
    component = registry.select("kv_connector", name)
    return registry.build(component, None, ComponentContext(clock=SimulatedClock(), seed=0)), module


def ask(engine: Engine, name: str, prompt: tuple[int, ...] = PROMPT, **terms: Any) -> list[int]:
    engine.add(
        Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=4, temperature=0.0), **terms)
    )
    return drain(engine)[name].token_ids.tolist()


def test_every_method_of_version_1_is_called_and_loads_are_exact() -> None:
    pair, module = built("everything", "connector_version_1.py")
    side: Any = pair.scheduler.side  # type: ignore[attr-defined] # the adapter's
    engine = make_engine(
        connector=pair,
        backend=FakeBackend(eos=-1),
        prefix_caching=False,
        sampling_fingerprint=object(),  # type: ignore[arg-type] # it is only handed on
    )
    assert ask(engine, "saves") == fake_text(list(PROMPT), 4, eos=-1)
    for name in ("load that fails", "load that arrives", "layers"):
        assert ask(engine, name) == fake_text(list(PROMPT), 4, eos=-1), name
    assert engine.metrics().count("trencadis_kv_canary 1") == 1
    engine.answer("reject_transfer", {"transfer_params": {"a": 1}})
    engine.add(Request(request_id="gone", prompt_token_ids=PROMPT))
    engine.abort("gone")
    engine.add(Request(request_id="cancelled", prompt_token_ids=PROMPT))
    module.Worker.poll = lambda self: module.ConnectorReport()
    engine.step()
    engine.abort("cancelled")
    engine.close()
    version_1 = {name for name in vars(module.Everything) if not name.startswith("_")}
    assert version_1 - set(side.calls) == {"has_requests", "on_unused"}
    assert side.calls.count("on_request_ended") == side.calls.count("on_request_token") == 1


def test_a_hit_that_is_not_longer_than_the_local_one_is_said_to_be_unused() -> None:
    pair, _ = built("everything", "connector_version_1.py")
    engine = make_engine(connector=pair, backend=FakeBackend(eos=-1))
    ask(engine, "saves")
    assert ask(engine, "unused: the local hit is longer") == fake_text(list(PROMPT), 4, eos=-1)
    assert "on_unused" in pair.scheduler.side.calls  # type: ignore[attr-defined] # the adapter's


def test_a_plain_connector_of_version_1_gets_no_capabilities() -> None:
    pair, _ = built("canary", "version_1.py")
    plain = type(pair.scheduler).__mro__
    assert not [base for base in plain if base.__name__.startswith("Supports")]


def test_a_connector_of_the_current_version_is_not_adapted() -> None:
    assert not isinstance(LoopConnector().pair().scheduler, SupportsRemotePrefill)
