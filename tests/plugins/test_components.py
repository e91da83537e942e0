"""What every component of this repository's packages of strategies keeps: its name, its contract, a file of its own, settings that are explained."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.hookspecs import NOUNS
from trencadis.interfaces import Component, ComponentContext
from trencadis.registry.contracts import CONTRACTS
from trencadis_testing.bucketing import SAMPLE_LIMITS

PLUGINS = {
    "acceptance": ["match", "token", "block", "tree", "typical"],
    "bucketing": ["exact", "exponential", "linear", "padding_aware", "unified", "from_file"],
    "draft_length": ["fixed", "table", "goodput"],
    "eviction": ["lru", "lfu", "cost_aware", "ttl"],
    "executor": ["inline", "processes", "ray"],
    "observer": ["log", "prometheus", "recorder"],
    "sampling": ["standard", "greedy"],
    "scheduling": [
        *("fcfs", "prefill_first", "priority", "shortest_first"),
        *("fair_share", "deadline", "prefix_affinity"),
    ],
    "speculation": ["ngram", "suffix", "draft_model", "parallel_draft", "head", "mixed"],
}
GALLERY = {
    "eviction": ["slru", "two_queue", "s3_fifo", "arc"],
    "scheduling": ["multi_level"],
    "bucketing": ["fitted"],
    "acceptance": ["synthetic"],
}
OPTIONS = {"from_file": {"path": "buckets.txt"}, "fitted": {"trace": "trace.csv"}}
OF_A_MODEL = {"draft_model", "parallel_draft", "head"}
UNITS = {"_tokens": "tokens", "_ms": "ms", "_us": "us", "_s": "s", "_percent": "percent"}


def components_of(module: str, noun: str) -> list[Component]:
    return list(getattr(importlib.import_module(module), NOUNS[noun])())


def packages() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield a package with the hook, the noun, where its strategies lie, and their names."""
    for noun, names in PLUGINS.items():
        yield f"trencadis_plugins.{noun}", noun, f"trencadis_plugins.{noun}", names
    for noun, names in GALLERY.items():
        yield "trencadis_gallery", noun, f"trencadis_gallery.{noun}", names


EVERY = {
    f"{home}.{component.name}": (noun, component)
    for module, noun, home, _ in packages()
    for component in components_of(module, noun)
}


def make(noun: str, name: str) -> Any:
    component = {one.name: one for one in components_of(f"trencadis_plugins.{noun}", noun)}[name]
    return component.factory(component.config(), CONTEXT)


CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0, limits=SAMPLE_LIMITS["uneven"], make=make)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that components read by default are there."""
    monkeypatch.chdir(tmp_path)
    Path("buckets.txt").write_text("(1, 100, 0)\n(7, 1, 112)\n")
    Path("trace.csv").write_text("phase,batch_size,query_len,num_blocks,count\nprefill,1,64,0,1\n")


def test_hooks_yield_the_components_of_the_manual() -> None:
    for module, noun, _, names in packages():
        assert {one.name for one in components_of(module, noun)} == set(names)
    for path, (_, component) in EVERY.items():
        assert component.summary.endswith("."), path
        assert component.interface_version == 1, path


def test_every_setting_is_explained_with_its_unit() -> None:
    for path, (_, component) in EVERY.items():
        for field in attrs.fields(component.config):
            if field.metadata.get("help") is None:
                assert attrs.has(field.default.factory), f"{path}: {field.name} is no table either"
                continue
            assert field.metadata["help"].endswith("."), f"{path}: {field.name}"
            unit = next((unit for suffix, unit in UNITS.items() if field.name.endswith(suffix)), None)
            if unit and "_per_" not in field.name:
                assert field.metadata["unit"] == unit, f"{path}: {field.name}"


@pytest.mark.representatives(100)
@pytest.mark.parametrize("path", [path for path in EVERY if path.rpartition(".")[2] not in OF_A_MODEL])
@pytest.mark.usefixtures("in_a_folder")
def test_factory_makes_a_new_strategy_of_the_named_file(path: str) -> None:
    noun, component = EVERY[path]
    config = component.config(**OPTIONS.get(component.name, {}))
    first, second = (component.factory(config, CONTEXT) for _ in range(2))
    assert isinstance(first, CONTRACTS[noun])
    assert first is not second
    assert type(first).__module__ == {"trencadis_plugins.executor.ray": "trencadis_plugins.executor.ray_cluster"}.get(
        path, path
    )
    for one in (first, second):
        getattr(one, "close", lambda: None)()


def test_registering_imports_no_strategy_and_no_torch() -> None:
    calls = "; ".join(f"list({module}.{NOUNS[noun]}())" for module, noun, *_ in packages())
    imports = ", ".join({module for module, *_ in packages()})
    code = f"import sys, {imports}; {calls}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {*EVERY, "torch"} & set(found)


@pytest.mark.usefixtures("in_a_folder")
def test_factories_that_need_an_engine_say_what_is_missing() -> None:
    for noun, component in EVERY.values():
        if noun == "bucketing" and component.name != "exact":
            config = component.config(**OPTIONS.get(component.name, {}))
            with pytest.raises(ContractError, match=f"{component.name} was built without shape limits"):
                component.factory(config, attrs.evolve(CONTEXT, limits=None))
    _, fair_share = EVERY["trencadis_plugins.scheduling.fair_share"]
    with pytest.raises(ContractError, match="cannot make the scheduling component 'fcfs'"):
        fair_share.factory(fair_share.config(), ComponentContext(clock=SimulatedClock(), seed=0))


def test_factories_hand_on_their_options() -> None:
    def made(path: str, **options: Any) -> Any:
        _, component = EVERY[f"trencadis_plugins.{path}"]
        return component.factory(component.config(**options), CONTEXT)

    assert len(made("bucketing.exponential", limit=1).buckets(SAMPLE_LIMITS["uneven"])) == 2
    fcfs = made("scheduling.fcfs", long_prefill_threshold=16)
    assert fcfs.chunk(None, slot=0, num_remaining=100, token_budget=64) == 16
    assert type(made("scheduling.fair_share", inner="priority").inner).__name__ == "Priority"
    assert made("speculation.ngram", max_draft_tokens=7).max_draft_tokens == 7


def test_rules_that_read_distributions_require_a_sampler_that_gives_them_and_lossy_ones_say_so() -> None:
    lossy = set()
    for component in components_of("trencadis_plugins.acceptance", "acceptance"):
        rule = component.factory(component.config(), CONTEXT)
        needed = frozenset({"sampling.distributions"}) if rule.needs_distributions else frozenset()
        assert component.requires == needed
        if not rule.lossless:
            lossy.add(component.name)
            assert "Lossy" in component.summary
    assert lossy == {"typical"}
