from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trencadis.errors import ModelLoadError
from trencadis.text.model_path import check_model_path, is_hub_id

WHERE = '[model] path = "x" (from serve.toml)'


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen3-0.6B", "org/name_1.2"])
def test_names_on_the_hub(path: str) -> None:
    assert is_hub_id(path)


@pytest.mark.parametrize("path", ["/no/such", "./name", "a/b/c", "~/model", "org/model.gguf", "org/", ""])
def test_paths_that_are_no_names_on_the_hub(path: str) -> None:
    assert not is_hub_id(path)


def test_what_is_there_is_accepted_without_asking(tmp_path: Path) -> None:
    check_model_path("demo", where=WHERE)
    check_model_path(str(tmp_path), where=WHERE)


def test_a_path_that_leads_nowhere_is_blamed_with_its_source_and_not_the_hub() -> None:
    with pytest.raises(ModelLoadError) as caught:
        check_model_path("/no/such/dir", where=WHERE)
    assert str(caught.value).startswith(f"{WHERE}: there is no such file or directory. Give a directory")
    assert "reached" not in str(caught.value)


def test_an_unknown_hub_id_is_accepted_where_nothing_may_be_asked() -> None:
    check_model_path("nobody/no-such-model", where=WHERE, asks_hub=False)


def test_a_hub_that_is_switched_off_is_said() -> None:
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set, and no model of that id is in the cache"):
        check_model_path("nobody/no-such-model", where=WHERE)


def test_a_hub_that_cannot_be_reached_is_said_in_those_words_and_tried_once() -> None:
    with socket.socket() as closed:  # bound, and no process listens
        closed.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "trencadis", "generate", "--model.path", "nobody/no-such-model", "Hello"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub},
        )
    assert done.returncode == 2
    assert done.stderr.startswith(
        'error: [model] path = "nobody/no-such-model" (from flag --model.path): there is no such directory or file, and the hub '
        f"cannot be reached from here: {hub}: "
    )
    assert "Retry" not in done.stderr
