from __future__ import annotations

import subprocess
import sys

import pytest

import trencadis_gaudi
from trencadis.clock import SystemClock
from trencadis.errors import BackendError
from trencadis.interfaces import ComponentContext
from trencadis_gaudi.config import GaudiConfig


def test_the_hook_yields_gaudi_with_its_table():
    (component,) = trencadis_gaudi.trencadis_backends()
    assert (component.name, component.config, component.interface_version) == ("gaudi", GaudiConfig, 1)
    context = ComponentContext(clock=SystemClock(), seed=0)
    backend = component.factory(GaudiConfig(device="emulated", mode="lazy"), context)
    assert backend.capabilities.layout == "padded"


def test_room_without_gaudi_software_says_so_when_a_gaudi_is_asked_for():
    (component,) = trencadis_gaudi.trencadis_backends()
    with pytest.raises(BackendError, match=r"Gaudi"):
        component.factory(GaudiConfig(), ComponentContext(clock=SystemClock(), seed=0))


def test_importing_the_room_imports_no_torch():
    code = "import sys, trencadis_gaudi; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
