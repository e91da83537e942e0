from __future__ import annotations

import subprocess
import sys

import trencadis


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "trencadis", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"trencadis {trencadis.__version__}\n"


def test_the_exit_code_reaches_the_shell():
    done = subprocess.run([sys.executable, "-m", "trencadis", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
