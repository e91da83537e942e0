from __future__ import annotations

import types

from trencadis.api import PluginLoader
from trencadis.config import read_config_file
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Finding, HealthCheck, Severity
from trencadis_tools import doctor


def examine(*, file=None, flags=(), blocked=()):
    plugins = PluginLoader.of_installed(blocked)
    return doctor.examine(file=read_config_file(file, {}), plugins=plugins, flags=flags, environ={})


def sections(found):
    return list(dict.fromkeys(item.section for item in found))


def test_every_section_is_looked_at_and_this_tree_is_sound():
    found = examine(flags=["--server.port=0"])
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


def plugin_with_checks():
    """A plugin with a check that finds something and one that raises."""

    def ink(config):
        yield Finding.ok(f"ink for seed {config.engine.seed}")
        yield Finding.warn("ink runs low", "Buy some.")

    def nibs(config):
        raise OSError("no nibs")

    plugin = types.ModuleType("pen")

    @hookimpl
    def trencadis_health_checks():
        return [HealthCheck(name="ink", run=ink), HealthCheck(name="nibs", run=nibs)]

    plugin.trencadis_health_checks = trencadis_health_checks
    return plugin


def test_faults_of_one_section_do_not_keep_the_others_from_being_looked_at(installed, tmp_path):
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken, plugin_with_checks())
    flags = [f"--model.path={tmp_path / 'no'}", "--engine.seed=many"]
    found = examine(file=tmp_path / "no.toml", flags=flags)
    wrong = {item.section for item in found if item.severity is not Severity.OK}
    assert wrong == {"plugins", "configuration", "model", "components", "ink", "nibs"}
    assert [(item.section, item.severity, item.message) for item in found][-3:] == [
        ("ink", Severity.OK, "ink for seed 0"),
        ("ink", Severity.WARN, "ink runs low"),
        ("nibs", Severity.FAIL, "the check of this section raised OSError: no nibs"),
    ]
    assert all(item.remedy for item in found if item.severity is not Severity.OK)


def test_blocked_plugin_does_no_harm(installed):
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken)
    found = examine(flags=["--plugins.blocked=broken"], blocked=["broken"])
    assert "plugin broken: blocked" in [item.message for item in found]
