"""Two processes that hash texts differently are compared, and who cannot be made in them is left out in words."""

from __future__ import annotations

import os
import sys

import pytest

from trencadis_testing import hash_seeds
from trencadis_testing.hash_seeds import same_under_other_hashes


class Suite:
    """Stands for a conformance suite."""

    def __init__(self, held=None):
        self.held = held

    def same(self):
        sys.stdout.write("plugins may print")
        return [[1, 2.5], "text"]

    def what_it_holds(self):
        return [self.held]

    def order_of_a_set(self):
        return [1, list({f"tenant {i}" for i in range(20)})]

    def as_many_as_a_hash_says(self):
        return [0] * (hash("tenant") % 1000)

    def what_was_left_behind(self):
        vars(sys).setdefault("left_behind", [])
        sys.left_behind.append(1)
        return sys.left_behind

    def where(self):
        return [os.getcwd(), os.environ["HOME"], sys.path[-1]]

    def which_process(self):
        return [os.getppid(), os.getpid()]

    def stops(self):
        os._exit(3)

    def fails(self):
        raise KeyError("no such block")


def test_answers_that_are_the_same_pass():
    same_under_other_hashes(Suite(), "same")


def test_each_comparison_begins_with_nothing_of_the_one_before():
    for _ in range(2):
        assert [said["answers"] for said in hash_seeds._said(Suite(), "what_was_left_behind")] == [[1], [1]]


def test_processes_are_started_once_and_children_for_each_comparison():
    said = [hash_seeds._said(Suite(), "which_process") for _ in range(2)]
    parents, children = zip(*[one["answers"] for pair in said for one in pair], strict=True)
    assert parents[:2] == parents[2:]
    assert len({*parents, *children}) == 6


def test_a_child_that_ends_without_an_answer_is_told_with_its_exit_code():
    with pytest.raises(AssertionError, match=r"^exit code 3 of a process with PYTHONHASHSEED=1"):
        same_under_other_hashes(Suite(), "stops")


def test_it_runs_where_the_parent_is_by_then(tmp_path, monkeypatch):
    same_under_other_hashes(Suite(), "same")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, "/else/where"])
    assert hash_seeds._said(Suite(), "where")[0]["answers"] == [str(tmp_path), "/somewhere", "/else/where"]


@pytest.mark.slow
def test_without_fork_two_processes_are_started_for_each_comparison(monkeypatch):
    monkeypatch.setattr(hash_seeds, "_can_fork", False)
    monkeypatch.setattr(hash_seeds, "_lasting", None)
    same_under_other_hashes(Suite(), "same")
    with pytest.raises(AssertionError, match=r"with PYTHONHASHSEED=1 and .* with 2"):
        same_under_other_hashes(Suite(), "order_of_a_set")


def test_another_order_fails_and_says_which_answer():
    with pytest.raises(
        AssertionError,
        match=r"answer 1 to the same calls is \['tenant .* with PYTHONHASHSEED=1 and .* with 2: do not go by hash",
    ):
        same_under_other_hashes(Suite(), "order_of_a_set")


def test_a_failure_in_the_other_process_is_shown():
    with pytest.raises(AssertionError, match=r"PYTHONHASHSEED=1:\n(?s:.*)KeyError: 'no such block'"):
        same_under_other_hashes(Suite(), "fails")


def test_a_local_class_is_left_out_in_words():
    class Local(Suite):
        pass

    with pytest.raises(
        pytest.skip.Exception, match=r"Local cannot be made in another process \(.*at the top of a module"
    ):
        same_under_other_hashes(Local(), "same")


def test_what_another_process_cannot_make_is_left_out_in_words():
    with pytest.raises(
        pytest.skip.Exception, match=r"Suite cannot be made in another process \(ZeroDivisionError: only there"
    ):
        same_under_other_hashes(Suite(held=OnlyHere()), "same")


class OnlyHere:
    def __reduce__(self):
        return _fail, ()


def _fail():
    raise ZeroDivisionError("only there")
