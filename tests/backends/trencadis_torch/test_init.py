from __future__ import annotations

import subprocess
import sys

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.backend import INTERFACE_VERSION
from trencadis_torch import trencadis_backends
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig


def test_hook_yields_the_backend_torch():
    (component,) = trencadis_backends()
    assert (component.name, component.config, component.interface_version) == ("torch", TorchConfig, INTERFACE_VERSION)
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    assert isinstance(component.factory(TorchConfig(device="cpu"), context), TorchBackend)


def test_hook_and_config_import_no_torch():
    code = "import sys, trencadis_torch; list(trencadis_torch.trencadis_backends()); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
