from __future__ import annotations

import pytest
import torch

from trencadis.interfaces import Verification
from trencadis_gallery.acceptance.synthetic import Synthetic
from trencadis_gallery.config import SyntheticConfig
from trencadis_testing.acceptance import AcceptanceConformance


class TestSynthetic(AcceptanceConformance):
    make = Synthetic
    tensor = staticmethod(torch.from_numpy)


def asked(num_drafts: int, columns: int) -> Verification:
    return Verification(
        tokens=torch.zeros((1, columns), dtype=torch.int64),
        parents=torch.arange(columns)[None],
        num_drafts=torch.tensor([num_drafts]),
        is_linear=True,
        sampled=torch.zeros((1, columns + 1), dtype=torch.int64),
    )


def test_the_last_rate_is_that_of_all_further_places():
    rule = Synthetic(SyntheticConfig(rates=(0.9, 0.5)))
    assert rule.accept(asked(3, 4)).tolist() == [[0.9, 0.5, 0.5, 0.0]]
    assert rule.accept(asked(1, 1)).tolist() == [[0.9]]


@pytest.mark.parametrize("mean", [1.0, 1.5, 2.0, 3.25])
def test_steps_have_the_mean_length_that_is_asked_for(mean):
    shares = Synthetic(SyntheticConfig(mean_tokens=mean)).accept(asked(4, 4))[0]
    assert 1 + shares.cumprod(0).sum().item() == pytest.approx(mean)


def test_it_warns_once_that_the_text_is_wrong(caplog):
    rule = Synthetic()
    rule.accept(asked(2, 2))
    rule.accept(asked(2, 2))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "The text is wrong" in record.message
