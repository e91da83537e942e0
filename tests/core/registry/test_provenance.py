from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from trencadis.registry import Registry
from trencadis.registry import provenance as provenance_module
from trencadis.registry.provenance import Provenance, distribution_of, of_entry_point, of_import_path, of_object


def test_an_entry_point_names_its_distribution_and_version(install, plugin_source):
    (entry_point,) = install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci"))
    found = of_entry_point(entry_point, plugin="tiles")
    assert str(found) == 'fibonacci-tiles 0.2.0 (plugin "tiles")'
    assert found.module == "fibonacci_tiles"
    assert found.remedy == 'Upgrade or uninstall fibonacci-tiles, or block it: [plugins] blocked = ["tiles"].'


def test_nothing_advises_to_uninstall_the_engine():
    found = Provenance(plugin="gaudi", module="trencadis_gaudi", distribution="trencadis", version="0.1.0")
    assert "nstall" not in found.remedy
    assert "block" not in found.remedy
    assert "report it" in found.remedy


def test_an_entry_point_made_in_code_has_no_distribution():
    found = of_entry_point(EntryPoint(name="x", value="my.module", group="trencadis"), plugin="x")
    assert found == Provenance(plugin="x", module="my.module")
    assert str(found) == 'my.module, given in code (plugin "x")'
    assert found.remedy == "Correct it, or do not pass it."


def test_metadata_of_a_distribution_is_read_once_for_all_its_entry_points(install, plugin_source, monkeypatch):
    (entry_point,) = install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci"))
    read, count = type(entry_point.dist).read_text, []
    monkeypatch.setattr(type(entry_point.dist), "read_text", lambda *args: count.append(args[1]) or read(*args))
    assert [distribution_of(entry_point) for _ in range(3)] == [("fibonacci-tiles", "0.2.0")] * 3
    assert count.count("METADATA") == 2, "for the name and for the version"
    assert distribution_of(EntryPoint(name="x", value="my.module", group="trencadis")) == ("", "")


def test_a_plugin_given_in_code_is_named_by_module_or_class():
    assert of_object(types.ModuleType("my.module")).plugin == "my.module"
    assert of_object(Provenance).plugin == "Provenance"
    assert of_object(Provenance(plugin="a", module="b")).module == "trencadis.registry.provenance"


def test_an_import_path_is_traced_to_its_distribution(install, plugin_source):
    install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci"))
    found = of_import_path("fibonacci_tiles:Anything")
    assert (found.distribution, found.version) == ("fibonacci-tiles", "0.2.0")


@pytest.fixture
def digest_of(tmp_path, monkeypatch):
    """Returns a function: the digest of a package with these files, as a new process would see it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(files, *, distribution="my-package", module="digested.plugin"):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "digested"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        importlib.import_module(module)
        provenance_module._code_files.cache_clear()
        return Provenance(plugin="x", module=module, distribution=distribution, version="1.0").code_digest

    yield digest
    provenance_module._code_files.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "digested"]:
        del sys.modules[name]


FILES = {"digested/__init__.py": "", "digested/plugin.py": "A = 1\n", "digested/inner/policy.py": "B = 2\n"}


@pytest.mark.parametrize("edited", FILES)
def test_any_edited_file_of_an_installed_package_changes_its_digest_and_nothing_else_does(digest_of, edited):
    before = digest_of(FILES)
    assert len(bytes.fromhex(before)) == 16
    assert digest_of({"digested/__pycache__/x.pyc": "compiled", "digested/notes.txt": "words"}) == before
    assert digest_of({edited: "C = 33333\n"}) != before
    assert digest_of(FILES) == before


def test_of_a_module_without_a_distribution_its_own_file_counts(digest_of):
    before = digest_of(FILES, distribution="")
    assert digest_of({"digested/inner/policy.py": "B = 3\n"}, distribution="") == before
    assert digest_of({"digested/plugin.py": "A = 2\n"}, distribution="") != before


def test_loading_plugins_reads_no_code_for_a_digest(install, plugin_source, monkeypatch):
    monkeypatch.setattr(provenance_module, "_code_files", None)
    registry = Registry.discover(entry_points=install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci")))
    assert "fibonacci" in registry.components("bucketing")


def test_an_author_of_an_editable_plugin_is_sent_to_the_line_that_raised(tmp_path, monkeypatch):
    home = tmp_path / "trencadis-scheduling-lottery"
    info = tmp_path / "site" / "trencadis_scheduling_lottery-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trencadis-scheduling-lottery\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": home.as_uri()}))
    (info / "entry_points.txt").write_text("[trencadis]\nlottery = own_lottery\n")
    home.mkdir()
    module = home / "own_lottery.py"
    module.write_text(
        "from trencadis import hookimpl\n\n\n@hookimpl\ndef trencadis_scheduling_policies():\n    raise RuntimeError('boom')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(home)
    (point,) = importlib.metadata.distribution("trencadis-scheduling-lottery").entry_points
    said = str(*Registry.discover(entry_points=(point,)).broken.values())
    assert f"raised in trencadis_scheduling_policies: RuntimeError: boom, {module}:6." in said
    assert f'installed from {home}: correct it there, or block it: [plugins] blocked = ["lottery"].' in said
