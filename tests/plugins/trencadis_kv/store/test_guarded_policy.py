from __future__ import annotations

import math
from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError, TransferError
from trencadis.interfaces import ComponentContext
from trencadis.records import TransferCause
from trencadis_kv.interfaces import FailureView, KVCodec, KVPolicy, PrefillEngineView, SaveView, SourceView
from trencadis_kv.store.defaults import policy_of
from trencadis_kv.store.guarded_codec import GuardedCodec
from trencadis_kv.store.guarded_policy import GuardedPolicy
from trencadis_kv.testing import KVPolicyConformance
from trencadis_kv.testing.kv_policy import load_view, prefill_view

SAVE = SaveView(num_blocks=4, num_bytes=64, staged_fraction=0.5)


SOURCES = [SourceView(name="a", num_tokens=4), SourceView(name="b", num_tokens=8)]


PREFILL = prefill_view(
    PrefillEngineView(name="a:1", num_waiting_tokens=0, affinity=0.1),
    PrefillEngineView(name="b:1", num_waiting_tokens=0, affinity=0.2),
)


FAILURE = FailureView(cause="lost", num_valid_tokens=0, num_lost_tokens=8, num_attempts=1)


class Answering(KVPolicy):
    """Gives one answer to every question, or raises it."""

    def __init__(self, answer):
        self.answer = answer

    def _say(self, view):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    admits_save = admits_load = choose_source = prefill_at = on_failure = _say


class TestGuardedNonsense(KVPolicyConformance):
    def make(self):
        return GuardedPolicy(Answering(math.nan))


class TestGuardedRaises(KVPolicyConformance):
    def make(self):
        return GuardedPolicy(Answering(RuntimeError("no idea")))


@pytest.mark.parametrize(
    ("ask", "legal", "illegal", "default"),
    [
        (lambda policy: policy.admits_save(SAVE), [0, 3, 4], [-1, 5, 2.0, None, True], 4),
        (lambda policy: policy.admits_load(load_view(timeout_s=9.0)), [0, 0.5, 9.0], [-0.1, 9.1, math.inf, "1"], 9.0),
        (lambda policy: policy.choose_source(SOURCES), [0, 1], [2, -1, "a"], 1),
        (lambda policy: policy.prefill_at(PREFILL), [None, 0, 1], [2, -1, 0.5, "a"], 1),
        (lambda policy: policy.on_failure(FAILURE), ["compute", "retry"], ["fail", None], "compute"),
    ],
)
def test_legal_answers_stand_and_others_are_replaced_by_the_default(ask, legal, illegal, default):
    for answer in legal:
        assert ask(GuardedPolicy(Answering(answer))) == answer
    for answer in [*illegal, KeyError("x")]:
        policy = GuardedPolicy(Answering(answer))
        assert ask(policy) == default
        assert policy.num_errors == 1


def test_a_policy_is_named_with_its_package_and_what_to_do(caplog):
    context = ComponentContext(
        clock=SimulatedClock(),
        seed=0,
        make=lambda noun, name: Answering(SystemExit(3)),
        label_of=lambda noun, name: f'{noun} component "mine" of my-package 1.2 (plugin "mine")',
    )
    assert policy_of(context).admits_save(SAVE) == SAVE.num_blocks
    assert (
        'kv_policy component "mine" of my-package 1.2 (plugin "mine") raised SystemExit: 3 in admits_save()'
        in caplog.text
    )


def test_a_slow_policy_is_asked_no_more(caplog):
    clock, asked = SimulatedClock(), []

    class Slow(KVPolicy):
        def admits_save(self, view):
            asked.append(view)
            clock.advance(5.0)
            return 0

    context = ComponentContext(clock=clock, seed=0, make=lambda noun, name: Slow(), budget_s=lambda noun: 0.2)
    policy = policy_of(context)
    assert [policy.admits_save(SAVE) for _ in range(3)] == [0, SAVE.num_blocks, SAVE.num_blocks]
    assert len(asked) == 1
    assert "took 5 s in admits_save(), over its budget of 0.2 s ([budget] kv_policy_ms)" in caplog.text


