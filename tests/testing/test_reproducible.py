from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from support.reproducible import draw_alike
from trencadis_kv.connectors.p2p import remote_prefills
from trencadis_server.generation import generation


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_draws_as_if_it_were_the_first(turn: int) -> None:
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_requests_are_named_alike_in_every_run_of_a_test_and_otherwise_in_another_test() -> None:
    def names(test: str) -> list[str]:
        draw_alike(test)
        return [generation.answer_id("cmpl"), generation.answer_id("cmpl"), str(remote_prefills.uuid.uuid4())]

    one = names("one")
    assert len(set(one)) == 3
    assert names("one") == one
    assert not set(names("another")) & set(one)
