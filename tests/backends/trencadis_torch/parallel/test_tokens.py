from __future__ import annotations

import pytest
import torch

from trencadis.errors import StepFailedError
from trencadis_torch.parallel.tokens import Chosen, TokenExchange

CPU = torch.device("cpu")


def exchanges(ranks):
    return ranks(lambda groups: TokenExchange(groups.tensor), 3)


def test_every_rank_has_the_tokens_of_the_first(ranks):
    chosen = Chosen(
        token_ids=torch.tensor([[5, 6, 7], [8, 9, 9]]),
        num_accepted=torch.tensor([2, 0]),
        nodes=torch.tensor([[1, 3], [0, 0]]),
    )

    def share(exchange):
        return exchange.share(
            lambda: chosen if exchange.is_output else pytest.fail("called"),
            num_sequences=2,
            num_steps=3,
            has_paths=True,
            device=CPU,
        )

    for one in exchanges(ranks).call(share):
        assert torch.equal(one.token_ids, chosen.token_ids)
        assert torch.equal(one.num_accepted, chosen.num_accepted)
        assert torch.equal(one.nodes, chosen.nodes)


def test_tokens_without_drafts_have_neither_counts_nor_paths(ranks):
    def share(exchange):
        tokens = Chosen(token_ids=torch.tensor([[5], [8]]))
        return exchange.share(lambda: tokens, num_sequences=2, num_steps=1, has_paths=False, device=CPU)

    for one in exchanges(ranks).call(share):
        assert one.token_ids.tolist() == [[5], [8]]
        assert one.num_accepted is None
        assert one.nodes is None


def test_a_sampler_that_fails_fails_on_every_rank_and_the_ranks_go_on(ranks):
    def fail():
        raise ZeroDivisionError("no temperature")

    def share(exchange, choose):
        return exchange.share(choose, num_sequences=1, num_steps=1, has_paths=False, device=CPU)

    started = exchanges(ranks)
    first, *others = started.errors(lambda exchange: share(exchange, fail))
    assert isinstance(first, ZeroDivisionError)
    assert all(isinstance(one, StepFailedError) for one in others)
    assert [exchange.told for exchange in started.all] == [first, *others]
    found = started.call(lambda exchange: share(exchange, lambda: Chosen(token_ids=torch.tensor([[3]]))))
    assert [one.token_ids.tolist() for one in found] == [[[3]]] * 3
