from __future__ import annotations

import logging

import pytest

from trencadis.log import configure_logging


@pytest.fixture
def logger():
    logger = logging.getLogger("trencadis")
    before, handlers = logger.level, list(logger.handlers)
    logger.handlers = []
    yield logger
    logger.setLevel(before)
    logger.handlers = handlers


def test_messages_from_the_level_up_are_one_line_on_standard_error(logger, capsys) -> None:
    configure_logging("info")
    logging.getLogger("trencadis.engine").info("Prepared %d buckets.", 3)
    logging.getLogger("trencadis.engine").debug("not shown")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(" INFO trencadis.engine: Prepared 3 buckets.\n")
    assert printed.err.count("\n") == 1


def test_second_call_changes_the_level_and_adds_no_second_line(logger, capsys) -> None:
    configure_logging("info")
    configure_logging("warning")
    logger.info("hidden")
    logger.warning("shown")
    assert capsys.readouterr().err.count("\n") == 1
