from __future__ import annotations

from typing import Any

from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_testing.engines import ServeInOrder, make_engine
from trencadis_testing.fakes import FakeBackend


class Sees(Observer):
    def __init__(self) -> None:
        self.ends: list[tuple[str, FinishReason]] = []

    def on_request(self, finished: FinishedSequence) -> None:
        self.ends.append((finished.request_id, finished.finish_reason))


class Counts(ServeInOrder):
    def __init__(self) -> None:
        self.finished: list[int] = []

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        self.finished.append(num_output_tokens)


def request(name: str, **params: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=(1, 2, 3), params=SamplingParams(**params))


def test_everybody_hears_once_of_every_end_whatever_it_was() -> None:
    sees, policy = Sees(), Counts()
    engine = make_engine(observers=[("sees", sees)], policy=policy, backend=FakeBackend(eos=-1, max_model_len=64))
    engine.add(request("long enough", max_tokens=3))
    engine.add(request("aborted", max_tokens=30))
    engine.add(request("stopped", max_tokens=30))
    for _ in range(3):
        engine.step()
    aborted, stopped = engine.abort("aborted"), engine.stop("stopped")
    while engine.has_work:
        engine.step()
    assert aborted is not None
    assert stopped is not None
    assert sorted(sees.ends, key=lambda end: end[0]) == [
        ("aborted", FinishReason.ABORT),
        ("long enough", FinishReason.LENGTH),
        ("stopped", FinishReason.STOP),
    ]
    assert sorted(policy.finished) == sorted([3, len(aborted.token_ids), len(stopped.token_ids)])
    assert engine.totals.num_finished == 3
    assert engine.abort("long enough") is None
