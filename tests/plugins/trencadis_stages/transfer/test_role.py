from __future__ import annotations

from typing import Any

import pytest

from trencadis.engine.engine import Engine
from trencadis.errors import InvalidRequestError, WrongRoleError
from trencadis.records import Request, SamplingParams
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend

PREFILL = {"do_remote_decode": True}


def engine_of(roles: list[str] | None = None, **options: Any) -> Engine:
    loop = LoopConnector()
    if roles is not None:
        loop.scheduler.on_role = roles.append  # type: ignore[method-assign]
    return make_engine(connector=loop.pair(), backend=FakeBackend(eos=-1, max_model_len=64), **options)


def request(name: str, params: dict[str, Any] | None = None) -> Request:
    return Request(
        request_id=name, prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=5), transfer_params=params
    )


def test_prefill_engine_takes_prefills_for_others_only() -> None:
    engine = engine_of(role="prefill")
    engine.add(request("a", PREFILL))
    for params in (None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}, {"do_remote_prefill": True}):
        with pytest.raises(
            WrongRoleError, match=r"'b' was refused: the role of this engine is prefill.*decode or both"
        ):
            engine.add(request("b", params))
    assert list(drain(engine)) == ["a"]


@pytest.mark.parametrize("role", ["both", "decode"])
def test_others_take_every_request(role: str) -> None:
    engine = engine_of(role=role)
    engine.add(request("a"))
    engine.add(request("b", PREFILL))
    assert set(drain(engine)) == {"a", "b"}


def test_role_changes_for_newcomers_and_who_is_here_runs_to_the_end() -> None:
    roles: list[str] = []
    engine = engine_of(roles)
    assert engine.answer("role", {}) == {"role": "both", "num_live": 0}
    engine.add(request("a"))
    engine.step()
    answer = engine.answer("set_role", {"role": "prefill"})
    assert answer == {"role": "prefill", "previous": "both", "num_live": 1}
    with pytest.raises(WrongRoleError):
        engine.add(request("b"))
    assert len(drain(engine)["a"].token_ids) == 5
    assert engine.answer("set_role", {"role": "decode"}) == {"role": "decode", "previous": "prefill", "num_live": 0}
    engine.add(request("b"))
    assert roles == ["both", "prefill", "decode"]


def test_role_that_is_none_and_one_that_nothing_supports_are_refused_and_nothing_changes() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match=r"'router'.*both, prefill, decode"):
        engine.answer("set_role", {"role": "router"})
    alone = make_engine()
    with pytest.raises(InvalidRequestError, match="no KV connector"):
        alone.answer("set_role", {"role": "prefill"})
    assert engine.answer("role", {})["role"] == alone.answer("role", {})["role"] == "both"


def test_a_rejected_request_is_no_error_where_nothing_is_held_for_it() -> None:
    assert make_engine().answer("reject_transfer", {"transfer_params": {"do_remote_prefill": True}}) == {}
