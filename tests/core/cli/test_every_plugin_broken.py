from __future__ import annotations

import os
import subprocess
import sys

import pytest

_BREAK = """
import importlib.metadata, os, sys

broken = {one.module for one in importlib.metadata.entry_points(group="trencadis")} - set(os.environ["SOUND"].split(","))


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in broken:
            raise RuntimeError(f"broken on purpose: {name}")


sys.meta_path.insert(0, Finder())
from trencadis.cli import main

sys.exit(main(sys.argv[1:]))
"""
_ENGINE = ",".join(
    f"trencadis_plugins.{noun}"
    for noun in [
        "acceptance",
        "bucketing",
        "draft_length",
        "eviction",
        "executor",
        "observer",
        "sampling",
        "scheduling",
        "speculation",
    ]
)


@pytest.mark.representatives(1, ci=3)
@pytest.mark.parametrize(
    ("arguments", "sound", "code", "printed"),
    [
        (["--help"], "", 0, "generate "),
        (["generate", "--help"], "", 0, "--engine.seed"),
        (["config"], "", 2, "model.path"),
        (["plugins"], "", 2, "broken on purpose: trencadis_kv"),
        (["plugins", "--json"], "", 2, "broken on purpose: trencadis_kv"),
        (["doctor"], "trencadis_tools", 1, "broken on purpose: trencadis_kv"),
        (["generate", "--max-tokens", "1", "hi"], f"{_ENGINE},trencadis_torch", 0, "\n"),
    ],
)
def test_commands_of_the_core_and_doctor_need_no_plugin_but_those_they_run(arguments, sound, code, printed):
    ran = subprocess.run(
        [sys.executable, "-c", _BREAK, *arguments],
        env={**os.environ, "SOUND": sound},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert printed in ran.stdout
    assert "Traceback" not in ran.stderr
