"""Each process reads the configuration file once, loads each plugin once and builds one catalogue of settings, whatever the command."""

from __future__ import annotations

import builtins
import importlib
import io
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import attrs
import pluggy
import pytest

from trencadis.cli import main
from trencadis.cli.main import all_commands
from trencadis.client.factory import configure
from trencadis.config import Settings
from trencadis.registry.manager import PluginLoader

PLUGINS = {point.name: "on_demand" in point.extras for point in entry_points(group="trencadis")}
"""Whether each is imported only where its name stands in the configuration."""
NO_MODEL = ["--model.path", "/no/such/model", "--engine.placement", "thread"]
COMMANDS = {
    "generate": (2, ["hi", *NO_MODEL]),
    "run": (2, ["/no/such/model", "hi"]),
    "chat": (2, ["/no/such/model"]),
    "plugins": (0, []),
    "config": (0, []),
    "cluster": (2, ["down", "--port", "65121"]),
    "kv": (2, ["show", "/no/such/directory"]),
    "serve": (2, ["--server.port", "0", *NO_MODEL]),
    "run-batch": (2, ["-i", "batch.jsonl", "-o", "answers.jsonl", *NO_MODEL]),
    "explain": (69, ["--url", "http://127.0.0.1:1", "x"]),
    "bench": (2, ["throughput", *NO_MODEL]),
    "buckets": (0, ["--strategy", "exponential"]),
    "warmup": (2, NO_MODEL),
    "layout": (2, ["--devices", "2", "--memory", "1GiB", *NO_MODEL]),
    "expert-loads": (2, ["/no/such/page"]),
    "doctor": (0, ["--server.port", "0"]),
    "new-plugin": (0, ["scheduling", "lottery"]),
    "compare": (2, ["fcfs", "prefill_first", "--workload", "/no/such/workload"]),
    "simulate": (2, ["--workload", "/no/such/workload"]),
    "workload": (0, ["poisson"]),
    "replay": (2, ["/no/such/record"]),
    "tune": (2, ["--workload", "/no/such/workload"]),
    "lock": (2, NO_MODEL),
    "gaudi-check": (2, ["--timeout", "0"]),
}
"""Of each command the exit code, and arguments with which it goes as far as is cheap."""


@attrs.define
class Counts:
    """Numbers of a process."""

    reads: int = 0
    loaded: Counter[str] = attrs.field(factory=Counter)
    registered: Counter[str] = attrs.field(factory=Counter)
    catalogues: int = 0

    def once(self) -> None:
        """Check that nothing was done twice, and that file and plugins were looked at: all, or those that are not there on demand."""
        most = Counter([name for name, is_on_demand in PLUGINS.items() if not is_on_demand])
        assert self.reads == 1
        # A command line that says where the engine runs names the plugin ``placement``.
        assert self.loaded in (Counter(list(PLUGINS)), most, most + Counter(["placement"]))
        assert self.registered == self.loaded
        assert self.catalogues <= 1


def wrapped(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that calls ``note`` first."""

    def call(*arguments: Any, **options: Any) -> Any:
        note(*arguments, **options)
        return function(*arguments, **options)

    return call


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file, named by the environment, in an empty folder where commands run."""
    (tmp_path / "serve.toml").write_text('[log]\nlevel = "warning"\n')
    (tmp_path / "batch.jsonl").write_text('{"custom_id": "1"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TRENCADIS_CONFIG", str(tmp_path / "serve.toml"))
    return tmp_path / "serve.toml"


@pytest.fixture
def counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What is done from now on."""
    found = Counts()

    def opened(name: Any, *_: Any, **__: Any) -> None:
        found.reads += name == file or name == str(file)

    def loaded(point: EntryPoint) -> None:
        if point.group == "trencadis":
            found.loaded[point.name] += 1

    def catalogued(_: Settings, classes: Any, *__: Any) -> None:
        found.catalogues += "engine" in classes

    def registered(_: Any, __: Any, name: str | None = None) -> None:
        found.registered[name or ""] += 1

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", wrapped(open, opened))
    monkeypatch.setattr(EntryPoint, "load", wrapped(EntryPoint.load, loaded))
    monkeypatch.setattr(pluggy.PluginManager, "register", wrapped(pluggy.PluginManager.register, registered))
    monkeypatch.setattr(Settings, "__init__", wrapped(Settings.__init__, catalogued))
    return found


def test_every_command_is_counted() -> None:
    assert set(COMMANDS) == set(all_commands(PluginLoader.of_installed()).commands)


@pytest.mark.representatives(len(COMMANDS))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_the_file_once_and_loads_each_plugin_once(name: str, counts: Counts) -> None:
    code, arguments = COMMANDS[name]
    assert main([name, *arguments]) == code
    if name == "compare":  # each configuration that it compares is one of its own, beside that of the command
        assert counts.reads == 3
    else:
        counts.once()
    if name in {"generate", "run", "chat", "serve"}:
        assert {plugin for plugin in counts.loaded if PLUGINS[plugin]} <= {"placement"}


@pytest.mark.parametrize("name", COMMANDS)
def test_so_does_help_of_a_command(name: str, counts: Counts) -> None:
    assert main([name, "--help"]) == 0
    if name not in {"kv", "new-plugin", "expert-loads", "workload"}:  # their help lists no settings
        assert counts.catalogues == 1
    counts.once()


def test_so_does_the_list_of_commands_and_it_builds_no_catalogue(counts: Counts) -> None:
    assert main(["--help"]) == 0
    counts.once()
    assert counts.catalogues == 0


def test_so_does_an_application_in_python(counts: Counts) -> None:
    configure("demo", config_file=None, tables={})
    counts.once()
    assert not any(PLUGINS[plugin] for plugin in counts.loaded)


@pytest.mark.parametrize("arguments", [["--speculation.name", "ngram"], ["--speculation.ngram.max-draft-tokens=3"]])
def test_a_plugin_that_is_there_on_demand_is_loaded_where_it_is_named(arguments: list[str], counts: Counts) -> None:
    assert main(["generate", "hi", *NO_MODEL, *arguments]) == 2
    assert [name for name in counts.loaded if PLUGINS[name]] == ["placement", "speculation"]


@pytest.mark.parametrize(
    "arguments", [["--speclation.name", "ngram"], ["--max-draft-tokns", "3"], ["--backend.name", "gaud"]]
)
def test_where_nothing_fits_all_are_loaded(
    arguments: list[str], counts: Counts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--engine.placement", "thread", *arguments]) == 2
    assert counts.loaded == Counter(list(PLUGINS))
    assert "Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config", "doctor", "serve"])
def test_a_file_that_cannot_be_read_is_opened_once(name: str, counts: Counts, file: Path, capsys: Any) -> None:
    file.write_text("[log\n")
    counts.reads = 0
    assert main([name]) != 0
    assert counts.reads == 1
    assert "not valid TOML" in "".join(capsys.readouterr())


def test_a_plugin_that_a_short_form_of_a_flag_blocks_is_not_used(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("trencadis_server.commands.explain")
    monkeypatch.setattr(module, "SHORT_FLAGS", {"--without": "--plugins.blocked"}, raising=False)
    assert main(["explain", "x", "--without", "scheduling", "--scheduling.fcfs.x", "1"]) == 2
    assert "--scheduling.fcfs.x: no such flag" in capsys.readouterr().err


def test_a_key_is_not_taken_for_that_of_one_table_before_all_tables_are_known(
    counts: Counts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", *NO_MODEL, "--warmup", "false"]) == 2
    assert "--warmup is a key of several tables" in capsys.readouterr().err
    assert counts.loaded == Counter(list(PLUGINS))
