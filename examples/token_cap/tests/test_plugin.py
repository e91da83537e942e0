"""The package is installed, and offers what it says."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from trencadis_token_cap.config import TokenCapConfig


def test_entry_point_names_the_package() -> None:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group="trencadis")}
    assert found.get("token-cap") == "trencadis_token_cap", "run pip install -e ."


def test_table_has_flags_and_the_command_generates_under_a_cap() -> None:
    words = ["generate", "Once upon a time", "--max-tokens", "4", "--json", "--token-cap.max-tokens-per-tenant", "8"]
    line = [sys.executable, "-m", "trencadis", *words, "--engine.warmup=false", "--cache.num-blocks=64"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4


def test_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_tenant"):
        TokenCapConfig(max_tokens_per_tenant=-1)
