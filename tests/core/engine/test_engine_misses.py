"""What happens to a pass that no prepared bucket covers, where misses are refused."""

from __future__ import annotations

import pytest

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, FinishReason, Phase, Request, SamplingParams, Shape
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=8))


class Prepares(BucketingStrategy):
    """A table by hand; the exact shape where it ends."""

    def __init__(self, *table: Bucket) -> None:
        self.table = table

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return self.table

    def bucket_for(self, shape: Shape) -> Bucket:
        return next((bucket for bucket in self.table if bucket.covers(shape)), None) or Bucket.of(shape)


@pytest.mark.parametrize("overlap", [False, True])
def test_pass_without_a_prepared_bucket_is_taken_apart_where_misses_are_refused(overlap: bool) -> None:
    """No batch of two is prepared, so two requests run one after the other, each with the tokens that it has alone."""
    bucketing = Prepares(Bucket(1, 32, 8), Bucket(1, 1, 8, Phase.DECODE))
    backend = FakeBackend(layout="padded", max_model_len=256)
    engine = make_engine(backend=backend, bucketing=bucketing, on_miss="refuse", async_scheduling=overlap)
    prompts = {name: tuple((len(name) * 7 + i) % 97 for i in range(9)) for name in ("a", "bb", "ccc")}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    ended = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ended.items()} == {
        name: fake_text(prompt, 8) for name, prompt in prompts.items()
    }
    assert engine.totals.num_failed_steps > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_request_that_fits_no_prepared_bucket_alone_ends_with_an_error_and_others_go_on(overlap: bool) -> None:
    bucketing = Prepares(Bucket(4, 16, 4), Bucket(4, 1, 20, Phase.DECODE))
    backend = FakeBackend(layout="padded", max_model_len=256)
    engine = make_engine(backend=backend, bucketing=bucketing, on_miss="refuse", async_scheduling=overlap)
    engine.add(request("long", tuple(i % 97 for i in range(40))))
    engine.add(request("short"))
    ended = drain(engine)
    assert ended["long"].finish_reason is FinishReason.ERROR
    assert "fits no prepared bucket" in ended["long"].error
    assert ended["short"].token_ids.tolist() == fake_text(PROMPT, 8)
    assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_refused_plan_had_for_the_kv_connector_goes_with_the_next(overlap: bool) -> None:
    """All is saved and loaded that is where every pass is prepared, and no block stays held."""
    prompts = {name: tuple((len(name) * 7 + i) % 97 for i in range(9)) for name in ("a", "bb", "ccc")}
    stores = []
    for table in ((), (Bucket(1, 32, 8), Bucket(1, 1, 8, Phase.DECODE))):
        loop = LoopConnector(delay=1)
        options = {"bucketing": Prepares(*table), "on_miss": "refuse"} if table else {}
        backend = FakeBackend(layout="padded", max_model_len=256, eos=-1)
        engine = make_engine(backend=backend, connector=loop.pair(), async_scheduling=overlap, **options)
        for name, prompt in prompts.items():
            engine.add(request(name, prompt))
        drain(engine)
        engine._state.blocks.reset_cache()
        for name, prompt in prompts.items():
            engine.add(request(f"{name} again", prompt))
        ended = drain(engine)
        assert [end.num_cached_tokens for end in ended.values()] == [8, 8, 8]
        assert (engine.totals.num_failed_steps > 0) == bool(table)
        assert (
            engine.stage("transfer").transfers.num_loaded,
            engine.inspect().stages["transfer"].num_pinned_blocks,
        ) == (3, 0)
        assert engine.inspect().blocks.num_used == 0
        stores.append(set(loop.store.blocks))
    assert stores[0] == stores[1]
