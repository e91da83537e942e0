"""``docs/answers.md``: what answers of components must be, from the laws beside the methods of the contracts."""

from __future__ import annotations

from types import ModuleType

import trencadis.interfaces
import trencadis_kv.interfaces
from docs_pages.markdown import code_spans, heading_note, table
from trencadis.interfaces import rules_of

__all__ = ["answers_page"]

_HEAD = f"""# Answers of components

{heading_note("the contracts in trencadis.interfaces")}

An answer that breaks its rule is treated like an exception: a fallback takes the component's place, or, without one, the step fails and names it.
What a KV connector or an observer answers is left out instead. The conformance suites check the same rules.
Methods are looked up once, when a component takes its place; those that it leaves at the default of the contract are called without measure and check.
"""


def answers_page() -> str:
    """Return the page."""
    rows = [row for package in (trencadis.interfaces, trencadis_kv.interfaces) for row in _rows(package)]
    return f"{_HEAD}\n{table(('Method', 'The answer must be'), rows)}"


def _rows(package: ModuleType) -> list[tuple[str, str]]:
    contracts = [found for _, found in sorted(vars(package).items()) if isinstance(found, type)]
    return [
        (f"`{contract.__name__}.{name}`", code_spans(rule.law.text))
        for contract in contracts
        for name, rule in rules_of(contract).items()
        if rule.law is not None
    ]
