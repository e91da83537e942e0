"""A lock tells every change of what decides a result, in words, and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.config import Config
from trencadis.errors import ConfigError, PlanLockError
from trencadis.registry import Registry, load_with_plugins
from trencadis.registry import provenance as provenance_module
from trencadis_tools.lock import PlanLock, differences, lock_of, read_lock

SOURCE = """
import attrs
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, SchedulingPolicy, setting


@attrs.frozen(kw_only=True)
class LotteryConfig:
    tickets: int = setting(7, "Tickets.")
    tags: frozenset[str] = setting(frozenset("hgfedcba"), "Tags.")
    password: str = setting("", "Of the draw.", secret=True)


@hookimpl
def trencadis_scheduling_policies():
    yield Component(name="lottery", factory=print, config=LotteryConfig, summary="Draws.", interface_version=1)
"""


BUILT_IN = list(importlib.metadata.entry_points(group="trencadis"))
"""What is installed, the package of the test not yet."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function: install the plugin ``draw`` of the distribution ``lottery`` and return its entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(version: str = "1.0", source: str = SOURCE) -> list[EntryPoint]:
        folder, info = tmp_path / "lottery", tmp_path / f"lottery-{version}.dist-info"
        for one in (folder, info):
            one.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "plugin.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lottery\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[trencadis]\ndraw = lottery.plugin\n")
        forget()
        return list(Distribution.at(info).entry_points)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lottery"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        provenance_module._code_files.cache_clear()

    yield install
    forget()


@pytest.fixture
def locked(package):
    """Returns a function: the lock of a configuration in which the package's policy may be chosen, and the sources of its values."""

    def lock(version: str = "1.0", source: str = SOURCE, **overrides: Any) -> tuple[PlanLock, Any]:
        points = [*BUILT_IN, *package(version, source)]
        resolved, registry = load_with_plugins(
            environ={},
            overrides={path.replace("__", "."): value for path, value in overrides.items()},
            entry_points=points,
        )
        return lock_of(resolved.config, registry), resolved.sources

    return lock


def changes(before: PlanLock, after: tuple[PlanLock, Any]) -> list[str]:
    return differences(before, *after)


LOTTERY = {"scheduling__name": "lottery"}


def test_a_lock_is_read_as_it_was_written_and_equal_locks_have_equal_bytes(locked, tmp_path: Path) -> None:
    first, _ = locked(**LOTTERY)
    file = tmp_path / "x.lock"
    file.write_text(first.as_json())
    assert read_lock(file) == first
    second, sources = locked(**LOTTERY)
    assert second.as_json() == first.as_json()
    assert changes(first, (second, sources)) == []
    assert first.settings["scheduling.lottery.tags"] == sorted("abcdefgh"), "in an order that no hash decides"


def test_it_holds_plugins_files_components_options_versions_and_the_model(locked) -> None:
    lock, _ = locked(**LOTTERY)
    assert lock.plugins["draw"] == {"distribution": "lottery", "version": "1.0", "module": "lottery.plugin"}
    assert {"lottery/__init__.py", "lottery/plugin.py", "trencadis/api.py"} <= lock.files.keys()
    assert "trencadis_torch/attention/paged_attention.cpp" in lock.files, "kernels are code"
    assert lock.components["scheduling.name"] == {"component": "lottery", "noun": "scheduling", "plugin": "draw"}
    assert {"scheduling.fallback", "observer.names[0]", "bucketing.name[padded]"} <= lock.components.keys()
    assert lock.settings["scheduling.lottery.tickets"] == 7
    assert lock.settings["engine.max_num_seqs"] == 256
    assert {"Python", "trencadis", "torch", "transformers"} <= lock.versions.keys()
    assert len(lock.model["config.json"]) == 64
    assert lock.model["model.safetensors"].endswith(" bytes")


def test_what_does_not_decide_a_result_is_free(locked, tmp_path: Path) -> None:
    lock, _ = locked()
    assert not [path for path in lock.settings if path.startswith(("log.", "plugins.", "server."))]
    assert not {"model.path", "parallel.replica", "scheduling.lottery.tickets"} & lock.settings.keys()
    assert changes(lock, locked(log__level="debug", plugins__strict=True, server__port=9)) == []


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"scheduling__lottery__tickets": 9}, ["scheduling.lottery.tickets is 9 (from argument), locked 7"]),
        ({"engine__seed": 3}, ["engine.seed is 3 (from argument), locked 0"]),
        (
            {"eviction__name": "arc"},
            ['eviction.name is "arc" of the plugin "gallery" (from argument), locked "lru" of the plugin "eviction"'],
        ),
        (
            {"scheduling__name": "priority"},
            [
                'scheduling.name is "priority" of the plugin "scheduling" (from argument), locked "lottery" of the plugin "draw"'
            ],
        ),
        ({"observer__names": []}, ['observer.names[0] is absent, locked "log" of the plugin "observer"']),
        ({"model__revision": "v2"}, ['model.revision is "v2" (from argument), locked ""']),
    ],
)
def test_a_changed_setting_is_named_with_its_source(locked, overrides, found) -> None:
    before, _ = locked(**LOTTERY)
    assert changes(before, locked(**{**LOTTERY, **overrides})) == found


def test_a_secret_is_not_written_and_another_one_is_noticed(locked) -> None:
    before, _ = locked(**LOTTERY, scheduling__lottery__password="opensesame")
    assert "opensesame" not in before.as_json()
    after = locked(**LOTTERY, scheduling__lottery__password="sesame")
    (line,) = changes(before, after)
    assert line == (f"the plan hash is {after[0].plan_hash}, locked {before.plan_hash}: a value that is secret differs")


