from __future__ import annotations

import pytest

from trencadis.cli import main
from trencadis.config import settings_of
from trencadis_server.commands.serve import SHORT_FLAGS
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.opening import listen


def test_short_flags_stand_for_settings_that_exist():
    assert set(SHORT_FLAGS.values()) <= {setting.flag for setting in settings_of({"server": ServerConfig})}


def test_a_port_in_use_ends_it_with_2_and_words(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: server.port = {port}: the port is in use on 127.0.0.1.")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "many"], "[server] port"),
        (["--port", "70000"], "[server] port"),
        (["--server.api-keys", "a,a"], "repeats an earlier key"),
        (["--backend.name", "nobody"], '"nobody"'),
        (["--model.path", "/no/such/model", "--engine.placement", "thread"], "/no/such/model"),
    ],
)
def test_what_cannot_be_served_ends_it_with_2_and_words(flags, words, capsys):
    assert main(["serve", "--server.port", "0", *flags]) == 2
    assert words in capsys.readouterr().err


def test_help_says_how_it_ends(capsys):
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--port VALUE short for --server.port" in text
    assert "A second one ends it at once." in text
