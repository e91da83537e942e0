from __future__ import annotations

import inspect
from pathlib import Path

import pluggy
import pytest

from trencadis import hookspecs
from trencadis.engine.build import build_engine
from trencadis.hookspecs import NOUNS
from trencadis.interfaces import Component
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins
from trencadis_testing.fakes import FakeBackend

ROOT = Path(__file__).parents[2]
HOOKS = [name for name, value in vars(hookspecs).items() if name.startswith("trencadis_") and callable(value)]


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_says_when_it_is_called(hook: str) -> None:
    assert "*Called:*" in (inspect.getdoc(getattr(hookspecs, hook)) or "")


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_used_in_a_test(hook: str) -> None:
    here = Path(__file__)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != here]
    assert any(hook in path.read_text() for path in tests), f"no test mentions {hook}"


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("noun", NOUNS)
def test_noun_has_a_page_an_interface_and_a_version(noun: str) -> None:
    page = (ROOT / "docs" / "plugins" / f"{noun}.md").read_text()
    for heading in ("Contract", "Built-ins", "Minimal example", "Conformance", "Pitfalls"):
        assert f"## {heading}" in page, f"docs/plugins/{noun}.md lacks the heading {heading}"
    interface = (ROOT / "core/trencadis/interfaces" / f"{noun}.py").read_text()
    assert "INTERFACE_VERSION = " in interface


class FakeDevice:
    """A plugin that offers a backend without a model; every other component is built in."""

    @hookspecs.hookimpl
    def trencadis_backends(self):
        yield Component(
            name="fake",
            factory=lambda config, context: FakeBackend(eos=-1, max_model_len=256),
            summary="Arithmetic.",
            interface_version=1,
        )


def test_no_hook_is_called_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"backend.name": "fake", "cache.num_blocks": 64, "observer.names": ["log", "prometheus"]}
    resolved, registry = load_with_plugins(environ={}, overrides=overrides, extra_plugins=[FakeDevice()])
    engine = build_engine(resolved.config, registry=registry)
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=120)))

    def raises(*args: object, **kwargs: object) -> None:
        raise AssertionError("a hook was called inside a step")

    with monkeypatch.context() as patch:  # pytest itself needs its hooks back
        patch.setattr(pluggy.HookCaller, "__call__", raises)
        for _ in range(100):
            engine.step()
    assert engine.totals.num_steps == 100
    assert engine.totals.num_observer_failures == 0
    engine.close()
