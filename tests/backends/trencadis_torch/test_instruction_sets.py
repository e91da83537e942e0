from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trencadis_torch
from trencadis_torch.instruction_sets import (
    NAMES,
    SETS,
    chosen_set,
    compile_command,
    cpu_flags,
    find_compiler,
    narrowed,
    sets_for,
    texts_of,
    understands,
)

PACKAGE = Path(trencadis_torch.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.cpp"))

SSE4 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"
AVX2 = f"{SSE4} avx avx2 fma f16c bmi1 bmi2 abm movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
NEON = "fp asimd evtstrm aes"
DOTPROD = f"{NEON} fphp asimdhp asimddp"
CPUS = {
    "Core 2": ("x86_64", "cx16 lahf_lm pni ssse3 sse4_1", None),
    "Nehalem": ("x86_64", SSE4, "sse4"),
    "Sandy Bridge": ("x86_64", f"{SSE4} avx", "sse4"),
    "Haswell, Zen 3": ("x86_64", AVX2, "avx2"),
    "Alder Lake": ("x86_64", f"{AVX2} avx_vnni", "avx2_vnni"),
    "Knights Landing": ("x86_64", f"{AVX2} avx512f avx512cd", "avx2"),
    "Skylake-X": ("x86_64", AVX512, "avx512"),
    "Cascade Lake, Ice Lake": ("x86_64", f"{AVX512} avx512_vnni", "avx512_vnni"),
    "Cooper Lake, Zen 4": ("x86_64", f"{AVX512} avx512_vnni avx512_bf16", "avx512_bf16"),
    "Zen 5": ("x86_64", f"{AVX512} avx_vnni avx512_vnni avx512_bf16", "avx512_bf16"),
    "Sapphire Rapids": ("x86_64", f"{AVX512} avx_vnni avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
    "Sapphire Rapids whose tiles are hidden": ("x86_64", f"{AVX512} avx_vnni avx512_vnni avx512_bf16", "avx512_bf16"),
    "Cortex-A72": ("aarch64", NEON, "neon"),
    "Graviton 2": ("aarch64", DOTPROD, "neon_dotprod"),
    "Graviton 3": ("aarch64", f"{DOTPROD} bf16 i8mm", "neon_bf16"),
    "POWER9": ("ppc64le", "", None),
}


@pytest.mark.representatives(len(CPUS))
@pytest.mark.parametrize(("machine", "flags", "name"), CPUS.values(), ids=CPUS)
def test_a_cpu_gets_the_best_set_of_which_it_lacks_nothing(machine: str, flags: str, name: str | None) -> None:
    found = chosen_set(flags=frozenset(flags.split()), machine=machine)
    assert (found and found.name) == name


@pytest.mark.representatives(len(SETS))
@pytest.mark.parametrize("one", SETS, ids=NAMES)
def test_a_cpu_that_lacks_one_instruction_of_a_set_does_not_get_it(one) -> None:
    for flag in one.all_flags:
        found = chosen_set(flags=one.all_flags - {flag}, machine=one.machine)
        assert found is None or flag not in found.all_flags


def test_a_set_that_the_cpu_lacks_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"this CPU \(x86_64\) does not have amx, but sse4, avx2\."):
        chosen_set("amx", flags=frozenset(AVX2.split()), machine="x86_64")


def test_a_source_is_compiled_for_what_it_asks_for() -> None:
    names = [one.name for one in sets_for(["#if defined(__AVX512VNNI__)"], "x86_64")]
    assert names == ["sse4", "avx2", "avx512", "avx512_vnni"]
    best = SETS[NAMES.index("amx")]
    assert narrowed(best, ["#ifdef __AVX512VNNI__"]).name == "avx512_vnni"
    assert narrowed(best, ["nothing"]).name == "avx512"


def test_this_cpu_has_what_it_says() -> None:
    assert not cpu_flags() or {"fpu", "fp"} & cpu_flags()


def understood() -> list[str]:
    compiler, machine = find_compiler(), chosen_set()
    if compiler is None or machine is None:
        return []
    return [one.name for one in SETS if one.machine == machine.machine and understands(compiler, one)]


@pytest.mark.slow
@pytest.mark.skipif(not understood() or not shutil.which("objdump"), reason="no compiler or no disassembler")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("name", "foreign"),
    [("sse4", r"%[yz]mm|%k[1-7]|\tv[a-z]"), ("avx2", r"%zmm|%k[1-7]"), ("avx512", r"vpdp|tdp|tileload")],
)
def test_code_for_a_set_has_no_instruction_of_a_better_one(
    source: Path, name: str, foreign: str, tmp_path: Path
) -> None:
    """-O0 because it compiles in a tenth of the time: which instructions there may be is the same."""
    if name not in understood():
        pytest.skip(f"not for this machine: {name}")
    one = SETS[NAMES.index(name)]
    assert one in sets_for(texts_of(source), one.machine)
    compiled = tmp_path / "one.o"
    subprocess.run([*compile_command(find_compiler(), source, compiled, options=one.all_options), "-O0"], check=True)
    listed = subprocess.run(["objdump", "-d", compiled], capture_output=True, text=True, check=True).stdout
    assert "mulps" in listed or "fmadd" in listed
    assert re.findall(foreign, listed) == []
