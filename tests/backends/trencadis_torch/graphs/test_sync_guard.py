from __future__ import annotations

import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.graphs.sync_guard import SyncGuard, tensors_in

X = torch.arange(6.0)
MASK = X > 2


def assign_by_mask():
    X.clone()[MASK] = 0.0


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda: X.sum().item(), "brings a value to the host"),
        (lambda: bool(X.any()), "brings a value to the host"),
        (lambda: torch.equal(X, X), "brings a value to the host"),
        (lambda: X.nonzero(), "size depends on values"),
        (lambda: X.unique(), "size depends on values"),
        (lambda: torch.masked_select(X, MASK), "size depends on values"),
        (lambda: X.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 1])), "size depends on values"),
        (lambda: X[MASK], "mask on the host"),
        (assign_by_mask, "mask on the host"),
        (lambda: X.to("meta"), "copies between cpu and meta"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_no_graph_can_hold_is_named(run, reason, inference):
    with (
        torch.inference_mode(inference),
        pytest.raises(BackendError, match=f"the bucket cannot be captured: .*{reason}"),
        SyncGuard("the bucket"),
    ):
        run()


def test_everything_else_passes():
    index = torch.tensor([1, 3])
    with torch.inference_mode(), SyncGuard("the bucket"):
        found = torch.where(MASK, X, 0.0)[index].index_put_((torch.tensor([0]),), torch.ones(1))
        found = torch.nn.functional.linear(found, torch.ones(3, 2)).softmax(-1)
        counted = X.repeat_interleave(torch.tensor([2, 1, 0, 0, 0, 0]), output_size=3)
        assert found.shape == counted.shape == (3,)
    assert counted.tolist() == [0.0, 0.0, 1.0]


def test_tensors_are_found_however_they_are_packed():
    assert [one is other for one, other in zip(tensors_in([X, (3, {"a": MASK})]), (X, MASK), strict=True)] == [
        True,
        True,
    ]
