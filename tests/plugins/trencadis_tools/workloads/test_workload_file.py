from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.errors import ConfigError
from trencadis_tools.workloads import Workload, builtin_names, load_workload
from trencadis_tools.workloads.arrivals import Arrivals
from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.recipe import Lengths, Recipe
from trencadis_tools.workloads.terms import Prefixes, Priorities, Tenants
from trencadis_tools.workloads.workload_file import read_recipe

LENGTHS = '[lengths]\nprompt = { kind = "lognormal", mean = 900, cv = 1.2 }\noutput = 50\n'
DRAWN = f"num_requests = 40\n[arrivals]\nrate = 2.0\n{LENGTHS}"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02},{10 * second + 1},{second + 1}\n" for second in range(20)
)
BLOCKS = "".join(
    f'{{"timestamp": {number}, "input_length": 1000, "output_length": 2, "hash_ids": [{number}, {number + 100}]}}\n'
    for number in range(3)
)


@pytest.fixture
def load(tmp_path: Path):
    """``load(TOML, **changes)``, beside ``trace.csv`` and ``blocks.jsonl``."""
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "blocks.jsonl").write_text(BLOCKS)

    def run(text: str, **changes) -> Workload:
        (tmp_path / "mine.toml").write_text(text)
        return load_workload(str(tmp_path / "mine.toml"), **changes)

    return run


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(one.num_prompt_tokens, one.num_output_tokens) for one in workload.requests]


def times(workload: Workload) -> list[float]:
    return [one.arrival_s for one in workload.requests]


recipes = st.builds(
    Recipe,
    name=st.just("r"),
    num_requests=st.integers(1, 60),
    seed=st.integers(0, 5),
    arrivals=st.builds(
        Arrivals,
        rate=st.floats(0.1, 50),
        cv=st.sampled_from([0.0, 1.0, 3.0]),
        pattern=st.sampled_from(["constant", "diurnal", "bursts"]),
    ),
    lengths=st.just(
        Lengths(prompt=Distribution(kind="lognormal", mean=500), output=Distribution(kind="exponential", mean=90))
    ),
    tenants=st.builds(Tenants, num=st.integers(0, 4)),
    prefixes=st.builds(Prefixes, tokens=st.sampled_from([0, 100]), num=st.integers(1, 3)),
    priorities=st.sampled_from([Priorities(), Priorities(shares=(1.0, 3.0))]),
)


@given(recipe=recipes, factor=st.floats(0.2, 5))
def test_another_rate_keeps_order_lengths_tenants_and_what_is_shared(recipe: Recipe, factor: float) -> None:
    faster = attrs.evolve(recipe, arrivals=attrs.evolve(recipe.arrivals, rate=recipe.arrivals.rate * factor)).make()
    timeless = [attrs.evolve(one, arrival_s=0.0) for one in recipe.make().requests]
    assert [attrs.evolve(one, arrival_s=0.0) for one in faster.requests] == timeless


@given(recipe=recipes)
def test_the_same_recipe_gives_the_same_workload_and_a_longer_one_begins_with_it(recipe: Recipe) -> None:
    made = recipe.make()
    assert recipe.make() == made
    longer = attrs.evolve(recipe, num_requests=recipe.num_requests + 5)
    assert longer.make().requests[: recipe.num_requests] == made.requests
    assert attrs.evolve(longer, limit=recipe.num_requests).make() == made


def test_a_trace_is_replayed_as_it_was_recorded_or_at_another_rate(load) -> None:
    workload = load('[trace]\nfile = "trace.csv"')
    assert workload.name == "mine"
    assert times(workload) == [float(second) for second in range(20)]
    assert lengths(workload)[3] == (31, 4)
    faster = load('[trace]\nfile = "trace.csv"\n[arrivals]\nrate = 4.0')
    assert times(faster) == [second / 4 for second in range(20)]
    assert load('[trace]\nfile = "trace.csv"', rate=4.0) == faster
    assert lengths(load('[trace]\nfile = "trace.csv"', limit=2)) == [(1, 1), (11, 2)]
    assert times(load('[trace]\nfile = "trace.csv"', rate=float("inf"))) == [0.0] * 20


