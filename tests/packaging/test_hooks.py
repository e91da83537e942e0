from __future__ import annotations

import inspect
import re
from pathlib import Path

import pluggy
import pytest

from support.nouns import ALL_NOUNS
from trencadis import hookspecs
from trencadis.engine.build import build_engine
from trencadis.interfaces import Component
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins
from trencadis_testing.fakes import FakeBackend

ROOT = Path(__file__).parents[2]
KINDS = {".md", ".py", ".tmpl"}
HOOKS = [name for name, value in vars(hookspecs).items() if name.startswith("trencadis_") and callable(value)]


def test_each_hook_says_when_it_is_called_and_is_used_in_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert HOOKS
    for hook in HOOKS:
        assert "*Called:*" in (inspect.getdoc(getattr(hookspecs, hook)) or ""), hook
        assert hook in tests, f"no test mentions {hook}"


def test_each_noun_has_a_page_an_interface_and_a_version_which_the_example_on_its_page_has() -> None:
    for noun, one in ALL_NOUNS.items():
        page = (ROOT / "docs" / "plugins" / f"{noun}.md").read_text(encoding="utf-8")
        for heading in ("Contract", "Built-ins", "Minimal example", "Conformance", "Pitfalls"):
            assert f"## {heading}" in page, f"docs/plugins/{noun}.md lacks the heading {heading}"
        assert "INTERFACE_VERSION = " in inspect.getsource(inspect.getmodule(one.contract))
        assert {int(number) for number in re.findall(r"interface_version=(\d+)", page)} == {one.interface_version}, noun


WRITTEN_BY_OTHERS = ("docs", "examples", "plugins/trencadis_tools/new_plugin/templates", "benchmarks")


def test_what_packages_of_others_start_from_has_the_version_of_its_contract_as_a_number() -> None:
    """A package that reads ``INTERFACE_VERSION`` when it runs claims to know contracts that were made after it."""
    claim = re.compile(r"interface_version\s*=\s*[\w.]*INTERFACE_VERSION|import .*INTERFACE_VERSION")
    files = [path for folder in WRITTEN_BY_OTHERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    claiming = [str(path.relative_to(ROOT)) for path in files if claim.search(path.read_text(encoding="utf-8"))]
    assert not claiming
    stated = [path for path in files if "interface_version=" in path.read_text(encoding="utf-8")]
    assert len(stated) > len(ALL_NOUNS)


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
