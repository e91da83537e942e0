from __future__ import annotations

import pytest

from trencadis.errors import UnknownKeyError
from trencadis.registry import load_with_plugins, resolve_plan


def test_plugins_and_configuration_come_together(house, install, plugin_source):
    points = install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci"))
    resolved, registry = load_with_plugins(
        environ={}, flags=["--bucketing.name", "fibonacci"], extra_plugins=[house], entry_points=points
    )
    assert set(resolved.config.bucketing.components) == {"exact", "exponential", "fibonacci"}
    assert resolve_plan(resolved.config, registry).choices["bucketing"].component.name == "fibonacci"
    assert registry.sources["bucketing.name"] == "flag --bucketing.name"


@pytest.mark.parametrize(
    "arguments",
    [
        {"environ": {"TRENCADIS_BLOCKED_PLUGINS": "tiles"}},
        {"environ": {}, "flags": ["--plugins.blocked=tiles"]},
        {"environ": {}, "overrides": {"plugins.blocked": ("tiles",)}},
    ],
)
def test_a_plugin_blocked_by_any_source_is_never_imported(install, arguments):
    points = install("bad-package", "1.0", "raise RuntimeError('imported')")
    resolved, registry = load_with_plugins(entry_points=points, **arguments)
    assert resolved.config.plugins.blocked == ("tiles",)
    assert dict(registry.plugins) == {}


def test_a_file_blocks_before_tables_of_plugins_are_read(install, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('[plugins]\nblocked = ["tiles"]\n[bucketing.fibonacci]\nlimit = 1\n')
    points = install("bad-package", "1.0", "raise RuntimeError('imported')")
    with pytest.raises(UnknownKeyError, match=r"\[bucketing\.fibonacci\] \(from serve\.toml\)"):
        load_with_plugins(file=file, environ={}, entry_points=points)
