from __future__ import annotations

import pytest
import torch

from trencadis.clock import SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated import EmulatedDeviceError
from trencadis_gaudi.emulated.hpex import emulated_hpex
from trencadis_gaudi.habana import load_habana

HPEX = emulated_hpex()
BLOCKWISE, PAIRWISE = HPEX.kernels.RotaryPosEmbeddingMode


@pytest.mark.parametrize(("shape", "eps"), [((32, 1, 40), 1e-6), ((8, 2, 2, 4), 3e-5), ((1, 2, 4, 17, 20), 3e-5)])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_norm_is_that_of_the_bridges_own_test(shape, eps, dtypes):
    """Shapes, epsilons, formula and tolerances of gaudi-pytorch-bridge 1.19.0, test_hpu_rms_norm.py; types of RMSNormMeta."""
    x, gamma = torch.rand(shape).to(dtypes[0]), torch.rand(shape[-1]).to(dtypes[1])
    expected = x.float() * gamma.float() / torch.sqrt(torch.mean(torch.square(x.float()), -1, keepdim=True) + eps)
    found = HPEX.normalization.FusedRMSNorm.apply(x, gamma, eps)
    assert found.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else torch.float32)
    tolerance = 1e-3 if dtypes == (torch.float32,) * 2 else 0.015
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_rotary_embeddings_rotate_pairs_by_their_angle():
    """From the definition: the pair as a complex number, times one of length one."""
    x, angles = torch.randn(5, 1, 2, 8, dtype=torch.float64), torch.randn(5, 1, 1, 4, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    for mode, pairs, tables in (
        (BLOCKWISE, torch.stack(x.chunk(2, -1), -1), torch.cat([angles, angles], -1)),
        (PAIRWISE, x.unflatten(-1, (4, 2)), angles.repeat_interleave(2, -1)),
    ):
        found = HPEX.kernels.apply_rotary_pos_emb(x, tables.cos(), tables.sin(), None, 0, mode)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        expected = torch.cat(turned.unbind(-1), -1) if mode == BLOCKWISE else turned.flatten(-2)
        torch.testing.assert_close(found, expected)


def test_float32_among_the_arguments_makes_a_rotary_embedding_float32():
    x, table = torch.randn(2, 1, 1, 4).bfloat16(), torch.randn(2, 1, 1, 4)
    for kinds, expected in (((table, table), torch.float32), ((table.bfloat16(),) * 2, torch.bfloat16)):
        assert HPEX.kernels.apply_rotary_pos_emb(x, *kinds, None, 0, PAIRWISE).dtype == expected


def test_kernels_refuse_what_the_backend_does_not_need():
    x, table = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4)
    with pytest.raises(EmulatedDeviceError, match="neither position_ids nor an offset"):
        HPEX.kernels.apply_rotary_pos_emb(x, table, table, None, 1, BLOCKWISE)
    with pytest.raises(EmulatedDeviceError, match=r"tables \(2, 1, 1, 2\) for input \(2, 1, 1, 4\)"):
        HPEX.kernels.apply_rotary_pos_emb(x, table[..., :2], table[..., :2], None, 0, BLOCKWISE)
    with pytest.raises(EmulatedDeviceError, match="no fast_math"):
        HPEX.normalization.FusedRMSNorm.apply(x, table[0, 0, 0], 1e-6, True, 0, True)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_kernel_is_one_recipe_of_the_device(mode):
    habana = load_habana(GaudiConfig(device="emulated", mode=mode), clock=SystemClock())
    x, gamma = (torch.ones(shape).to(habana.device) for shape in ((1, 3, 8), (8,)))
    habana.mark_step()
    before = habana.emulated.num_compilations
    found = HPEX.normalization.FusedRMSNorm.apply(x, gamma, 1e-6)
    habana.mark_step()
    assert found.device.type == "hpu"
    assert habana.emulated.num_compilations - before == 1
