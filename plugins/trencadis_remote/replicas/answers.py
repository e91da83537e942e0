"""Answers of several replicas to one question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trencadis.errors import EngineEndedError, TrencadisError
from trencadis_remote.replicas.pages import merge_pages

__all__ = ["Gathering", "Pages", "gather_answers"]


class Gathering:
    """Waits for some replicas, of which some may end.

    Args:
        asked: Replicas to wait for; with none it is done at once.
        finish: Called once, when each has answered or ended.
    """

    def __init__(self, asked: set[int], finish: Callable[[], None]) -> None:
        self.is_done = False
        self._left = set(asked)
        self._finish = finish
        self.done(-1)

    def done(self, replica: int) -> None:
        """Note that a replica has answered or ended."""
        self._left.discard(replica)
        if not self._left and not self.is_done:
            self.is_done = True
            self._finish()


class Pages:
    """The newest metrics of each replica.

    A replica that has not answered by the next scrape, as it is in a long step, is shown as it was, and holds up no scrape.
    """

    def __init__(self) -> None:
        self._pages: dict[int, str] = {}
        self._awaited: set[int] = set()

    def begin(self, replica: int) -> bool:
        """Note that a replica is asked; False if an answer of it is still awaited."""
        is_new = replica not in self._awaited
        self._awaited.add(replica)
        return is_new

    def put(self, replica: int, page: str) -> None:
        """Keep a replica's answer."""
        self._awaited.discard(replica)
        self._pages[replica] = page

    def drop(self, replica: int) -> None:
        """Forget a replica that has ended."""
        self._awaited.discard(replica)
        self._pages.pop(replica, None)

    def merged(self, own: str) -> str:
        """Return one page of all."""
        return merge_pages(dict(sorted(self._pages.items()))) + own


def gather_answers(
    name: str, answers: Mapping[int, dict[str, Any] | TrencadisError]
) -> dict[str, Any] | TrencadisError:
    """Return what replicas answer together: totals and numbers of requests are sums, a change fails if it fails on one. Pure.

    Args:
        name: Name of the control request.
        answers: By replica.
    """
    ordered = [answers[index] for index in sorted(answers)]
    tables = [answer for answer in ordered if isinstance(answer, dict)]
    errors = [answer for answer in ordered if not isinstance(answer, dict)]
    if not ordered:
        return EngineEndedError(f"{name}: no replica can answer at the moment.")
    if errors and (name != "explain" or not tables):  # one replica at most knows the request that is to be explained
        return errors[0]
    if name == "totals":
        return _sum(tables)
    if name in ("role", "set_role"):
        return {**tables[0], "num_live": sum(table["num_live"] for table in tables)}
    if name == "switched_off":
        return {"components": [row for table in tables for row in table["components"]]}
    if name == "flight_record":
        return {"paths": [path for table in tables for path in table["paths"]]}
    return tables[0]


def _sum(tables: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for key, first in tables[0].items():
        values = [table[key] for table in tables]
        if isinstance(first, dict):
            total[key] = _sum(values)
        elif isinstance(first, int | float) and not isinstance(first, bool):
            total[key] = sum(values)
        else:
            total[key] = first
    return total
