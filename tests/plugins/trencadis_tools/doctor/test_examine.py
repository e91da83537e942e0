from __future__ import annotations

import types

from trencadis_tools.doctor import Severity, examine


def sections(found):
    return list(dict.fromkeys(item.section for item in found))


def test_every_section_is_looked_at_and_this_tree_is_sound():
    found = examine(file=None, flags=["--server.port=0"], environ={})
    assert sections(found) == [
        "installation",
        "plugins",
        "configuration",
        "model",
        "memory",
        "components",
        "server",
    ]
    assert [item.message for item in found if item.severity is Severity.FAIL] == []


def test_faults_of_one_section_do_not_keep_the_others_from_being_looked_at(installed, tmp_path):
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken)
    flags = [f"--model.path={tmp_path / 'no'}", "--engine.seed=many", "--server.port=0"]
    found = examine(file=tmp_path / "no.toml", flags=flags, environ={})
    wrong = {item.section for item in found if item.severity is not Severity.OK}
    assert wrong == {"plugins", "configuration", "model", "components"}
    assert [item.section for item in found][-1] == "server"
    assert all(item.remedy for item in found if item.severity is not Severity.OK)


def test_blocked_plugin_does_no_harm(installed):
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken)
    found = examine(file=None, flags=["--plugins.blocked=broken", "--server.port=0"], environ={})
    assert "plugin broken: blocked" in [item.message for item in found]