def test_a_rate_is_that_of_the_requests_that_a_limit_leaves(load, tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:{second:02},5,5\n" for second in (0, 1, 3, 40, 41)]
    (tmp_path / "uneven.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    assert times(load('[trace]\nfile = "uneven.csv"', rate=2.0, limit=3)) == pytest.approx([0.0, 1 / 3, 1.0])


def test_recorded_lengths_may_come_at_drawn_times(load) -> None:
    drawn = load('[trace]\nfile = "trace.csv"\n[arrivals]\ntimes = "drawn"\nrate = 3.0\ncv = 0.0')
    assert lengths(drawn) == lengths(load('[trace]\nfile = "trace.csv"'))
    assert times(drawn) == pytest.approx([(number + 1) / 3 for number in range(20)])


def test_resampled_lengths_are_pairs_of_the_trace_as_often_as_chance_has_it(load) -> None:
    text = '[trace]\nfile = "trace.csv"\n[arrivals]\nrate = 1.0\n[lengths]\nprompt = "resampled"\noutput = "resampled"'
    drawn = lengths(load(f"num_requests = 2000\n{text}"))
    counts = np.bincount([output for _, output in drawn])[1:]
    assert set(drawn) == {(10 * second + 1, second + 1) for second in range(20)}
    assert ((counts - 100) ** 2 / 100).sum() < 43.8, "chi squared of 19 degrees of freedom, p = .001"


def test_tenants_priorities_targets_and_prefixes_are_drawn_for_requests_that_have_none(load) -> None:
    more = (
        "[tenants]\nnum = 3\n[priorities]\nshares = [1, 2]\n[targets]\nttft_s = 1.5\n[prefixes]\ntokens = 64\nnum = 2\n"
    )
    workload = load(DRAWN + more)
    assert {one.tenant for one in workload.requests} == {"0", "1", "2"}
    assert {one.priority for one in workload.requests} == {0, 1}
    assert {one.ttft_target_s for one in workload.requests} == {1.5}
    assert workload.block_tokens == 64
    owner: dict[int, str] = {}
    for one in workload.requests:
        (prefix,) = one.block_ids
        assert owner.setdefault(prefix, one.tenant) == one.tenant, "no two tenants share a prefix"
    assert len(owner) > 3


def test_a_session_has_one_tenant_and_one_priority(load, tmp_path: Path) -> None:
    rows = [f'{{"session_id": "{number % 5}", "input_length": 9, "output_length": 2}}\n' for number in range(30)]
    (tmp_path / "sessions.jsonl").write_text("".join(rows))
    workload = load(
        '[trace]\nfile = "sessions.jsonl"\n[tenants]\nnum = 4\nexponent = 0.0\n[priorities]\nshares = [1, 1]'
    )
    assert len({one.tenant for one in workload.requests}) > 1
    by_session = {one.session: (one.tenant, one.priority) for one in workload.requests}
    assert all(by_session[one.session] == (one.tenant, one.priority) for one in workload.requests)


def test_a_base_is_changed_key_by_key(load, tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(f'name = "below"\n{DRAWN}')
    changed = load(
        'base = "below.toml"\nseed = 3\n[arrivals]\ncv = 0.0\n[lengths]\noutput = { kind = "uniform", min = 5, max = 6 }'
    )
    assert changed.name == "mine"
    assert times(changed)[:3] == [0.5, 1.0, 1.5], "cv is new, rate is the base's"
    assert {one.num_output_tokens for one in changed.requests} == {5, 6}
    assert load('base = "dynamo_agents"').requests == load_workload("dynamo_agents").requests


def test_a_seed_from_outside_is_in_place_of_the_files(load) -> None:
    assert load(DRAWN, seed=9) == load(f"seed = 9\n{DRAWN}")
    assert lengths(load(DRAWN, seed=9)) != lengths(load(DRAWN))


def test_a_trace_file_alone_is_a_workload(load, tmp_path: Path) -> None:
    workload = load_workload(str(tmp_path / "blocks.jsonl"), rate=1.0)
    assert (workload.name, workload.block_tokens, times(workload)) == ("blocks", 512, [0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("columns", "table", "words"),
    [
        ('"tenant": "t"', "[tenants]\nnum = 2", "draws tenants, but .* tells them"),
        ('"priority": 2', "[priorities]\nshares = [1]", "draws priorities, but .* tells them"),
        (
            '"session_id": "s"',
            "[sessions]\nmean_turns = 2\n[lengths]\noutput = 5",
            r"describes \[sessions\], but .* tells them",
        ),
    ],
)
def test_what_a_trace_tells_is_not_drawn_over(load, tmp_path: Path, columns: str, table: str, words: str) -> None:
    (tmp_path / "told.jsonl").write_text(f'{{"input_length": 5, "output_length": 2, {columns}}}\n')
    with pytest.raises(ConfigError, match=words):
        load(f'[trace]\nfile = "told.jsonl"\n{table}')
    column = columns.split('"')[1]
    assert load(f'[trace]\nfile = "told.jsonl"\nignore = ["{column}"]\n{table}').requests


def test_answers_that_no_one_recorded_must_be_described(load, tmp_path: Path) -> None:
    (tmp_path / "inputs.jsonl").write_text('{"request_id": 0, "type": "text", "input_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="which does not tell how long they were"):
        load('[trace]\nfile = "inputs.jsonl"')
    (only,) = load('[trace]\nfile = "inputs.jsonl"\n[lengths]\noutput = 20').requests
    assert (only.num_output_tokens, only.block_ids, only.arrival_s) == (20, (1,), 0.0)


@pytest.mark.parametrize("name", builtin_names())
def test_workloads_of_the_package_can_be_read(name: str) -> None:
    recipe = read_recipe(name, changes={"limit": 50} | ({"num_requests": 50} if read_recipe(name).num_requests else {}))
    made = recipe.make()
    assert made.name == name
    assert 17 <= len(made.requests) <= 50
