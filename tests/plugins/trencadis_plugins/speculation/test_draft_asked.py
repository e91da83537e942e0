from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Request, SamplingParams
from trencadis_plugins.speculation.draft_asked import Asked, in_target, read_linear
from trencadis_plugins.speculation.draft_memory import Held
from trencadis_plugins.speculation.draft_sampler import Guesses
from trencadis_plugins.speculation.draft_tokens import Translation


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def asked(row: int, *, known: int = 6, held: int = 4, count: int = 2, greedy: bool = False) -> Asked:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    place = Held(slot=row, request=request, row=row, tokens=np.arange(held, dtype=np.int32))
    tokens = np.arange(known, dtype=np.int32)
    return Asked(index=0, held=place, tokens=tokens, num_known=known, count=count, is_linear=True, is_greedy=greedy)


def guesses(rows: list[int], positions: list[int], tokens: list[int], *, distributions: bool = True) -> Guesses:
    some = torch.ones(len(rows), 3) if distributions else None
    return Guesses(rows=tuple(rows), positions=tuple(positions), token_ids=torch.tensor(tokens), distributions=some)


def test_drafts_are_read_by_row_and_position_whatever_else_is_in_the_calls() -> None:
    # Row 1 had two tokens to compute, and padding repeats it; row 0 is in the second call alone once more.
    one, other = asked(1), asked(0, known=3, held=2, greedy=True)
    taken = [
        guesses([1, 1, 0, 0, 1, 1], [4, 5, 2, 2, 4, 5], [90, 91, 80, 80, 90, 91], distributions=False),
        guesses([1, 0, 1], [6, 3, 6], [92, 81, 92]),
    ]
    read_linear([one, other], taken)
    assert one.drafts.tolist() == [91, 92]
    assert one.distributions.tolist() == [-1, 0]
    assert other.drafts.tolist() == [80, 81]
    assert other.distributions.tolist() == [-1, -1], "greedy drafts are certain, whoever else draws"


def test_a_token_that_was_not_sampled_is_an_error() -> None:
    with pytest.raises(StepFailedError, match=r"\(1, 6\)"):
        read_linear([asked(1)], [guesses([1], [5], [9])])


def test_a_query_has_what_the_cache_lacks_and_the_guesses() -> None:
    one = asked(0)
    assert one.num_missing == 2
    assert (one.query().start, one.query().given.tolist(), one.query().guessed) == (4, [4, 5], 0)
    query = one.query(array(7, 8, 9), array(-1, 0, 0))
    assert (query.start, query.given.tolist(), query.guessed, query.length) == (4, [4, 5, 7, 8, 9], 3, 5)


def test_drafts_follow_each_other_unless_it_is_said_otherwise() -> None:
    one = asked(0)
    one.drafts = array(4, 5, 6)
    assert one.branches.tolist() == [-1, 0, 1]
    one.parents = array(-1, -1, 0)
    assert one.branches.tolist() == [-1, -1, 0]


def test_distributions_go_where_the_tokens_go() -> None:
    distribution = torch.tensor([[0.2, 0.3, 0.5]])
    assert (
        in_target([distribution, distribution], Translation.identity(3, 3)).tolist()
        == torch.cat([distribution, distribution]).tolist()
    )
    assert torch.equal(in_target([distribution], Translation.identity(2, 3)), distribution[:, :2])
    assert torch.equal(in_target([distribution], Translation.identity(4, 3)), torch.tensor([[0.2, 0.3, 0.5, 0.0]]))
    swapped = Translation(to_draft=array(2, -1, 0), to_target=array(2, -1, 0), is_identity=False)
    assert torch.equal(in_target([distribution], swapped), torch.tensor([[0.5, 0.0, 0.2]]))
