from __future__ import annotations

import subprocess
import sys

import pytest

from trencadis_torch.environment import set_environment


def test_threads_spin_for_a_moment_and_sleep_while_they_wait():
    environ = {"PATH": "/bin"}
    set_environment(environ, {})
    assert environ == {"PATH": "/bin", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "500"}


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "100"}])
def test_what_somebody_has_said_stays(said):
    environ = dict(said)
    set_environment(environ, {})
    assert environ == said


def test_nothing_is_set_that_nobody_would_read():
    environ: dict[str, str] = {}
    set_environment(environ, {"torch": object()})
    assert environ == {}


@pytest.mark.slow
def test_it_is_set_before_the_backend_imports_torch():
    program = (
        "import os, sys\n"
        "for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'): os.environ.pop(name, None)\n"
        "from trencadis.clock import SystemClock\n"
        "from trencadis.interfaces import ComponentContext\n"
        "from trencadis_torch import _make_torch\n"
        "from trencadis_torch.config import TorchConfig\n"
        "context = ComponentContext(clock=SystemClock(), seed=0)\n"
        "assert 'torch' not in sys.modules\n"
        "_make_torch(TorchConfig(device='cpu'), context)\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["passive", "500"]
