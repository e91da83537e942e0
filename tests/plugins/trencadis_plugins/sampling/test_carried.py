from __future__ import annotations

import pytest

from trencadis_plugins.sampling import carried as module
from trencadis_plugins.sampling.carried import CarriedStates


class _Counter:
    """A processor whose state is a number for each row."""

    name = "counter"
    rebuilds_state = False

    def __init__(self):
        self.state = {}

    def applies_to(self, start):
        return start.params.top_k == 7

    def snapshot(self, row):
        return self.state[row]

    def restore(self, row, state):
        self.state[row] = state


@pytest.fixture
def seat(start):
    """Start a sequence in a row, as the sampler does."""
    counter = _Counter()
    states = CarriedStates([counter])

    def take(row, prompt=(1, 2), output=(), *, seed=3, **params):
        one = start(row, prompt, output, row_seed=seed, **{"top_k": 7, **params})
        states.leave(row)
        counter.state[row] = 0
        states.enter(one)

    return take, counter


def test_a_sequence_that_comes_back_has_its_state_again(seat):
    take, counter = seat
    take(0)
    counter.state[0] = 41
    take(0, seed=8)
    take(3, output=[5])
    assert counter.state == {0: 0, 3: 41}


def test_a_sequence_comes_back_while_its_old_row_is_free(seat):
    take, counter = seat
    take(0)
    counter.state[0] = 41
    take(2, output=[5])
    assert counter.state[2] == 41


@pytest.mark.parametrize("other", [{"seed": 4}, {"prompt": (1, 3)}, {"temperature": 0.5}, {"output": []}])
def test_another_sequence_does_not_get_it(seat, other):
    take, counter = seat
    take(0)
    counter.state[0] = 41
    take(0, seed=9)
    if other.get("output") == []:
        take(1, **other)
    else:
        with pytest.raises(ValueError, match="counter: what it knew of this request is lost"):
            take(1, **{"output": [5], **other})
    assert counter.state[1] == 0


def test_a_sequence_whose_state_is_lost_does_not_go_on_without(seat, monkeypatch):
    """As after a snapshot that failed."""
    take, counter = seat
    take(0)
    monkeypatch.setattr(counter, "snapshot", lambda row: None)
    take(0, seed=9)
    with pytest.raises(ValueError, match="Send it again"):
        take(3, output=[5])


def test_a_state_that_is_made_anew_from_the_tokens_need_not_be_kept(seat, monkeypatch):
    take, counter = seat
    monkeypatch.setattr(counter, "rebuilds_state", True)
    monkeypatch.setattr(counter, "snapshot", lambda row: None)
    take(0)
    take(0, seed=9)
    take(3, output=[5])
    assert counter.state[3] == 0


def test_sequences_that_do_not_ask_are_not_kept(seat):
    take, counter = seat
    take(0, top_k=1)
    counter.state[0] = 41
    take(1, output=[5], top_k=1)
    assert counter.state[1] == 0


def test_the_oldest_are_forgotten(seat, monkeypatch):
    monkeypatch.setattr(module, "_MAX_SAVED", 2)
    take, counter = seat
    for seed in range(4):
        take(0, seed=seed)
        counter.state[0] = 100 + seed
    take(0, seed=99)
    for seed in range(2):
        with pytest.raises(ValueError, match="is lost"):
            take(1 + seed, output=[5], seed=seed)
    for seed in (2, 3):
        take(1 + seed, output=[5], seed=seed)
        assert counter.state[1 + seed] == 100 + seed
