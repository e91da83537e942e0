"""What ``trencadis compare`` and ``trencadis simulate`` print on a terminal of 80 columns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.terminal import look_at

LOAD = """
num_requests = 20
[arrivals]
rate = 5.0
[lengths]
prompt = 100
output = 5
"""
COMMAND = (sys.executable, "-m", "trencadis")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "fcfs", "deadline", "--no-sensitivity", "--seeds", "2"), "No request has ttft_target_s"),
        (("simulate",), "One seed: requests were drawn"),
    ],
    ids=["compare", "simulate"],
)
@pytest.mark.representatives(1)
def test_no_line_is_longer_than_the_terminal(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "load.toml").write_text(LOAD)
    screen = look_at([*COMMAND, *words, "--workload", "load.toml"], cwd=tmp_path)
    assert said in screen.text
    assert screen.wrapped == []
    assert "INFO" not in screen.text