def test_an_edited_file_is_named(locked) -> None:
    before, _ = locked()
    (line,) = changes(before, locked(source=SOURCE + "\n# a word\n"))
    assert line.startswith("the file lottery/plugin.py is sha256 ")
    assert f"locked sha256 {before.files['lottery/plugin.py'][:12]}…" in line


def test_another_version_is_named_instead_of_its_files(locked) -> None:
    before, _ = locked()
    assert changes(before, locked("1.1", SOURCE + "\n# a word\n")) == [
        "the plugin draw is lottery 1.1, locked lottery 1.0"
    ]


def test_a_plugin_that_came_or_went_is_named(locked) -> None:
    lock, sources = locked()
    without = attrs.evolve(
        lock,
        plugins={name: one for name, one in lock.plugins.items() if name != "draw"},
        files={name: one for name, one in lock.files.items() if not name.startswith("lottery/")},
    )
    assert differences(without, lock, sources) == ["the plugin draw is lottery 1.0, not in the lock"]
    assert differences(lock, without, sources) == ["the plugin draw is not loaded, locked lottery 1.0"]


def test_plugins_of_one_distribution_are_named_together(locked) -> None:
    lock, _ = locked()
    older = {
        name: {**one, "version": "0.0.9"} for name, one in lock.plugins.items() if name in ("eviction", "sampling")
    }
    (line,) = differences(attrs.evolve(lock, plugins={**lock.plugins, **older}), lock)
    assert line == "the plugins eviction, sampling is trencadis 0.1.0, locked trencadis 0.0.9".replace(" is ", " are ")


def test_versions_and_files_of_the_model_are_named(locked) -> None:
    lock, _ = locked()
    then = attrs.evolve(
        lock,
        versions={**lock.versions, "torch": "1.0", "gone": "2"},
        model={**lock.model, "model.safetensors": "7 bytes", "config.json": "0" * 64},
    )
    assert differences(then, lock) == [
        "gone is absent, locked 2",
        f"torch is {lock.versions['torch']}, locked 1.0",
        f"config.json of the model is sha256 {lock.model['config.json'][:12]}…, locked sha256 000000000000…",
        f"model.safetensors of the model is {lock.model['model.safetensors']}, locked 7 bytes",
    ]


def test_a_hub_id_is_locked_by_its_revision_and_nothing_is_downloaded(locked) -> None:
    lock, _ = locked(model__path="some/model", model__revision="abc", model__tokenizer="other/model")
    assert lock.model == {"hub": "some/model", "revision": "abc"}
    assert lock.tokenizer == {"hub": "other/model", "revision": ""}
    assert locked(model__tokenizer="none")[0].tokenizer == {}


names = st.sampled_from(["a", "b", "c"])
values = st.sampled_from(["1", "2", "0" * 64])
components = st.dictionaries(
    st.sampled_from(["scheduling.name", "scheduling.fallback"]),
    st.fixed_dictionaries({"component": names, "noun": st.just("scheduling"), "plugin": names}),
)
locks = st.builds(
    PlanLock,
    plan_hash=values,
    versions=st.dictionaries(st.sampled_from(["Python", "trencadis"]), values),
    plugins=st.dictionaries(names, st.fixed_dictionaries({"distribution": names, "version": values, "module": names})),
    files=st.dictionaries(st.sampled_from(["a/x.py", "trencadis/y.py", "c.py"]), values),
    components=components,
    settings=st.dictionaries(
        st.sampled_from(["engine.seed", "scheduling.a.x", "scheduling.b.x", "scheduling.other.x"]), st.none() | values
    ),
    model=st.dictionaries(names, values),
    tokenizer=st.dictionaries(names, values),
)


@given(locks, locks)
def test_there_is_a_sentence_exactly_if_two_locks_differ(one: PlanLock, other: PlanLock) -> None:
    assert bool(differences(one, other)) == (one != other)
    assert differences(one, PlanLock(**json.loads(json.dumps(attrs.asdict(one))))) == []


def test_a_start_that_differs_is_refused_with_the_first_differences(locked, tmp_path: Path) -> None:
    file = tmp_path / "trencadis.lock"
    resolved, registry = load_with_plugins(environ={}, entry_points=BUILT_IN)
    lock = lock_of(resolved.config, registry)
    file.write_text(lock.as_json())
    registry.hooks.check_lock(file, resolved.config, registry)
    file.write_text(attrs.evolve(lock, versions={**lock.versions, **{f"p{i:02}": "1" for i in range(12)}}).as_json())
    with pytest.raises(PlanLockError) as caught:
        registry.hooks.check_lock(file, resolved.config, registry)
    assert str(caught.value).splitlines() == [
        f"{file} locks another plan than this one:",
        *[f"  p{i:02} is absent, locked 1" for i in range(10)],
        "  and 2 more",
        "Undo the changes; or, if they are meant, write the lock anew: trencadis lock.",
    ]


def test_without_a_plugin_that_has_trencadis_check_lock_nothing_is_held_to_a_lock(tmp_path: Path) -> None:
    registry = Registry.discover(entry_points=())
    with pytest.raises(ConfigError, match="--locked: no plugin that reads lock files can be used"):
        registry.hooks.check_lock(tmp_path / "x.lock", Config(), registry)
