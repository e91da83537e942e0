"""What a workload says of sharing is what an engine's prefix cache finds, whatever the block sizes of both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulation import BLOCK_TOKENS, STEP_TIMES, config_of
from trencadis_tools.simulation import simulate
from trencadis_tools.workloads import Workload, WorkloadRequest
from trencadis_tools.workloads.summary import reusable_tokens


@pytest.fixture(scope="module")
def house() -> tuple[Any, Any]:
    return config_of(cache={"num_blocks": 2000, "block_size": BLOCK_TOKENS, "prefix_caching": True})


@st.composite
def chains(draw: st.DrawFn) -> Workload:
    """Requests one after the other, of which some go on from the answer before and some begin with blocks."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 8, 24]))
    requests: list[WorkloadRequest] = []
    for number in range(draw(st.integers(2, 7))):
        before = requests[-1] if requests else None
        continues = before is not None and draw(st.booleans())
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        head = before.num_prompt_tokens + before.num_output_tokens if before and continues else len(path) * block_tokens
        requests.append(
            WorkloadRequest(
                request_id=str(number),
                arrival_s=0.0,
                num_prompt_tokens=head + draw(st.integers(1, 9)),
                num_output_tokens=draw(st.integers(1, 9)),
                after=before.request_id if before else "",
                think_s=1.0,
                block_ids=() if continues else tuple(hash(tuple(path[: i + 1])) % 2**63 for i in range(len(path))),
            )
        )
    return Workload(name="chain", requests=tuple(requests), block_tokens=block_tokens)


@settings(max_examples=25)
@given(workload=chains())
def test_an_engine_finds_the_whole_blocks_of_what_could_be_reused(house, workload: Workload) -> None:
    run = simulate(*house, workload, step_times=STEP_TIMES)
    assert [record.num_cached_tokens for record in run.records] == [
        found // BLOCK_TOKENS * BLOCK_TOKENS for found in reusable_tokens(workload)
    ]
