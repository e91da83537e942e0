"""``docs/answers.md``: what answers of components must be, from the laws beside the methods of the contracts."""

from __future__ import annotations

import trencadis.interfaces
import trencadis_kv.interfaces
from docs_pages.markdown import code_spans, heading_note, table
from trencadis.engine.sequences import Claim
from trencadis.engine.stage import Stage
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
    rows = [row for contract in _contracts() for row in _rows(contract)]
    return f"{_HEAD}\n{table(('Method', 'The answer must be'), rows)}"


def _contracts() -> list[type]:
    """Return the contracts of the nouns, and that of stages."""
    packages = (trencadis.interfaces, trencadis_kv.interfaces)
    found = [one for package in packages for _, one in sorted(vars(package).items()) if isinstance(one, type)]
    return [*found, Stage, Claim]


def _rows(contract: type) -> list[tuple[str, str]]:
    return [
        (f"`{contract.__name__}.{name}`", code_spans(rule.law.text))
        for name, rule in rules_of(contract).items()
        if rule.law is not None
    ]