def engine(num_waiting_tokens=0, *, remote_s=math.nan, affinity=0.0):
    return PrefillEngineView(name="a:1", num_waiting_tokens=num_waiting_tokens, remote_s=remote_s, affinity=affinity)


@pytest.mark.parametrize(
    ("view", "chosen"),
    [
        (prefill_view(), None),
        (prefill_view(engine(), num_tokens=511), None),
        (prefill_view(engine(), num_tokens=512), 0),
        (prefill_view(engine(5000), engine(100)), 1),
        (prefill_view(engine(1000, affinity=0.9), engine(0, affinity=0.1)), 0),
        (prefill_view(engine(0, affinity=0.1), engine(0, affinity=0.9)), 1),
        (prefill_view(engine(remote_s=3.9), compute_s=1.0), 0),
        (prefill_view(engine(remote_s=4.1), compute_s=1.0), None),
        (prefill_view(engine(remote_s=1.1), compute_s=1.0, max_slowdown=1.0), None),
        (prefill_view(engine(remote_s=1e9)), 0),
    ],
    ids=[
        "none",
        "short",
        "long enough",
        "load",
        "a prompt more",
        "affinity",
        "slower",
        "too slow",
        "ratio",
        "unmeasured",
    ],
)
def test_prompts_go_to_the_least_loaded_unless_that_is_slow(view, chosen):
    assert KVPolicy().prefill_at(view) == chosen


def test_an_error_that_a_policy_keeps_does_not_grow():
    error = RuntimeError("no idea")
    policy = GuardedPolicy(Answering(error))
    for _ in range(3):
        policy.admits_save(SAVE)
    assert error.__traceback__ is None


LABEL = 'kv_codec component "mine" of my-package 1.2 (plugin "mine")'


class Codec(KVCodec):
    """Does what it is given."""

    flags = 128
    max_growth_bytes = 2

    def __init__(self, does: Any) -> None:
        self.does = does

    def encode(self, payload: memoryview, header: bytes) -> Any:
        return self._do(payload)

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        self._do(data)

    def _do(self, data: memoryview) -> Any:
        if isinstance(self.does, BaseException):
            raise self.does
        return self.does(data) if callable(self.does) else self.does


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (ValueError("broken"), "raised ValueError: broken in encode()"),
        (SystemExit(3), "raised SystemExit: 3 in encode()"),
        (None, "raised TypeError: "),
        ("text", "raised TypeError: "),
        (b"12345678", "raised ContractError: 8 bytes of 4, and max_growth_bytes = 2"),
    ],
)
def test_a_codec_that_cannot_encode_is_named(does: Any, says: str) -> None:
    codec = GuardedCodec(Codec(does), LABEL)
    with pytest.raises(TransferError) as caught:
        codec.encode(memoryview(b"data"), b"")
    assert str(caught.value).startswith(f"{LABEL} {says}")
    assert "choose another in kv_codec.name" in str(caught.value)
    assert caught.value.cause == TransferCause.RAISED


def test_a_codec_that_cannot_decode_is_named_and_its_own_errors_pass() -> None:
    out = memoryview(bytearray(4))
    with pytest.raises(TransferError, match=r"raised KeyError: 1 in decode\(\)"):
        GuardedCodec(Codec(KeyError(1)), LABEL).decode(memoryview(b"data"), b"", out)
    with pytest.raises(TransferError, match=r"^not mine$"):
        GuardedCodec(Codec(TransferError("not mine", cause="corrupt")), LABEL).decode(memoryview(b"data"), b"", out)


def test_what_it_returns_is_kept() -> None:
    codec = GuardedCodec(Codec(lambda data: bytes(data) + b"!!"), LABEL)
    assert bytes(codec.encode(memoryview(b"data"), b"")) == b"data!!"
    assert (codec.flags, codec.max_growth_bytes) == (128, 2)


@pytest.mark.parametrize(("name", "number"), [("flags", -1), ("flags", 1 << 16), ("max_growth_bytes", None)])
def test_numbers_that_are_none_are_refused_at_the_start(name: str, number: Any) -> None:
    codec = Codec(None)
    setattr(codec, name, number)
    with pytest.raises(ContractError, match=f"of my-package 1.2 .* has {name} = {number}"):
        GuardedCodec(codec, LABEL)
