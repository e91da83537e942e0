from __future__ import annotations

import pytest

import trencadis_testing
from trencadis_kv.testing.kv_codec import KVCodecConformance
from trencadis_kv.testing.kv_policy import KVPolicyConformance
from trencadis_testing.collective import CollectiveConformance
from trencadis_testing.sampling_processors import LogitsProcessorConformance


@pytest.mark.parametrize("name", trencadis_testing.__all__)
def test_every_public_name_is_found_at_its_home(name):
    assert getattr(trencadis_testing, name).__name__ == name
    assert name in dir(trencadis_testing)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'trencadis_testing' has no attribute 'Nothing'"):
        trencadis_testing.Nothing  # noqa: B018 - the access is what is tested


@pytest.mark.representatives(20)
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trencadis_testing.AcceptanceConformance().make(), "AcceptanceConformance needs a method"),
        (lambda: trencadis_testing.AcceptanceConformance().tensor(None), "AcceptanceConformance needs a method"),
        (lambda: trencadis_testing.BucketingConformance().make(None), "make = YourStrategy"),
        (lambda: CollectiveConformance().make(2, timeout_s=1.0), "needs a method make"),
        (lambda: trencadis_testing.DraftLengthConformance().make(), "make = YourDraftLength"),
        (lambda: trencadis_testing.EvictionConformance().make(), "make = YourPolicy"),
        (lambda: trencadis_testing.ExecutorConformance().make(), "make = YourExecutor"),
        (lambda: KVCodecConformance().make(), "make = YourCodec"),
        (lambda: trencadis_testing.KVConnectorConformance().make(), "returns a ConnectorPair"),
        (lambda: KVPolicyConformance().make(), "make = YourPolicy"),
        (lambda: LogitsProcessorConformance().make(), "LogitsProcessorConformance needs a method make"),
        (lambda: trencadis_testing.ObserverConformance().make(), "make = YourObserver"),
        (lambda: trencadis_testing.RouterConformance().make(), "make = YourRouter"),
        (lambda: trencadis_testing.SpeculationConformance().make(), "make = YourSpeculator"),
    ],
)
def test_a_suite_without_its_component_says_what_to_do(call, said):
    with pytest.raises(NotImplementedError, match=said):
        call()
