from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import Config
from trencadis.errors import InvalidRequestError, StepFailedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Bucket, Request, Shape
from trencadis.registry import Registry
from trencadis_testing.engines import ExactShapes
from trencadis_tools.bench.throughput import ThroughputWorkload, measure_throughput

House = Callable[..., tuple[Config, Registry]]
WORKLOAD = ThroughputWorkload(num_requests=4, input_len=10, output_len=6, seed=3)


class TickingClock(SimulatedClock):
    """Each reading is a millisecond after the one before."""

    def now_s(self) -> float:
        self.advance(0.001)
        return super().now_s()


def prompts_of(fake_house: House, workload: ThroughputWorkload, **backend: Any) -> list[tuple[int, ...]]:
    seen = []

    class Notes(SchedulingPolicy):
        def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
            seen.append(request.prompt_token_ids)
            return ""

    measure_throughput(*fake_house(policy=Notes, **backend), workload)
    return seen


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_counts_are_exact_and_leave_the_warm_up_out(fake_house: House, layout: str) -> None:
    result = measure_throughput(*fake_house(layout=layout), WORKLOAD, clock=TickingClock())
    assert result.num_output_tokens == 4 * 6
    assert result.output_tokens_per_s == pytest.approx(24 / result.wall_s)
    assert result.total_tokens_per_s == pytest.approx(64 / result.wall_s)
    assert result.prefix_hit_ratio == 0
    assert 0 < result.engine_overhead_ratio < 1
    assert (result.model, result.architecture, result.num_preempted) == ("demo", "Fake", 0)
    assert result.num_steps >= 6


def test_padding_is_the_share_of_positions_without_a_token(fake_house: House) -> None:
    class TwiceTheBatch(ExactShapes):
        def bucket_for(self, shape: Shape) -> Bucket:
            return attrs.evolve(Bucket.of(shape), batch_size=2 * shape.batch_size)

    assert measure_throughput(*fake_house(), WORKLOAD).padding_ratio == 0
    house = fake_house(layout="padded", bucketing=TwiceTheBatch)
    assert measure_throughput(*house, WORKLOAD).padding_ratio == 0.5


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(fake_house: House) -> None:
    first = prompts_of(fake_house, WORKLOAD)
    assert prompts_of(fake_house, WORKLOAD) == first
    other = ThroughputWorkload(num_requests=4, input_len=10, output_len=6, seed=4)
    assert prompts_of(fake_house, other) != first
    assert [len(prompt) for prompt in first] == [10] * 5
    assert len(set(first)) == 5


def test_no_prompt_has_an_end_of_sequence_token(fake_house: House) -> None:
    workload = ThroughputWorkload(num_requests=8, input_len=50, output_len=1)
    tokens = {token for prompt in prompts_of(fake_house, workload, vocab_size=4, eos=2) for token in prompt}
    assert tokens == {0, 1, 3}


def test_end_of_sequence_tokens_do_not_cut_the_output_short(fake_house: House) -> None:
    assert measure_throughput(*fake_house(vocab_size=2, eos=1), WORKLOAD).num_output_tokens == 24


def test_what_does_not_fit_the_model_is_refused(fake_house: House) -> None:
    with pytest.raises(InvalidRequestError, match="input_len \\+ output_len = 257: the longest sequence has 256"):
        measure_throughput(*fake_house(), ThroughputWorkload(input_len=200, output_len=57))


def test_a_failed_request_is_no_result(fake_house: House) -> None:
    def fails(batch: Any, one: Any) -> None:
        raise RuntimeError("no device")

    with pytest.raises(StepFailedError, match="no device"):
        measure_throughput(*fake_house(fails=fails), WORKLOAD)


def test_the_digest_tells_outputs_apart_and_not_layouts(fake_house: House) -> None:
    def digest(seed: int, **backend: Any) -> str:
        workload = ThroughputWorkload(num_requests=4, input_len=10, output_len=6, seed=seed)
        return measure_throughput(*fake_house(**backend), workload).tokens_digest

    assert digest(3) == digest(3, layout="padded")
    assert digest(3) != digest(4)
