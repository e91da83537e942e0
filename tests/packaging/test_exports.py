from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import trencadis
import trencadis.errors
import trencadis.interfaces
import trencadis.records

PUBLIC = ("", ".clock", ".errors", ".files", ".hookspecs", ".interfaces", ".records")


def test_every_public_name_exists_and_is_documented() -> None:
    for module in (importlib.import_module(f"trencadis{name}") for name in PUBLIC):
        for exported in module.__all__:
            value = getattr(module, exported)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{module.__name__}.{exported} has no docstring"


@pytest.mark.parametrize("package", [trencadis.interfaces, trencadis.records])
def test_packages_export_what_their_modules_export(package) -> None:
    of_each_noun = {"INTERFACE_VERSION", "STABILITY"}
    expected = set(of_each_noun)
    for module in pkgutil.iter_modules(package.__path__):
        expected |= set(importlib.import_module(f"{package.__name__}.{module.name}").__all__)
    assert set(package.__all__) | of_each_noun == expected


def test_unknown_top_level_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        trencadis.LLLM  # noqa: B018


def test_contracts_stay_small() -> None:
    for name in trencadis.interfaces.__all__:
        methods = getattr(getattr(trencadis.interfaces, name), "__abstractmethods__", frozenset())
        assert len(methods) <= 8, f"{name}: {sorted(methods)}"


def test_errors_tell_cause_and_fix() -> None:
    for name in trencadis.errors.__all__:
        error = getattr(trencadis.errors, name)
        leaf = inspect.isclass(error) and not error.__subclasses__() and issubclass(error, Exception)
        if leaf:
            assert "Fix:" in (error.__doc__ or "") or "either end with this error" in (error.__doc__ or ""), name
