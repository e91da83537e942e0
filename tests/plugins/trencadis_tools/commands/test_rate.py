"""``--rate`` has one meaning and one spelling in every command that takes one, and ``--rates`` is the same."""

from __future__ import annotations

import argparse

import pytest

from trencadis_tools.commands import bench, compare, simulate, workload


@pytest.mark.parametrize("flag", ["--rate", "--rates"])
@pytest.mark.parametrize(
    ("command", "words", "rate"),
    [(compare, ["fcfs"], [2.5]), (simulate, [], 2.5), (workload, [], 2.5), (bench, ["schedule"], 2.5)],
    ids=["compare", "simulate", "workload", "bench"],
)
@pytest.mark.representatives(8)
def test_every_command_takes_a_rate_in_both_spellings(command, words, rate, flag) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args([*words, flag, "2.5"]).rate == rate
