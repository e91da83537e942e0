from __future__ import annotations

import math

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext
from trencadis.records import Request
from trencadis_kv.interfaces import LoadView
from trencadis_kv.store.defaults import IdentityCodec, NoLongerThanComputing, codec_of, policy_of
from trencadis_kv.store.guarded_codec import GuardedCodec
from trencadis_kv.store.guarded_policy import GuardedPolicy


def wait_s(*, load_s, compute_s):
    view = LoadView(
        request=Request(request_id="r", prompt_token_ids=(1,)),
        num_tokens=4,
        num_local_tokens=0,
        num_bytes=64,
        load_s=load_s,
        compute_s=compute_s,
        timeout_s=10.0,
    )
    return NoLongerThanComputing().admits_load(view)


def test_bytes_are_kept_as_they_are():
    codec, out = IdentityCodec(), bytearray(4)
    codec.decode(memoryview(codec.encode(memoryview(b"abcd"), b"")), b"", memoryview(out))
    assert out == b"abcd"


@pytest.mark.parametrize("data", [b"", b"abc", b"abcde"])
def test_payload_of_another_length_is_corrupt(data):
    with pytest.raises(TransferError) as caught:
        IdentityCodec().decode(memoryview(data), b"", memoryview(bytearray(4)))
    assert caught.value.cause == "corrupt"


def test_load_is_awaited_no_longer_than_a_share_of_computing():
    assert wait_s(load_s=0.1, compute_s=1.0) == pytest.approx(0.8)
    assert wait_s(load_s=0.1, compute_s=100.0) == 10.0


def test_load_that_takes_longer_than_that_is_declined():
    assert wait_s(load_s=0.9, compute_s=1.0) == 0.0


def test_unknown_costs_are_tried():
    assert wait_s(load_s=math.nan, compute_s=math.nan) == 10.0
    assert wait_s(load_s=math.nan, compute_s=1.0) == pytest.approx(0.8)


def test_engine_says_which_codec_and_policy():
    made = {"kv_codec": IdentityCodec(), "kv_policy": NoLongerThanComputing()}
    context = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda noun, name: made[noun])
    codec = codec_of(context)
    assert isinstance(codec, GuardedCodec)
    assert bytes(codec.encode(memoryview(b"some"), b"")) == b"some"
    policy = policy_of(context)
    assert isinstance(policy, GuardedPolicy)
    assert policy.policy is made["kv_policy"]


def test_without_an_engine_there_are_defaults():
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    assert isinstance(codec_of(context), IdentityCodec)
    assert isinstance(policy_of(context), NoLongerThanComputing)
