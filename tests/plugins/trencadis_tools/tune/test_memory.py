"""Room for KV blocks."""

from __future__ import annotations

from support.simulation import asked
from trencadis_tools.compare.candidates import restored
from trencadis_tools.simulation.fleet import NUM_BLOCKS
from trencadis_tools.simulation.step_times import LinearStepTimes, load_step_times
from trencadis_tools.tune.memory import memory_of
from trencadis_tools.workloads import Workload

SHORT = Workload(name="short", requests=(asked("a", prompt=100, output=28), asked("b", 1.0, prompt=10, output=5)))
LONG = Workload(name="long", requests=tuple(asked(str(i), float(i), 100_000, 100) for i in range(10)))


def memory(workload=LONG, step_times=None, measured_blocks=0, **given):
    config = restored("start", {path.replace("__", "."): value for path, value in given.items()}).config
    return memory_of(config, step_times or LinearStepTimes(), [workload], measured_blocks=measured_blocks)


def test_a_number_that_is_configured_stays() -> None:
    found = memory(cache__num_blocks=77)
    assert found.assumed({"cache.memory_fraction": 0.9}) == {}
    assert not found.is_short


def test_a_sheet_leaves_what_the_weights_do_not_take() -> None:
    """Weights without embeddings, 2 bytes each: 32 layers of 4096 × 4096 × 2.5 for attention and 3 × 4096 × 14336; KV 128 KiB a token."""
    weights_bytes = 2 * 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336)
    step_times = load_step_times("h100:llama_3_1_8b")
    of_all = (step_times.device.memory_bytes - weights_bytes) / (16 * 131_072)
    found = memory(step_times=step_times)
    assert found.assumed({}) == {"cache.num_blocks": int(0.5 * of_all)}
    assert found.assumed({"cache.memory_fraction": 0.9}) == {"cache.num_blocks": int(0.9 * of_all)}
    assert found.is_short


def test_an_engine_that_was_measured_has_its_number_at_its_fraction() -> None:
    found = memory(measured_blocks=1000, cache__memory_fraction=0.25)
    assert found.assumed({}) == {"cache.num_blocks": 1000}
    assert found.assumed({"cache.memory_fraction": 0.5}) == {"cache.num_blocks": 2000}


def test_no_more_than_the_workload_can_fill() -> None:
    found = memory(SHORT, measured_blocks=1000)
    assert found.assumed({}) == {"cache.num_blocks": (128 // 16 + 2) + 2}
    assert not found.is_short


def test_without_any_word_of_memory_the_default_is_taken_and_said() -> None:
    found = memory()
    assert found.assumed({}) == {"cache.num_blocks": NUM_BLOCKS}
    assert found.words == (
        f"{NUM_BLOCKS} KV blocks of 16 tokens, as nothing says how much memory there is; set cache.num_blocks"
    )
    assert not found.is_short
