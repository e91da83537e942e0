"""The connector over the package itself, where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

SCENE = Path(__file__).parents[3] / "support/kv/lmcache_scene.py"


@pytest.mark.parametrize("place", ["fs", "redis"])
def test_blocks_of_one_engine_are_loaded_by_another(place, tmp_path, request):
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed: docs/do/kv-connectors.md has the commands")
    url = f"fs://localhost:0{tmp_path}" if place == "fs" else request.getfixturevalue("shared_redis").url
    words = [sys.executable, str(SCENE), url, uuid.uuid4().hex]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.splitlines()[-1:] == ["same"], done.stderr[-2000:]


def test_making_a_connector_imports_no_library():
    code = (
        "import sys; import trencadis_kv.connectors.lmcache.connector;"
        "print(any(name.partition('.')[0] == 'lmcache' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
