from __future__ import annotations

import sys

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError, ContractError, PluginLoadError
from trencadis.interfaces import ComponentContext, SchedulingPolicy
from trencadis.registry import Registry
from trencadis.registry.contracts import CORE_NOUNS
from trencadis.registry.import_path import import_component

SOURCE = '''
from trencadis.interfaces import SchedulingPolicy

class Plain(SchedulingPolicy):
    """Nothing changed.

    More.
    """

class Outer:
    class Tuned(SchedulingPolicy):
        def __init__(self, limit, *, context):
            self.limit, self.context = limit, context

def make(limit=3) -> "Plain":
    policy = Plain()
    policy.limit = limit
    return policy

def wrong() -> SchedulingPolicy:
    return "no policy"

def says_nothing():
    raise AssertionError("it was called")

def says_another() -> str:
    raise AssertionError("it was called")

def says_what_is_not_there() -> "Nowhere":
    raise AssertionError("it was called")

number = 3
'''


@pytest.fixture
def module(install):
    install("loose-parts", "0.3", SOURCE)
    return "loose_parts"


def _import(path):
    return import_component(CORE_NOUNS["scheduling"], path, key="scheduling.name", source="serve.toml")


def _build(path, options):
    return Registry.discover(entry_points=()).build(
        _import(path), options, ComponentContext(clock=SimulatedClock(), seed=7)
    )


def _said(error_type, call, *arguments):
    with pytest.raises(error_type) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_class_by_import_path_is_a_component(module):
    found = _import(f"{module}:Plain")
    assert (found.noun, found.name, found.component.summary) == ("scheduling", f"{module}:Plain", "Nothing changed.")
    assert (found.provenance.distribution, found.provenance.version) == ("loose-parts", "0.3")
    assert isinstance(_build(f"{module}:Plain", {}), SchedulingPolicy)


def test_options_are_keyword_arguments_and_the_context_is_handed_in(module):
    made = _build(f"{module}:Outer.Tuned", {"limit": 12})
    assert (made.limit, made.context.seed) == (12, 7)


def test_a_function_may_stand_for_the_class(module):
    assert _build(f"{module}:make", {"limit": 5}).limit == 5


def test_options_that_it_does_not_take_are_refused_with_those_it_takes(module):
    said = _said(ConfigValueError, _build, f"{module}:Outer.Tuned", {"limti": 3})
    assert said.startswith("[scheduling.options]: Outer.Tuned cannot be called with them: ")
    assert said.endswith("Given: limti. It takes: limit.")


def test_a_class_of_another_kind_breaks_the_contract():
    assert _said(ContractError, _import, "json:JSONEncoder") == (
        '[scheduling] name = "json:JSONEncoder" (from serve.toml): is no subclass of SchedulingPolicy, and was not called. '
        "Derive it from trencadis.interfaces.SchedulingPolicy, or name a function that is annotated as returning one: "
        "def make() -> SchedulingPolicy."
    )


@pytest.mark.parametrize("name", ["says_nothing", "says_another", "says_what_is_not_there"])
def test_a_function_that_does_not_say_that_it_returns_the_contract_is_not_called(module, name):
    assert "and was not called" in _said(ContractError, _import, f"{module}:{name}")


@pytest.mark.parametrize("path", ["os:system", "builtins:exec", "subprocess:run", "subprocess:Popen", "builtins:print"])
def test_what_is_importable_everywhere_is_of_no_contract(path):
    for noun in CORE_NOUNS:
        with pytest.raises(ContractError, match="and was not called"):
            import_component(CORE_NOUNS[noun], path, key=f"{noun}.name", source="serve.toml")


def test_a_function_that_returns_something_else_breaks_the_contract(module):
    assert "built a str, which is no SchedulingPolicy" in _said(ContractError, _build, f"{module}:wrong", {})


@pytest.mark.parametrize(
    ("path", "cause"),
    [("no_such_module_anywhere:X", "ModuleNotFoundError"), ("json:NoSuchName", "AttributeError")],
)
def test_an_import_that_fails_names_setting_source_and_cause(path, cause):
    said = _said(PluginLoadError, _import, path)
    assert said.startswith(f'[scheduling] name = "{path}" (from serve.toml): cannot be imported: {cause}: ')


@pytest.mark.parametrize("path", [":X", "json:"])
def test_half_an_import_path_is_refused(path):
    assert "is no import path" in _said(ConfigValueError, _import, path)


def test_a_module_in_the_current_folder_is_found_although_it_is_not_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "my_policies_here.py").write_text(
        "from trencadis.interfaces import SchedulingPolicy\nclass Mine(SchedulingPolicy):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    before = list(sys.path)
    found = import_component(CORE_NOUNS["scheduling"], "my_policies_here:Mine", key="scheduling.name", source="")
    assert found.component.factory({}, None).__class__.__name__ == "Mine"
    assert sys.path == [*before, str(tmp_path)]
    sys.modules.pop("my_policies_here")


def test_the_current_folder_is_left_alone_where_the_module_is_installed_or_nowhere(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(ContractError):
        import_component(CORE_NOUNS["scheduling"], "json:JSONDecoder", key="scheduling.name", source="")
    with pytest.raises(PluginLoadError, match="current folder"):
        import_component(CORE_NOUNS["scheduling"], "no_such_module_anywhere:X", key="scheduling.name", source="")
    assert sys.path == before
