from __future__ import annotations

import pytest

from trencadis.errors import ConfigError, UnknownKeyError
from trencadis.interfaces import Severity
from trencadis_tools.doctor import Findings


def test_findings_keep_their_order_their_section_and_their_remedy(found):
    found.run("first", lambda f: f.ok("good"))
    found.run("second", lambda f: (f.warn("odd", "look"), f.fail("bad", "mend")))
    items = [(item.section, item.severity, item.message, item.remedy) for item in found]
    assert items == [
        ("first", Severity.OK, "good", ""),
        ("second", Severity.WARN, "odd", "look"),
        ("second", Severity.FAIL, "bad", "mend"),
    ]
    assert [found.count(severity) for severity in Severity] == [1, 1, 1]


def test_an_error_of_ours_is_a_finding_with_its_hint_as_remedy(found):
    def check(findings: Findings) -> None:
        raise ConfigError("it is wrong.", hint="Mend it.")

    assert found.run("config", check) is None
    (item,) = found
    assert (item.severity, item.message, item.remedy) == (Severity.FAIL, "it is wrong.", "Mend it.")


def test_an_error_without_a_hint_has_the_remedy_of_its_kind(found):
    found.fail_with(UnknownKeyError("there is no such key."))
    (item,) = found
    assert item.remedy.startswith("Use the suggested name, or a name that ``trencadis config --explain`` prints")


@pytest.mark.parametrize("error", [ValueError("no\n  such thing"), SystemExit(3), ImportError("gone")])
def test_whatever_a_check_raises_is_a_finding_on_one_line(found, error):
    def check(findings: Findings) -> int:
        findings.ok("so far")
        raise error

    assert found.run("odd", check, otherwise=7) == 7
    first, second = found
    assert first.message == "so far"
    assert type(error).__name__ in second.message
    assert "\n" not in second.message
    assert second.remedy


def test_a_check_returns_what_it_found_out(found):
    assert found.run("sum", lambda _, a, b: a + b, 2, 3) == 5


def test_a_check_within_a_check_goes_back_to_the_section_of_the_outer_one(found):
    def outer(findings: Findings) -> None:
        findings.run("inner", lambda f: f.ok("1"))
        findings.ok("2")

    found.run("outer", outer)
    assert [item.section for item in found] == ["inner", "outer"]
