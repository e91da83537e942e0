from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_torch.cache.storage import STORED_DTYPES, decode, encode, stored_dim

# The largest error of one element over the largest element of its head: half a unit in the last place. Numbers below the smallest
# normal one of float16, 2 ** -14, are rounded to a multiple of 2 ** -24.
BOUNDS = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127 * 1.0001}


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(
    name=st.sampled_from(sorted(BOUNDS)), seed=st.integers(0, 999), dim=st.integers(1, 70), size=st.floats(1e-3, 1e3)
)
def test_what_is_read_is_what_was_written_within_the_format(name, seed, dim, size):
    new = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(seed)) * size
    dtype = STORED_DTYPES[name]
    stored = encode(new, dtype)
    assert stored.dtype is dtype
    assert stored.shape == (5, 3, stored_dim(dim, dtype))
    error = (decode(stored, torch.float32) - new).abs()
    smallest = 2**-25 if name == "float16" else 1e-12
    assert bool((error <= BOUNDS[name] * new.abs().amax(-1, keepdim=True) + smallest).all())


def test_zeros_of_int8_are_zeros():
    assert not decode(encode(torch.zeros(2, 1, 6), torch.int8), torch.float32).any()


def test_scale_of_int8_is_that_of_its_own_head_and_lies_behind_it():
    new = torch.tensor([[[127.0, -64.0], [1.27, 0.01]]])
    stored = encode(new, torch.int8)
    assert stored[0, :, :2].tolist() == [[127, -64], [127, 1]]
    assert stored[0, :, 2:].contiguous().view(torch.float32).flatten().tolist() == pytest.approx([1.0, 0.01])


def test_too_large_for_float16_is_its_largest_and_no_infinity():
    stored = encode(torch.tensor([1e6, -1e6, 3.0]), torch.float16)
    assert stored.tolist() == [65504.0, -65504.0, 3.0]


def test_what_is_held_in_the_models_dtype_is_not_copied():
    new = torch.randn(2, 2)
    assert encode(new, torch.float32).data_ptr() == new.data_ptr() == decode(new, torch.float32).data_ptr()
