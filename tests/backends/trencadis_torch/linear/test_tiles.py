"""Products by tiles: a unit in C++ that does what the manual says stands for that of a CPU with AMX, and vectors for what they must give."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from support.backends import masked_kernels, tiny_models
from support.backends.decoder_scene import Scene, fused_model
from support.backends.held_forms import FORMS, in_groups
from support.backends.masked_kernels import compiled, tile_options
from trencadis_torch.instruction_sets import (
    NAMES,
    SETS,
    TILES,
    compile_command,
    cpu_flags,
    find_compiler,
    sets_for,
    texts_of,
    understands,
)
from trencadis_torch.linear import decoder_pass, native_decoder
from trencadis_torch.linear import native as native_module
from trencadis_torch.linear.held import FloatWeight
from trencadis_torch.linear.native import SOURCE, Native
from trencadis_torch.linear.packed import pack, quantise
from trencadis_torch.linear.replacement import kernels_of
from trencadis_torch.native_build import why_no_tiles

AMX = SETS[NAMES.index(TILES)]
PAIRS = "bfloat16-rows-too"
TAKEN = (PAIRS, "int8", "int4", "int8-minimums-32", "int4-minimums-128", "int4-scattered-32", "levels4-32")
"""Forms whose products tiles can take where groups have at least eight words."""
ROWS = (1, 2, 6, 7, 8, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 97)
FEW = {PAIRS: 0, "int8": 6}
"""Rows that vectors multiply; where groups have scales of their own, 48."""
TRAPS = Path(masked_kernels.__file__).with_name("trapped_tiles.cpp")


def emulated(source, *options):
    library = compiled(source, *tile_options(), *options)
    if library is None:
        pytest.skip("there is no compiler here that makes the emulated tile unit")
    return library


@pytest.fixture(scope="module")
def unit():
    """The library over the emulated unit."""
    return emulated(SOURCE)


@pytest.fixture(scope="module")
def lib(unit):
    return Native(unit)


@pytest.fixture(autouse=True)
def rules_are_kept(unit):
    """No rule of the unit is broken, and no thread keeps its tiles."""
    yield
    assert (unit.tile_unit_faults(), unit.tile_unit_open()) == (0, 0)


@pytest.fixture
def in_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(lib, held, bias=None):
    return pack([held], [bias], lib)


def dots(unit, call):
    """Return what a call gives, and how many products tiles took for it."""
    before = unit.tile_unit_dots()
    return call(), unit.tile_unit_dots() - before


def test_a_kernel_of_tiles_says_so(lib):
    assert lib.has_tiles
    assert (kernels_of(lib, "bfloat16"), kernels_of(lib, "none"), kernels_of(lib, "int8")) == (
        "tiles64",
        "packed64",
        "int864",
    )


@pytest.mark.representatives(2 * len(TAKEN))
@pytest.mark.parametrize(("form", "num_inputs"), [*itertools.product(TAKEN, (128, 384)), (PAIRS, 383), ("int8", 382)])
def test_many_rows_have_the_bits_of_each_alone(lib, unit, form, num_inputs):
    made, x = layer(lib, FORMS[form](drawn(130, num_inputs)), drawn(130, seed=1)), drawn(97, num_inputs, seed=3)
    alone, by_tiles = dots(unit, lambda: torch.cat([made(row[None]) for row in x]))
    assert bool(by_tiles) == (form == PAIRS)  # integers have come from vectors
    for size in ROWS:
        found, by_tiles = dots(unit, lambda size=size: made(x[:size]))
        assert bool(by_tiles) == (size > FEW.get(form, 48))
        assert torch.equal(found, alone[:size])
    assert torch.equal(made(x[17:]), alone[17:])


@pytest.mark.parametrize("form", [PAIRS, "int8", "int4"])
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 63, 64, 65, 200])
def test_any_number_of_outputs_is_written_and_no_more(lib, form, num_outputs):
    held, x = FORMS[form](drawn(num_outputs, 128)), drawn(23, 128, seed=3)
    made = layer(lib, held)
    room = torch.full((24, num_outputs), torch.nan)
    view = native_module.product(made.packed)
    lib._library.trencadis_linear(
        native_module.ctypes.addressof(view), x.data_ptr(), 23, 128, room.data_ptr(), num_outputs, 1
    )
    assert torch.equal(room[:23], torch.cat([made(row[None]) for row in x]))
    assert room[23].isnan().all()


def sums_of_tiles(rows, weights, step):
    """Return sums in float32 as TDPBF16PS adds them: even and odd inputs of a tile apart, each with one rounding."""
    total = np.zeros((len(rows), len(weights)), np.float32)
    for begin in range(0, rows.shape[1], 2 * step):
        apart = np.zeros((2, *total.shape), np.float32)
        for k in range(begin, begin + 2 * step):
            exact = rows[:, k, None].astype(np.float64) * weights[None, :, k] + apart[k % 2]
            apart[k % 2] = exact.astype(np.float32)
        total += apart[0] + apart[1]
    return total


@pytest.mark.parametrize(("num_inputs", "step"), [(16, 8), (48, 8), (32, 16), (256, 16)])
@pytest.mark.parametrize("num_rows", [1, 20, 40])
def test_bfloat16_sums_are_those_of_the_manual(lib, num_inputs, step, num_rows):
    weight, x, bias = drawn(70, num_inputs).bfloat16(), drawn(num_rows, num_inputs, seed=2), drawn(70, seed=1)
    expected = sums_of_tiles(x.bfloat16().float().numpy(), weight.float().numpy(), step)
    held = FloatWeight(weight, rounds_rows=True)
    np.testing.assert_array_equal(layer(lib, held)(x).numpy(), expected)
    np.testing.assert_array_equal(layer(lib, held, bias)(x).numpy(), expected + bias.numpy())


@pytest.mark.parametrize("num_inputs", [31, 511, 512])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_bfloat16_is_near_the_products_in_float64(lib, num_rows, num_inputs):
    weight, x = drawn(130, num_inputs).bfloat16(), drawn(num_rows, num_inputs, seed=2)
    rows, wide = x.bfloat16().double(), weight.double()
    error = (layer(lib, FloatWeight(weight, rounds_rows=True))(x).double() - rows @ wide.T).abs()
    assert bool((error <= 2.0**-24 * (num_inputs + 2) * (rows.abs() @ wide.abs().T)).all())


def test_numbers_below_the_normal_ones_are_zeros(lib):
    """2⁻¹²⁷ is none that the unit takes, 2⁻¹³⁰ none that it gives."""
    weight, x = torch.zeros(64, 32), torch.zeros(3, 32)
    weight[0, 0], weight[1, 0], weight[2, 0] = 2.0**-127, 2.0**-65, 2.0**-60
    x[0, 0], x[1, 0] = 2.0**30, 2.0**-65
    found = layer(lib, FloatWeight(weight.bfloat16(), rounds_rows=True))(x)
    assert found[0, :3].tolist() == [0, 2.0**-35, 2.0**-30]
    assert found[1, :3].tolist() == [0, 0, 2.0**-125]


def test_largest_integers_are_exact(lib):
    held, x = quantise(torch.full((64, 4096), -1.0)), torch.ones(20, 4096)
    x[3] = -1
    found = layer(lib, held)(x)
    assert torch.equal(
        found, layer(lib, held)(x[:1]).expand(20, 64) * torch.where(torch.arange(20) == 3, -1.0, 1.0)[:, None]
    )
    assert float(found[0, 0]) == pytest.approx(-4096, rel=1e-6)


@pytest.mark.parametrize("form", TAKEN)
def test_what_is_no_number_spoils_its_own_row_alone(lib, form):
    x = drawn(40, 128)
    x[9, 20], x[33, 1] = torch.nan, torch.inf
    found = layer(lib, FORMS[form](1 + drawn(64, 128).abs()))(x)
    spoilt = torch.zeros(40, dtype=torch.bool)
    spoilt[[9, 33]] = True
    assert torch.equal(found.isfinite().all(1), ~spoilt)
    assert not found[spoilt].isfinite().any()


@pytest.mark.parametrize(
    "held",
    [
        FloatWeight(drawn(70, 24).bfloat16(), rounds_rows=True),
        FloatWeight(drawn(70, 33).bfloat16(), rounds_rows=True),
        FloatWeight(drawn(70, 128).bfloat16()),
        FloatWeight(drawn(70, 128)),
        quantise(drawn(70, 36)),
        in_groups(drawn(70, 64), bits=8, group=16),
        in_groups(drawn(70, 1024), bits=4, group=1024),
    ],
    ids=[
        "12 pairs",
        "33 inputs",
        "rows as they are",
        "float32",
        "9 words",
        "groups of 4 words",
        "more than is unpacked",
    ],
)
def test_what_tiles_cannot_take_is_left_to_vectors(lib, unit, held):
    made, x = layer(lib, held), drawn(40, held.shape[1], seed=3)
    found, by_tiles = dots(unit, lambda: made(x))
    assert by_tiles == 0
    assert torch.equal(found, torch.cat([made(row[None]) for row in x]))


def test_no_rows_give_no_outputs(lib):
    assert layer(lib, FORMS[PAIRS](drawn(64, 128)))(torch.empty(0, 128)).shape == (0, 64)


@pytest.mark.parametrize("form", [PAIRS, "int8"])
def test_each_thread_lays_out_its_tiles_once(lib, unit, form, in_threads):
    made, x = layer(lib, FORMS[form](drawn(700, 512))), drawn(49, 512, seed=3)
    made_in = {}
    for count in (1, 2, 3):
        in_threads(count)
        before = unit.tile_unit_configured()
        made_in[count] = made(x)
        assert unit.tile_unit_configured() - before == count
    assert all(torch.equal(made_in[1], other) for other in made_in.values())


@pytest.fixture
def in_models(monkeypatch):
    """Models are packed, and run in one call, by libraries over the emulated unit; returns that of decoders."""
    monkeypatch.setattr(native_module, "load_library", lambda source: emulated(source.file))
    monkeypatch.setattr(native_decoder, "load_library", lambda source: emulated(source.file))
    monkeypatch.setattr(decoder_pass, "threads_for", lambda _: 2)
    for name, size in {
        "hidden_size": 64,
        "intermediate_size": 128,
    }.items():  # whole steps of tiles, whole panels of gates
        monkeypatch.setitem(tiny_models._COMMON, name, size)
    caches = (native_module.native, native_decoder.native_decoder, fused_model)
    for one in caches:
        one.cache_clear()
    yield emulated(native_decoder.SOURCE)
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize("form", [PAIRS, "int8"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_decoder_in_one_call_has_the_bits_of_its_modules_and_of_a_row_alone(in_models, form, kind):
    before = in_models.tile_unit_dots()
    found, expected = (Scene(kind, form=form, in_one_call=one) for one in (True, False))
    passes = (([0], [0], [23], range(23)), ([2, 0, 1], [0, 23, 0], [40, 1, 5], [39, 40, 45]))
    for rows, starts, lengths, tokens in passes:
        one, other = (scene.logits(rows, starts, lengths, list(tokens)) for scene in (found, expected))
        assert torch.equal(one, other)
    alone = Scene(kind, form=form).logits([2], [0], [40], [39])
    assert torch.equal(alone[0], one[0])
    assert in_models.tile_unit_dots() > before
    assert (in_models.tile_unit_faults(), in_models.tile_unit_open()) == (0, 0)


def needs_the_compiler():
    if not find_compiler() or not understands(find_compiler(), AMX):
        pytest.skip("there is no compiler here that knows AMX")


@pytest.fixture
def amx():
    """The library of a wheel for CPUs with AMX; where there is none, the CPU traps at its tiles, and the emulated unit is called."""
    needs_the_compiler()
    if not AMX.all_flags - set(AMX.flags) <= cpu_flags():
        pytest.skip("this CPU lacks AVX-512 with VNNI and BF16, which the library for AMX uses beside tiles")
    library = Native(compiled(SOURCE, *AMX.all_options))
    if set(AMX.flags) <= cpu_flags():
        assert why_no_tiles() == ""
        yield library
        return
    traps = compiled(TRAPS, "-march=x86-64")
    traps.trap_tiles()
    yield library
    traps.release_traps()
    assert traps.tile_unit_dots() > 0
    assert (traps.tile_unit_faults(), traps.tile_unit_open()) == (0, 0)


@pytest.mark.representatives(2 * len(TAKEN))
@pytest.mark.parametrize("form", TAKEN)
@pytest.mark.parametrize("num_inputs", [128, 384])
def test_the_library_for_amx_gives_the_bits_of_the_emulated_unit(amx, lib, form, num_inputs, in_threads):
    in_threads(2)
    held, x = FORMS[form](drawn(130, num_inputs)), drawn(97, num_inputs, seed=3)
    assert amx.has_tiles
    for size in ROWS:
        assert torch.equal(layer(amx, held)(x[:size]), layer(lib, held)(x[:size]))


@pytest.mark.skipif(not shutil.which("objdump"), reason="there is no objdump to list instructions with")
@pytest.mark.parametrize("source", [SOURCE, native_decoder.SOURCE], ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["amx", "avx512_bf16"])
def test_only_the_library_for_amx_has_instructions_of_tiles(source, name, tmp_path):
    """-O0, in which compiling takes a tenth of the time: which instructions there are is the same."""
    needs_the_compiler()
    one, file = SETS[NAMES.index(name)], tmp_path / "one.o"
    assert one in sets_for(texts_of(source), "x86_64")
    subprocess.run([*compile_command(find_compiler(), source, file, options=one.all_options), "-O0"], check=True)
    listed = subprocess.run(["objdump", "-d", file], capture_output=True, text=True, check=True).stdout
    count = {
        each: len(re.findall(rf"\t{each}\b", listed))
        for each in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbsud", "tilestored")
    }
    # For each kind of numbers: one block of rows meets four vectors of outputs, two meet two.
    wanted = {"ldtilecfg": 1, "tileloadd": 18, "tdpbf16ps": 8, "tdpbsud": 8, "tilestored": 8}
    if name == "amx":
        assert {each: min(count[each], wanted[each]) for each in wanted} == wanted
        assert re.search(r"\ttilerelease\b", listed)
    else:
        assert set(count.values()) == {0}
