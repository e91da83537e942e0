from __future__ import annotations

import subprocess
import sys

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.sampling import INTERFACE_VERSION, Sampler
from trencadis_plugins.sampling import trencadis_samplers


def test_both_samplers_are_offered_and_can_be_made():
    components = {component.name: component for component in trencadis_samplers()}
    assert list(components) == ["standard", "greedy"]
    for component in components.values():
        sampler = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
        assert isinstance(sampler, Sampler)
        assert component.interface_version == INTERFACE_VERSION


@pytest.mark.parametrize("order", ["vllm", "hf", "llamacpp"])
def test_the_configured_order_reaches_the_chain(order):
    from trencadis_plugins.sampling.chain import standard_chain

    component = next(iter(trencadis_samplers()))
    sampler = component.factory(component.config(order=order), ComponentContext(clock=SimulatedClock(), seed=0))
    assert [type(p) for p in sampler._chain] == [type(p) for p in standard_chain(order)]


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
def test_the_configured_log_probabilities_are_reported(logprobs):
    component = next(iter(trencadis_samplers()))
    sampler = component.factory(component.config(logprobs=logprobs), ComponentContext(clock=SimulatedClock(), seed=0))
    assert sampler._reports_processed == (logprobs == "processed")


def test_listing_the_samplers_imports_no_torch():
    code = (
        "import sys; from trencadis_plugins.sampling import trencadis_samplers; "
        "list(trencadis_samplers()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
