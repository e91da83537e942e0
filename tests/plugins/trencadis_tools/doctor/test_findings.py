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


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        (ConfigError("it is wrong.", hint="Mend it."), "it is wrong.", "Mend it."),
        (UnknownKeyError("no such key."), "no such key.", "Use the suggested name, or a name that ``trencadis config"),
        (ValueError("no\n  such thing"), "the check of this section raised ValueError: no such thing", ""),
        (SystemExit(3), "the check of this section raised SystemExit: 3", ""),
        (ImportError("gone"), "the check of this section raised ImportError: gone", ""),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.representatives(5)
def test_whatever_a_check_raises_is_a_finding_on_one_line_with_a_remedy(found, error, message, remedy):
    def check(findings: Findings) -> int:
        findings.ok("so far")
        raise error

    assert found.run("odd", check, otherwise=7) == 7
    first, second = found
    assert (first.message, second.severity, second.message) == ("so far", Severity.FAIL, message)
    assert second.remedy
    assert second.remedy.startswith(remedy)


def test_a_check_returns_what_it_found_out_and_goes_back_to_the_section_of_an_outer_one(found):
    assert found.run("sum", lambda _, a, b: a + b, 2, 3) == 5

    def outer(findings: Findings) -> None:
        findings.run("inner", lambda f: f.ok("1"))
        findings.ok("2")

    found.run("outer", outer)
    assert [item.section for item in found] == ["inner", "outer"]
