"""Whose long work comes when, told by a script: each piece moves the clock as far as it is said to take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.failure_costs import FailureCosts
from trencadis_server.errors import ApiError, TooBusyError
from trencadis_server.fair_threads import FairThreads

LONG = 10**6


class Script:
    """Work on one thread, whose first piece lasts until all others wait."""

    def __init__(self, **options: Any) -> None:
        self.clock = SimulatedClock()
        self.threads = FairThreads(1, clock=self.clock, **options)
        self.order: list[str] = []
        self._all_wait = threading.Event()

    def work(self, name: str, seconds: float) -> Callable[[], str]:
        def call() -> str:
            self._all_wait.wait(10)
            self.clock.advance(seconds)
            self.order.append(name)
            return name

        return call

    async def play(self, *works: tuple[str, str, float, int]) -> None:
        """Run works, each with its name, caller, seconds and characters; the first is at it when the others come."""
        tasks = [
            asyncio.create_task(self.threads.run(self.work(name, seconds), num_characters=size, caller=caller))
            for name, caller, seconds, size in works
        ]
        await asyncio.sleep(0)
        self._all_wait.set()
        assert await asyncio.gather(*tasks) == [name for name, *_ in works]


def played(*works: tuple[str, str, float, int]) -> list[str]:
    async def main() -> list[str]:
        script = Script()
        await script.play(*works)
        return script.order

    return asyncio.run(main())


def test_a_short_text_is_worked_on_at_once_and_a_long_one_on_a_thread() -> None:
    async def main() -> tuple[int, int]:
        threads = FairThreads()
        short = await threads.run(threading.get_ident, num_characters=10)
        return short, await threads.run(threading.get_ident, num_characters=LONG)

    short, long = asyncio.run(main())
    assert short == threading.get_ident()
    assert long != threading.get_ident()


def test_the_caller_of_one_text_waits_for_no_more_than_the_piece_that_runs() -> None:
    flood = [(f"flood {n}", "a", 8.0, LONG) for n in range(4)]
    order = played(*flood, ("mine", "b", 0.1, 30_000))
    assert order.index("mine") == 1


def test_callers_get_equal_times_and_not_equal_numbers() -> None:
    long = [(f"long {n}", "a", 4.0, LONG) for n in range(4)]
    short = [(f"short {n}", "b", 1.0, LONG) for n in range(8)]
    assert [name.split()[0] for name in played(*long, *short)] == [
        *["long", *["short"] * 4] * 2,
        *["long"] * 2,
    ]


def test_of_one_callers_texts_the_shortest_comes_first() -> None:
    works = [("first", "", 1.0, LONG), *((f"{size}", "", 1.0, size) for size in (9_000, 5_000, 7_000))]
    assert played(*works) == ["first", "5000", "7000", "9000"]


def test_a_caller_that_was_away_has_saved_nothing_up() -> None:
    async def main() -> list[str]:
        script = Script()
        flood = asyncio.create_task(script.play(*((f"a {n}", "a", 9.0, LONG) for n in range(4))))
        for _ in range(2):  # until its work waits
            await asyncio.sleep(0)
        await script.threads.run(script.work("b", 1.0), num_characters=LONG, caller="b")
        await script.threads.run_all([(script.work(f"b {n}", 5.0), LONG) for n in range(4)], caller="b")
        await flood
        return script.order

    # Back again it begins at the 9 s of the other, which then has 18: it is served until it has more.
    assert asyncio.run(main()) == ["a 0", "b", "a 1", "b 0", "b 1", "a 2", "b 2", "b 3", "a 3"]


def test_pieces_of_one_request_let_others_between_them() -> None:
    async def main() -> list[str]:
        script = Script()
        pieces = [(script.work(f"piece {n}", 1.0), LONG) for n in range(3)]
        flood = asyncio.create_task(script.threads.run_all(pieces, caller="a"))
        await asyncio.sleep(0)
        await script.play(("mine", "b", 1.0, LONG))
        assert await flood == ["piece 0", "piece 1", "piece 2"]
        return script.order

    assert asyncio.run(main()) == ["piece 0", "mine", "piece 1", "piece 2"]


def test_a_request_that_ended_while_it_waited_is_not_worked_on() -> None:
    async def main() -> list[str]:
        script = Script()
        first = asyncio.create_task(script.threads.run(script.work("first", 1.0), num_characters=LONG))
        gone = asyncio.create_task(script.threads.run(script.work("gone", 1.0), num_characters=LONG))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        await script.play(("last", "", 1.0, LONG))
        await first
        return script.order

    assert asyncio.run(main()) == ["first", "last"]


def test_a_request_that_ended_while_it_ran_keeps_its_thread_until_the_work_is_done() -> None:
    """Else clients that leave at once would have any number of threads."""

    async def main() -> list[str]:
        script = Script()
        gone = asyncio.create_task(script.threads.run(script.work("gone", 1.0), num_characters=LONG))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert script.threads._running.total() == 1
        await script.play(("last", "", 1.0, LONG))
        return script.order

    assert asyncio.run(main()) == ["gone", "last"]


def refuse(clock: SimulatedClock, seconds: float) -> Callable[[], None]:
    def call() -> None:
        clock.advance(seconds)
        raise ApiError(400, "too long")

    return call


def test_what_refused_work_took_counts_against_its_caller_alone() -> None:
    async def main() -> None:
        clock = SimulatedClock()
        threads = FairThreads(clock=clock, costs=FailureCosts(clock))
        for _ in range(2):
            pieces = [(lambda: clock.advance(3.0), LONG), (refuse(clock, 3.0), LONG)]
            with pytest.raises(ApiError):
                await threads.run_all(pieces, caller="a")
        with pytest.raises(TooBusyError, match="Long requests of the API key 'a' were refused too often") as caught:
            await threads.run(lambda: None, num_characters=LONG, caller="a")
        assert caught.value.retry_after_s == pytest.approx(34, abs=8)  # 2 s above ten, forgotten at 0.05 s a second
        await threads.run(lambda: None, num_characters=10, caller="a")  # short ones cost no thread
        await threads.run(lambda: None, num_characters=LONG, caller="b")
        clock.advance(caught.value.retry_after_s)
        await threads.run(lambda: None, num_characters=LONG, caller="a")

    asyncio.run(main())


def test_without_a_key_refused_work_locks_out_no_other_client() -> None:
    async def main() -> None:
        clock = SimulatedClock()
        threads = FairThreads(clock=clock, costs=FailureCosts(clock))
        for _ in range(20):
            with pytest.raises(ApiError):
                await threads.run(refuse(clock, 3.0), num_characters=LONG)

    asyncio.run(main())
