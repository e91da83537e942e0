from __future__ import annotations

import os
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from trencadis.errors import ConfigValueError, ContractError, PluginLoadError
from trencadis.hookspecs import PROCESSOR_GROUP
from trencadis_plugins.sampling import elsewhere as module
from trencadis_plugins.sampling.chain import build_chain
from trencadis_plugins.sampling.elsewhere import processor_from
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.standard import StandardSampler

_PATH = "trencadis_plugins.sampling.min_p:MinP"


def _install(monkeypatch, *points):
    def entry_points(*, group, name):
        return EntryPoints(EntryPoint(name=one, value=value, group=PROCESSOR_GROUP) for one, value in points).select(
            group=group, name=name
        )

    monkeypatch.setattr(module, "entry_points", entry_points)


def test_an_import_path_and_an_entry_point_lead_to_a_new_processor(monkeypatch):
    assert isinstance(processor_from(_PATH), MinP)
    _install(monkeypatch, ("mine", _PATH))
    assert isinstance(processor_from("mine"), MinP)
    assert processor_from("mine") is not processor_from("mine")


def test_a_name_that_nothing_has_leads_nowhere():
    assert processor_from("no_such_processor") is None


def test_a_name_of_two_packages_is_refused(monkeypatch):
    _install(monkeypatch, ("mine", _PATH), ("mine", "other:MinP"))
    with pytest.raises(ConfigValueError, match="'mine' is a name in"):
        processor_from("mine")


@pytest.mark.parametrize("path", ["no_such_package:X", "trencadis_plugins.sampling.min_p:Nothing"])
def test_what_cannot_be_imported_is_refused_with_the_cause(path):
    with pytest.raises(PluginLoadError, match=f"processor '{path}' cannot be imported: [A-Za-z]+Error"):
        processor_from(path)


def test_a_processor_that_takes_arguments_is_refused_with_the_cause():
    with pytest.raises(PluginLoadError, match="cannot be made: TypeError"):
        processor_from("trencadis_plugins.sampling.elsewhere:IsolatedProcessor")


def test_what_is_no_processor_is_refused_and_not_called(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: pytest.fail("it was called"))
    for path in ("collections:OrderedDict", "json:loads", "os:getpid"):
        with pytest.raises(ContractError, match="no subclass of LogitsProcessor, and was not called"):
            processor_from(path)


def test_installed_processors_are_among_the_choices_of_an_unknown_name(monkeypatch):
    points = EntryPoints([EntryPoint(name="mine", value=_PATH, group=PROCESSOR_GROUP)])
    monkeypatch.setattr(
        module, "entry_points", lambda *, group, name="": points.select(group=group, **({"name": name} if name else {}))
    )
    with pytest.raises(ConfigValueError, match=r"Did you mean \"mine\"\? Choose among .*top_k.*, mine\."):
        build_chain("vllm", processors=["mime"])


def test_what_a_processor_from_elsewhere_honours_counts_in_its_chain():
    chain = build_chain("vllm", chain=[_PATH])
    assert StandardSampler(chain).honours == {"greedy", "logprobs", "min_p"}
