from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.errors import ConfigError
from trencadis_tools.workloads import Workload, WorkloadRequest, load_workload, write_workload

names = st.text(min_size=1, max_size=5)
positive = st.floats(1e-9, 1e9)


@st.composite
def workloads(draw) -> Workload:
    requests: list[WorkloadRequest] = []
    arrival_s = 0.0
    for number in range(draw(st.integers(1, 4))):
        arrival_s += draw(st.floats(0, 1e6))
        after = draw(st.sampled_from(["", *(one.request_id for one in requests)]))
        ids = tuple(draw(st.lists(st.integers(0, 2**64 - 1), max_size=3)))
        head = next((one.num_prompt_tokens + one.num_output_tokens for one in requests if one.request_id == after), 0)
        requests.append(
            WorkloadRequest(
                request_id=f"{number} {draw(names)}",
                arrival_s=arrival_s,
                num_prompt_tokens=draw(st.integers(1, 1000)) + head + 64,
                num_output_tokens=draw(st.integers(1, 1000)),
                max_tokens=draw(st.integers(0, 9)),
                tenant=draw(names),
                priority=draw(st.integers(-3, 3)),
                session=draw(st.sampled_from(["", "s"])),
                after=after,
                think_s=draw(st.floats(0, 100)),
                block_ids=ids,
                ttft_target_s=draw(positive | st.just(float("inf"))),
                tpot_target_s=draw(positive | st.just(float("inf"))),
            )
        )
    return Workload(
        name=draw(names), requests=tuple(requests), block_tokens=draw(st.integers(1, 32)), seed=draw(st.integers(0, 9))
    )


@settings(max_examples=40)
@given(workload=workloads())
def test_what_is_written_is_read_back_exactly(tmp_path_factory, workload: Workload) -> None:
    file = tmp_path_factory.getbasetemp() / "written.jsonl"
    write_workload(workload, file)
    assert load_workload(str(file)) == workload


def test_a_written_workload_can_be_stretched_cut_and_given_another_seed(tmp_path: Path) -> None:
    chat = load_workload("chat", limit=60)
    write_workload(chat, tmp_path / "chat.jsonl")
    loaded = load_workload(str(tmp_path / "chat.jsonl"), rate=8.0, limit=30, seed=5)
    roots = [one.arrival_s for one in loaded.requests if not one.after]
    assert (len(roots) - 1) / (roots[-1] - roots[0]) == pytest.approx(8.0)
    assert loaded.seed == 5
    assert [attrs.evolve(one, arrival_s=0.0) for one in loaded.requests] == [
        attrs.evolve(one, arrival_s=0.0) for one in chat.requests[:30]
    ]
    with pytest.raises(ConfigError, match="limit"):
        load_workload(str(tmp_path / "chat.jsonl"), limit=-1)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_workload(load_workload("dynamo_agents"), tmp_path / "none" / "w.jsonl")
