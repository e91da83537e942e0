"""The kernels for ARM, cross-compiled and emulated: each on a CPU that has what its set needs and, but for the last, nothing more."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
import torch

import trencadis_torch
from support.backends.foreign_kernels import COMPILER, Products, reason_to_skip
from support.backends.held_forms import FORMS
from trencadis_torch.instruction_sets import FLAGS, SETS
from trencadis_torch.linear.held import GroupedWeight

CPUS = {"neon": "cortex-a53", "neon_dotprod": "cortex-a76", "neon_bf16": "max"}
SOURCES = sorted(Path(trencadis_torch.__file__).parent.rglob("*.cpp"))

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "nothing is missing")


@pytest.fixture(scope="module", params=[one for one in SETS if one.machine == "aarch64"], ids=lambda one: one.name)
def products(request, tmp_path_factory):
    return Products(request.param, CPUS[request.param.name], tmp_path_factory.mktemp("aarch64"))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_rows(num_rows, num_inputs):
    """Return rows of integers with 127 in every four inputs: quantising them rounds nothing."""
    x = torch.randint(-127, 128, (num_rows, num_inputs), generator=torch.Generator().manual_seed(num_inputs)).float()
    x[:, ::4] = 127
    return x


def assert_exact(products, jobs):
    for (held, x), (found, rows) in zip(jobs, products.of(jobs), strict=True):
        expected = held.dequantised()  # scales that float16 does not have are rounded
        torch.testing.assert_close(rows, expected, rtol=2**-10, atol=2**-10 * float(expected.abs().max()))
        weight, wide = rows.double(), x.double()
        allowed = 1e-6 * (wide.abs() @ weight.abs().T) + 1e-6
        assert bool(((found.double() - wide @ weight.T).abs() <= allowed).all()), held.form


@pytest.mark.representatives(len(CPUS))
def test_products_are_those_of_the_weights_as_they_are_held(products):
    """More outputs than whole panels, inputs that leave part of a word, from one row to more than a run has."""
    jobs = []
    for form, (num_outputs, num_inputs) in itertools.product(FORMS, ((67, 96), (16, 64), (5, 36))):
        held = FORMS[form](drawn(num_outputs, num_inputs, seed=num_inputs))
        for num_rows in (1, 3, 7):
            x = drawn(num_rows, num_inputs, seed=1) if "float" in held.form else whole_rows(num_rows, num_inputs)
            if "scattered" in form:  # a group may have none of the inputs that are 127
                x = 127 * x.sign()
            jobs.append((held, x))
    assert_exact(products, jobs)


@pytest.mark.representatives(len(CPUS))
def test_extreme_integers_do_not_saturate(products):
    jobs = []
    for bits, group in ((4, 16), (4, 128), (8, 32), (8, 250)):
        values = torch.full((20, group * 2), 2**bits - 1, dtype=torch.uint8)
        ones = torch.ones(20, 2)
        for minimum in (-(2.0 ** (bits - 1)), -3.5):
            x = torch.full((2, group * 2), 127.0)
            x[1] = -127
            jobs.append((GroupedWeight(values, ones, minimum * ones, bits), x))
    table = torch.tensor([255] * 16, dtype=torch.uint8)
    for zero in (0.0, 128.0):
        held = GroupedWeight(torch.full((20, 64), 7).byte(), torch.ones(20, 2), torch.full((20, 2), -zero), 4, table)
        jobs.append((held, torch.full((1, 64), -127.0)))
    for (held, x), (found, _) in zip(jobs, products.of(jobs), strict=True):
        assert torch.equal(found, x @ held.dequantised().T)


@pytest.mark.representatives(len(SOURCES))
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_kernel_compiles_for_every_set(source):
    for one in SETS:
        if one.machine == "aarch64":
            subprocess.run([COMPILER, *FLAGS, *one.all_options, "-fsyntax-only", str(source)], check=True, timeout=300)
