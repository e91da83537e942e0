from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.errors import ConfigError, ConfigValueError, PluginError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.doubles import LoopConnector
from trencadis_tools.bench import KVResult
from trencadis_tools.commands import bench as bench_command

SEEN: list[str] = []


@attrs.frozen(kw_only=True)
class InDirectory:
    path: str = ""


def make_loop(config, context):
    if config.path == "nowhere":
        raise ConfigValueError("there is no such place")
    SEEN.append(config.path)
    assert Path(config.path).parent.is_dir()
    return LoopConnector().pair()


@pytest.fixture
def bench(fake_house, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    parts = {
        "trencadis_kv_connectors": Component(
            name="mine", factory=make_loop, config=InDirectory, summary="Mine.", interface_version=1
        ),
        "trencadis_kv_policies": Component(
            name="always", factory=lambda config, context: KVPolicy(), summary="All.", interface_version=1
        ),
        "trencadis_kv_codecs": Component(
            name="none", factory=lambda config, context: IdentityCodec(), summary="As is.", interface_version=1
        ),
    }
    plugin = types.ModuleType("connectors")
    for hook, component in parts.items():
        setattr(plugin, hook, hookimpl(specname=hook)(lambda component=component: [component]))

    def run(*arguments: str, path: str = "") -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        config, registry = fake_house()
        registry.register(plugin)
        kv_connector = attrs.evolve(config.kv_connector, components={"mine": InDirectory(path=path)})
        given = parser.parse_args(["kv", "--num-tokens", "20", "--pairs", "2", *arguments])
        SEEN.clear()
        assert bench_command.run(given, attrs.evolve(config, kv_connector=kv_connector), registry) == 0
        return capsys.readouterr().out

    return run


def test_json_has_every_measure_of_every_connector(bench) -> None:
    told = json.loads(bench("--connectors", "none, mine", "--json"))
    assert [result["connector"] for result in told] == ["none", "mine"]
    for result in told:
        assert set(result) == {field.name for field in attrs.fields(KVResult)}
        assert (result["num_tokens"], result["num_pairs"], result["num_same_texts"]) == (20, 2, 2)
    assert [result["num_loaded_tokens"] for result in told] == [0, 16]


def test_without_names_every_installed_connector_is_measured(bench) -> None:
    lines = bench().splitlines()
    assert lines[0].startswith("connector")
    assert [line.split()[0] for line in lines[1:]] == ["mine"]
    assert "16 of 20" in lines[1]


def test_a_connector_over_a_directory_gets_one_that_is_gone_afterwards(bench, tmp_path: Path) -> None:
    bench()
    assert len(set(SEEN)) == 1
    assert not Path(SEEN[0]).parent.exists()
    bench(path=str(tmp_path / "mine"))
    assert set(SEEN) == {str(tmp_path / "mine")}


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--num-tokens", "-1"), "num_tokens"), (("--pairs", "0"), "num_pairs")]
)
def test_flags_that_make_no_sense_are_named(bench, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*arguments)


def test_a_connector_that_there_is_not_is_named_before_anything_is_measured(bench) -> None:
    with pytest.raises(PluginError, match="mnie") as caught:
        bench("--connectors", "mine,mnie")
    assert 'Did you mean "mine"' in str(caught.value)
    assert SEEN == []


def test_a_connector_that_cannot_be_used_is_an_error_only_if_it_was_named(bench, capsys) -> None:
    with pytest.raises(ConfigValueError, match="no such place"):
        bench("--connectors", "mine", path="nowhere")
    capsys.readouterr()
    assert bench("--json", path="nowhere").strip() == "[]"
