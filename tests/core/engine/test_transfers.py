from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.records import Request, SamplingParams
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def test_connector_hit_parks_the_sequence_and_its_blocks_are_used() -> None:
    loop = LoopConnector(delay=2)
    first = make_engine(connector=loop.pair(), backend=FakeBackend(eos=-1))
    first.add(request("a"))
    drain(first)
    first.add(request("kick"))  # content is offered at a commit and saved with the next step
    drain(first)
    other = LoopConnector(delay=2)
    other.store.blocks.update(loop.store.blocks)
    second = make_engine(connector=other.pair(), backend=FakeBackend(eos=-1))
    second.add(request("b"))
    second.step()
    assert second.num_running == 0
    assert second.num_waiting == 1
    end = drain(second)["b"]
    assert end.num_cached_tokens == 8
    assert end.token_ids.tolist() == fake_text(PROMPT, 8, eos=-1)
    assert other.scheduler.num_loaded == 1


def test_failed_load_is_recomputed_and_lost_load_times_out() -> None:
    loop = LoopConnector()
    engine = make_engine(connector=loop.pair())
    for name in "ab":
        engine.add(request(name))
        drain(engine)
    for delay, fail in ((1, 4), (10_000, None)):
        clock = SimulatedClock()
        other = LoopConnector(delay=delay, fail=lambda ticket, fail=fail: fail)
        other.store.blocks.update(loop.store.blocks)
        engine = make_engine(connector=other.pair(), clock=clock, load_timeout_s=5.0)
        engine.add(request("c"))
        for _ in range(40):
            clock.advance(1.0)
            for end in engine.step().finished:
                assert end.token_ids.tolist() == fake_text(PROMPT, 8)
        assert not engine._state.slot_of
        assert engine._state.transfers.num_failed_loads == 1


def test_blocks_of_a_finished_sequence_stay_held_until_released() -> None:
    engine = make_engine(connector=LoopConnector(delay=3, holds=True).pair())
    engine.add(request("a", max_tokens=1))
    while engine._state.slot_of:
        engine.step()
    assert engine._state.blocks.num_used > 0
    drain(engine)
    assert engine._state.blocks.num_used == 0


def test_late_writes_of_a_cancelled_load_hit_no_other_sequence() -> None:
    loop = LoopConnector()
    engine = make_engine(connector=loop.pair(), backend=FakeBackend(eos=-1))
    for name in "ab":
        engine.add(request(name))
        drain(engine)
    other = LoopConnector(delay=6)
    other.store.blocks.update(loop.store.blocks)
    engine = make_engine(connector=other.pair(), num_blocks=12, backend=FakeBackend(eos=-1, max_model_len=48))
    engine.add(request("loads"))
    engine.step()
    assert engine.num_waiting == 1
    engine.abort("loads")
    prompts = {str(i): tuple((7 * i + j) % 97 for j in range(12)) for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    ends = drain(engine)
    for name, prompt in prompts.items():
        assert ends[name].token_ids.tolist() == fake_text(prompt, 8, eos=-1)
