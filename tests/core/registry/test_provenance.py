from __future__ import annotations

import types
from importlib.metadata import EntryPoint

from trencadis.registry.provenance import Provenance, distribution_of, of_entry_point, of_import_path, of_object


def test_an_entry_point_names_its_distribution_and_version(install, plugin_source):
    (entry_point,) = install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci"))
    found = of_entry_point(entry_point, plugin="tiles")
    assert str(found) == 'fibonacci-tiles 0.2.0 (plugin "tiles")'
    assert found.module == "fibonacci_tiles"
    assert found.remedy == 'Upgrade or uninstall fibonacci-tiles, or block it: [plugins] blocked = ["tiles"].'


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


def test_an_import_path_outside_all_distributions_has_none():
    assert of_import_path("nowhere.at_all:X").distribution == ""
