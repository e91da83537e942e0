"""What the rooms of both backends do before anything needs PyTorch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
sys.modules["triton"] = None
import trencadis_gaudi.kernels, trencadis_torch
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext
for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"): os.environ.pop(name, None)
found = [*trencadis_gaudi.trencadis_backends(), *trencadis_torch.trencadis_backends()]
assert "torch" not in sys.modules
print(*[(one.name, one.config.__name__, one.interface_version) for one in found])
made = found[1].factory(found[1].config(device="cpu"), ComponentContext(clock=SystemClock(), seed=0))
print(type(made).__name__, os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
graphs = ("trencadis_torch.graphs.compiled", "trencadis_torch.graphs.cuda_graphs")
print(*{"prometheus_client", "trencadis_torch.attention.triton", *graphs} & set(sys.modules))
import torch
from trencadis_torch.attention import triton, triton_kernels
print(triton_kernels.is_installed(), triton_kernels.is_interpreted(), triton.obstacle((), torch.device("cuda")))
"""


def test_hooks_import_no_torch_and_a_backend_only_what_it_needs_and_the_environment_is_set_before():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "('gaudi', 'GaudiConfig', 1) ('torch', 'TorchConfig', 1)",
        "TorchBackend passive 500",
        "",
        "False False the package triton is missing, which a CUDA build of PyTorch brings",
    ]
