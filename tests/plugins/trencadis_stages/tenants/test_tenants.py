from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import InvalidRequestError, RequestRefusedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend


def request(name: str, tenant: str = "", *, length: int = 8, max_tokens: int = 4, **terms: Any) -> Request:
    start = sum(map(ord, name)) % 50
    return Request(
        request_id=name,
        prompt_token_ids=tuple((start + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        tenant=tenant,
        **terms,
    )


def engine_of(tenants: dict[str, dict[str, Any]] | None = None, **options: Any) -> Any:
    backend = FakeBackend(eos=-1, max_model_len=200)
    return make_engine(backend=backend, tenants=tenants, **{"max_num_seqs": 1, **options})


def weights(engine: Any) -> dict[str, float]:
    state = engine._state
    return {name: float(state.table.weight[slot]) for name, slot in state.slot_of.items()}


def test_a_tenant_has_its_entry_or_that_of_all_others_or_the_defaults() -> None:
    engine = engine_of({"alice": {"weight": 2.0}, "default": {"weight": 0.5}})
    for name, tenant in (("a", "alice"), ("b", "bob"), ("c", "")):
        engine.add(request(name, tenant))
    assert weights(engine) == {"a": 2.0, "b": 0.5, "c": 0.5}
    plain = engine_of()
    plain.add(request("a", "alice"))
    assert weights(plain) == {"a": 1.0}


def test_a_request_may_bring_its_own_weight_and_its_priority_moves_within_the_tenants() -> None:
    engine = engine_of({"alice": {"weight": 2.0, "priority": -10}})
    engine.add(request("a", "alice", weight=7.0, priority=3))
    engine.add(request("b", "alice"))
    table, slot_of = engine._state.table, engine._state.slot_of
    assert weights(engine) == {"a": 7.0, "b": 2.0}
    assert [int(table.priority[slot_of[name]]) for name in "ab"] == [-7, -10]


def test_users_of_one_key_share_its_weight_however_many_they_are() -> None:
    """Else whoever calls itself by many names would get more."""
    engine = engine_of({"key": {"weight": 3.0}})
    engine.add(request("a", "key/ann"))
    engine.add(request("a2", "key/ann"))
    engine.add(request("o", "other/ann"))
    assert weights(engine) == {"a": 3.0, "a2": 3.0, "o": 1.0}
    engine.add(request("b", "key/bob"))
    engine.add(request("c", "key/cid"))
    assert weights(engine) == {"a": 1.0, "a2": 1.0, "b": 1.0, "c": 1.0, "o": 1.0}
    engine.abort("c")
    engine.abort("a")
    assert weights(engine) == {"a2": 1.5, "b": 1.5, "o": 1.0}
    engine.abort("b")
    assert weights(engine) == {"a2": 3.0, "o": 1.0}


def test_a_tenant_with_too_many_waiting_is_refused_with_the_numbers_and_others_are_not() -> None:
    engine = engine_of({"alice": {"max_waiting": 2}})
    engine.add(request("a", "alice"))
    engine.add(request("b", "alice/user"))
    with pytest.raises(
        RequestRefusedError, match=r"tenant 'alice' has 2 waiting and may have 2 .*tenants.alice\] max_wai"
    ):
        engine.add(request("c", "alice"))
    for name in "xyz":
        engine.add(request(name, "bob"))
    engine.step()  # one of alice's has begun
    engine.add(request("c", "alice"))
    assert set(drain(engine)) == set("abcxyz")


def test_a_tenant_with_too_many_tokens_waiting_is_refused_until_they_run() -> None:
    engine = engine_of({"default": {"max_waiting_tokens": 20}})
    engine.add(request("a", "t", length=12))
    with pytest.raises(RequestRefusedError, match=r"12 tokens waiting and may have 20 .*tenants.default\].*has 9"):
        engine.add(request("b", "t", length=9))
    engine.add(request("c", "t", length=8))
    drain(engine)
    engine.add(request("d", "t", length=20))


def test_a_request_that_makes_no_sense_is_told_so_although_the_cap_is_reached() -> None:
    engine = engine_of({"alice": {"max_waiting": 1}})
    engine.add(request("a", "alice"))
    with pytest.raises(InvalidRequestError, match="is live already"):
        engine.add(request("a", "alice"))


def test_a_prompt_longer_than_the_cap_can_never_come_in_and_is_told_so() -> None:
    engine = engine_of({"t": {"max_waiting_tokens": 20}})
    with pytest.raises(InvalidRequestError, match=r"21 prompt tokens.*may let 20 wait"):
        engine.add(request("a", "t", length=21))


def test_a_policy_is_told_what_the_tenant_has_waiting_and_may_refuse() -> None:
    class OnePerTenant(SchedulingPolicy):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
            self.seen.append((num_waiting, num_waiting_tokens))
            return "one is enough" if num_waiting else ""

    policy = OnePerTenant()
    engine = engine_of(policy=policy)
    engine.add(request("a", "t", length=5))
    with pytest.raises(RequestRefusedError, match="one is enough"):
        engine.add(request("b", "t"))
    engine.add(request("c", "u"))
    assert policy.seen == [(0, 0), (1, 5), (0, 0)]


@pytest.mark.parametrize("answer", [None, True])
def test_a_policy_whose_answer_is_no_text_is_at_fault_and_says_of_what(answer: object, caplog: Any) -> None:
    class Mute(SchedulingPolicy):
        def admit_tenant(self, request: Request, **waiting: int) -> Any:
            return answer

    engine = engine_of(policy=Mute(), fallback=True)
    engine.add(request("a", "t"))
    assert engine.num_waiting == 1
    assert f"admit_tenant() returned {answer}, which is no text" in caplog.text


def test_policies_see_a_weight_in_every_request() -> None:
    class Sees(SchedulingPolicy):
        def __init__(self) -> None:
            self.weights: list[Any] = []

        def on_added(self, *, slot: int, request: Request) -> None:
            self.weights.append(request.weight)

    policy = Sees()
    engine = engine_of({"t": {"weight": 2.5}}, policy=policy)
    engine.add(request("a", "t"))
    engine.add(request("b", "t", weight=0.25))
    assert policy.weights == [2.5, 0.25]


def test_sequences_that_were_restored_are_counted_in_with_the_weights_that_they_had() -> None:
    engine = engine_of({"key": {"weight": 3.0, "priority": -1}})
    for number, tenant in enumerate(("key/ann", "key/bob", "other")):
        engine.add(request(str(number), tenant))
    engine.add(request("own", "key/ann", weight=7.0))
    stage, sequences = engine.stage("tenants"), [one for one in engine._state.table.sequences if one is not None]
    accounts, shares, requests = copy.deepcopy(stage._accounts), weights(engine), [one.request for one in sequences]
    for account in stage._accounts.values():  # as a state that took the columns and the queue leaves them
        account.users.clear()
        account.num_live = 0
    for sequence in sequences:
        sequence.request = sequence.original_request
    stage.restore_state(stage.copy_state())
    assert stage._accounts == accounts
    assert weights(engine) == shares == {"0": 1.5, "1": 1.5, "2": 1.0, "own": 7.0}
    assert [one.request for one in sequences] == requests
    drain(engine)
    assert not stage._accounts


@settings(phases=[Phase.explicit, Phase.generate], max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_counts_are_those_of_the_queue_in_any_history_and_nothing_of_a_tenant_that_left_is_kept(seed: int) -> None:
    """Under KV pressure, with preemptions and aborts."""
    rng = random.Random(seed)
    engine = engine_of({"a": {"weight": 2.0}}, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=16)
    state = engine._state
    for number in range(30):
        tenant = rng.choice(["a", "a/1", "a/2", "b", "b/1", ""])
        engine.add(request(str(number), tenant, length=rng.randint(1, 16), max_tokens=rng.randint(1, 20)))
        if rng.random() < 0.3:
            engine.abort(str(rng.randrange(number + 1)))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        queue = [state.table.sequence(slot) for slot in state.waiting.slots.tolist()]
        assert state.num_waiting_tokens == sum(len(one.tokens) for one in queue)
        for key in ("a", "b", ""):
            own = [one for one in queue if one.request.tenant.partition("/")[0] == key]
            num_waiting, num_tokens = state.waiting_of(request("x", f"{key}/x"))
            assert (num_waiting, num_tokens) == (len(own), sum(len(one.tokens) for one in own))
        users = {name.tenant for name in (state.table.sequence(slot).request for slot in state.slot_of.values())}
        num_a = len([user for user in users if user.partition("/")[0] == "a"])
        for slot in state.slot_of.values():
            is_a = state.table.sequence(slot).request.tenant.startswith("a")
            if is_a:
                assert state.table.weight[slot] == 2.0 / num_a
    drain(engine, 3000)
    assert not engine.stage("tenants")._accounts
    assert not state._counted
    assert state.num_waiting_tokens == 0
