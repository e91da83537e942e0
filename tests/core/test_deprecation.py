"""What goes away warns for two minor versions, and a version that is due to be without it says so here."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest

import trencadis
from trencadis import deprecated
from trencadis.deprecation import Deprecation, removals_due

ROOT = Path(__file__).parents[2]
MARKS = ("since=", "deprecate(")


def deprecating_modules() -> list[str]:
    """The modules of this repository that declare a deprecation: found by their text, so that none is forgotten."""
    rooms = [ROOT / "core", ROOT / "plugins", ROOT / "backends"]
    return [
        ".".join(path.relative_to(room).with_suffix("").parts).removesuffix(".__init__")
        for room in rooms
        for path in sorted(room.rglob("*.py"))
        if any(mark in path.read_text(encoding="utf-8") for mark in MARKS)
        and path.stem not in ("deprecation", "renames", "setting")
    ]


def due(version: str) -> list[Deprecation]:
    for name in deprecating_modules():
        importlib.import_module(name)
    return removals_due(version, "trencadis")


def test_nothing_is_left_that_this_version_has_promised_to_be_without() -> None:
    left = [f"{one.module}: {one.what} was to go away with {one.removed_in}" for one in due(trencadis.__version__)]
    assert not left, "remove them, with their tests and a line in CHANGELOG.md"


def test_what_is_renamed_in_0_1_is_due_in_0_3() -> None:
    assert not due("0.2.9")
    found = {one.what for one in due("0.3.0")}
    assert {
        "AcceptanceRule.takes_trees",
        "Drafts.laws",
        "LogitsProcessor.asks",
        "Sampler.goes_on",
        "the capability sampling.laws",
        "the key max_guests",
        "the key max_parked",
        "the metric trencadis_kv_guests",
        "trencadis.interfaces.Laws",
        "trencadis.records.DraftLaws",
    } <= found
    assert found == {one.what for one in due("1.0")}


def test_each_declaration_names_its_own_module() -> None:
    assert {one.module for one in due("0.3")} == set(deprecating_modules())


def test_a_call_warns_where_it_is_made_and_has_its_result() -> None:
    @deprecated(since="1.4", use="twice")
    def double(number: int, *, plus: int = 0) -> int:
        """Doubles."""
        return 2 * number + plus

    with pytest.warns(DeprecationWarning, match="double is deprecated since") as caught:
        assert double(3, plus=1) == 7
    assert str(caught[0].message).endswith("double is deprecated since 1.4: use twice; it goes away with 1.6.")
    assert caught[0].filename == __file__
    assert double.__doc__ == "Doubles."


def test_a_class_warns_when_it_is_made_and_methods_when_they_are_called() -> None:
    @deprecated(since="0.9", removed_in="0.12", use="New")
    class Old:
        def __init__(self, value: int) -> None:
            self.value = value

    class Kept:
        @deprecated(since="0.9", use="Kept.now")
        def then(self) -> str:
            return "then"

    with pytest.warns(DeprecationWarning, match=r"Old is deprecated since 0\.9: use New; it goes away with 0\.12"):
        assert Old(5).value == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = Kept()
    with pytest.warns(DeprecationWarning, match=r"Kept\.then is deprecated since 0\.9: use Kept\.now"):
        assert kept.then() == "then"
    assert isinstance(Old, type)


@pytest.mark.parametrize("removed_in", ["0.9", "0.10", "0.1"])
def test_a_removal_earlier_than_two_minors_later_is_refused_where_it_is_declared(removed_in: str) -> None:
    with pytest.raises(ValueError, match=rf"f: deprecated since 0\.9, it cannot be removed in {removed_in}: 0\.11"):
        deprecated(since="0.9", removed_in=removed_in, use="g")(_named_f())


def _named_f():  # type: ignore[no-untyped-def]
    def f() -> None: ...

    f.__qualname__ = "f"
    return f


def test_removals_are_those_of_one_package() -> None:
    deprecated(since="0.1", use="g")(_named_f())
    assert any(one.what == "f" for one in removals_due("0.3", __name__))
    assert not any(one.what == "f" for one in removals_due("0.3", "trencadis"))
