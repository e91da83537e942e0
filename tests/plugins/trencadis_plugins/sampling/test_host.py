from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.interfaces import SamplingContext
from trencadis_plugins.sampling.host import HostThread

_CONTEXT = SamplingContext(rows=(0, 2), positions=(1, 1), tokens=torch.zeros((3, 4), dtype=torch.int32))


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _choose(logits, context, rows):
    assert logits.dtype == torch.float32
    assert not torch.is_grad_enabled()
    assert (context.rows, rows.tolist()) == ((0, 2), [0, 2])
    return logits.mul_(-1).argmax(-1)


def test_tokens_are_chosen_from_copies():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert HostThread().run(_choose, logits, _CONTEXT, np.array([0, 2])).tolist() == [1, 0]
    assert logits.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    halves = logits.bfloat16()
    assert HostThread().run(_choose, halves, _CONTEXT, np.array([0, 2])).tolist() == [1, 0]


def test_the_devices_thread_sees_copies_only():
    logits, rows = torch.zeros((2, 2)), np.array([0, 2])
    with _Operations() as recorded:
        HostThread().run(_choose, logits, _CONTEXT, rows)
    assert recorded.seen == ["aten._to_copy.default"]


def test_copies_made_in_inference_mode_may_be_changed():
    with torch.inference_mode():
        assert HostThread().run(_choose, torch.eye(2), _CONTEXT, np.array([0, 2])).tolist() == [1, 0]


def test_an_error_comes_back_to_the_caller():
    def fail(logits, context, rows):
        raise ValueError("row 2 has no token")

    with pytest.raises(ValueError, match="row 2 has no token"):
        HostThread().run(fail, torch.zeros((2, 2)), _CONTEXT, np.array([0, 2]))
