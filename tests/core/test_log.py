from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import re
from pathlib import Path

import attrs
import pytest

from trencadis.config.schema import LogConfig
from trencadis.log import FORMATS, adopt_package, configure_logging, loading_level, log_levels
from trencadis.registry.contracts import CORE_NOUNS
from trencadis.registry.import_path import import_component
from trencadis.registry.manager import PluginLoader


@pytest.fixture
def logger(monkeypatch):
    logger = logging.getLogger("trencadis")
    before, handlers = logger.level, list(logger.handlers)
    logger.handlers = []
    monkeypatch.setattr("trencadis.log._names", {"trencadis"})
    monkeypatch.setattr("trencadis.log._level", "")
    monkeypatch.setattr("trencadis.log._format", "text")
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    monkeypatch.setattr(logging, "captureWarnings", lambda _: None)
    yield logger
    logger.setLevel(before)
    logger.handlers = handlers
    logging.getLogger("py.warnings").handlers = []


def test_messages_from_the_level_up_are_one_line_on_standard_error(logger, capsys) -> None:
    configure_logging("info")
    logging.getLogger("trencadis.engine").info("Prepared %d buckets.", 3)
    logging.getLogger("trencadis.engine").debug("not shown")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(" INFO trencadis.engine: Prepared 3 buckets.\n")
    assert printed.err.count("\n") == 1


def test_a_line_has_a_date(logger, capsys) -> None:
    configure_logging("info")
    logger.info("x")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO trencadis: x\n", capsys.readouterr().err)


def test_json_is_one_object_a_line_with_the_fields_of_the_record(logger, capsys) -> None:
    configure_logging("info", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("It\nfailed: %d.", 7, extra={"fields": {"request_id": "r1", "status": 500, "level": "forged"}})
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert "ValueError: two\nlines" in found.pop("exception")
    assert found == {
        "level": "error",
        "logger": "trencadis",
        "message": "It\nfailed: 7.",
        "process": os.getpid(),
        "request_id": "r1",
        "status": 500,
    }


def test_warnings_of_other_libraries_have_the_same_format(logger, capsys) -> None:
    configure_logging("info", "json")
    record = logging.LogRecord("acme", logging.WARNING, __file__, 1, "odd", (), None)
    logging.lastResort.handle(record)
    assert json.loads(capsys.readouterr().err)["logger"] == "acme"
    assert logging.lastResort.level == logging.WARNING


def test_the_journal_gets_a_priority_before_each_line_and_no_time(logger, capsys) -> None:
    configure_logging("debug", "journal")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "a\nb")
    lines = capsys.readouterr().err.splitlines()
    assert lines[2:4] == ["<6>INFO trencadis: a", "<6>b"]
    assert [line[:3] for line in lines] == ["<7>", "<7>", "<6>", "<6>", "<4>", "<4>", "<3>", "<3>"]


def test_every_format_of_the_configuration_is_known() -> None:
    (check,) = [field.validator for field in attrs.fields(LogConfig) if field.name == "format"]
    for form in FORMATS:
        LogConfig(format=form)
    assert set(check.options) == set(FORMATS)


def test_second_call_changes_the_level_and_adds_no_second_line(logger, capsys) -> None:
    configure_logging("info")
    configure_logging("warning")
    logger.info("hidden")
    logger.warning("shown")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_messages_of_plugins_are_shown_as_our_own_whichever_comes_first(logger, capsys, is_early) -> None:
    if is_early:
        adopt_package("acme_strategies.bucketing.oval")
    configure_logging("info")
    if not is_early:
        adopt_package("acme_strategies.bucketing.oval")
    own = logging.getLogger("acme_strategies.bucketing.oval")
    own.info("Generated %d ovals.", 3)
    own.debug("not shown")
    assert capsys.readouterr().err.endswith(" INFO acme_strategies.bucketing.oval: Generated 3 ovals.\n")
    configure_logging("error")
    own.info("hidden")
    assert capsys.readouterr().err == ""


def test_in_a_library_nothing_is_configured(logger) -> None:
    adopt_package("acme_library.plugin")
    assert not logging.getLogger("acme_library").handlers
    assert logging.getLogger("acme_library").level == logging.NOTSET


@pytest.mark.parametrize("how", ["an entry point", "an object", "an import path"])
def test_every_way_to_a_plugin_shows_its_messages(logger, monkeypatch, how) -> None:
    seen: list[str] = []
    for module in ("manager", "import_path"):
        monkeypatch.setattr(f"trencadis.registry.{module}.adopt_package", seen.append)
    module = "trencadis_testing.engines"
    match how:
        case "an entry point":
            loader = PluginLoader()
            entry_point = importlib.metadata.EntryPoint(name="x", value=module, group="trencadis")
            ((found, provenance),) = loader.candidates([entry_point])
            loader.load_entry_point(found, provenance)
        case "an object":
            PluginLoader().load_object(importlib.import_module(module))
        case "an import path":
            import_component(CORE_NOUNS["scheduling"], f"{module}:ServeInOrder", key="scheduling.name", source="a test")
    assert [name.partition(":")[0] for name in seen] == [module]


def test_all_that_is_built_in_logs_under_one_name() -> None:
    root = Path(__file__).parents[2]
    files = [file for room in ("core", "plugins", "backends") for file in (root / room).rglob("*.py")]
    assert len(files) > 300
    bad = [
        f"{file}: {call}"
        for file in files
        for call in re.findall(r"(?<!\w)logging\.getLogger\(([^)]*)\)", file.read_text(encoding="utf-8"))
        if not re.match(r'"(trencadis[."]|nixl")|name$', call)
        and not (call == "__name__" and "core/trencadis/" in str(file))
    ]
    assert bad == []


def test_while_an_engine_loads_the_log_has_a_level_of_its_own(logger, capsys) -> None:
    configure_logging("info", loading="warning")
    assert log_levels() == ("warning", "info")
    with loading_level(), loading_level():
        logger.info("hidden")
        logger.warning("shown")
    logger.info("shown as well")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["shown", "shown as well"]


def test_a_library_that_configures_nothing_hands_its_own_level_to_processes(logger) -> None:
    logger.setLevel(logging.ERROR)
    with loading_level():
        assert log_levels() == ("error", "error")
        assert logger.level == logging.ERROR
