from __future__ import annotations

import asyncio
import threading

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, EngineEndedError, ModelLoadError
from trencadis_server.errors import EngineUnavailableError
from trencadis_server.lifecycle.supervisor import Supervisor


class FakeLLM:
    """As much of an engine as the supervisor looks at."""

    def __init__(self) -> None:
        self.is_alive = True
        self.failure = ""
        self.is_closed = False

    def die(self, failure: str = "killed by SIGKILL") -> None:
        self.is_alive, self.failure = False, failure

    async def close(self) -> None:
        self.is_alive, self.is_closed = False, True


class Garage:
    """Opens engines; ``faults`` has what the next openings raise, or None."""

    def __init__(self, *faults: Exception | None) -> None:
        self.faults = list(faults)
        self.opened: list[FakeLLM] = []

    def __call__(self) -> FakeLLM:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        self.opened.append(FakeLLM())
        return self.opened[-1]


def run(use, garage, **arguments):
    async def main():
        supervisor = Supervisor(garage, **{"max_restarts": 2, "watch_s": 0.001, "backoff_s": 0.0, **arguments})
        task = asyncio.create_task(supervisor.run())
        try:
            return await asyncio.wait_for(use(supervisor, task), 20)
        finally:
            await supervisor.close()
            await asyncio.wait({task}, timeout=20)
            assert task.done()

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def state_of(supervisor):
    with pytest.raises(EngineUnavailableError) as absent:
        _ = supervisor.llm
    return absent.value


def test_the_event_loop_goes_on_while_the_engine_loads_and_each_request_gets_an_error_of_its_own():
    go_on, garage = threading.Event(), Garage()

    def slow():
        go_on.wait(20)
        return garage()

    async def use(supervisor, task):
        for _ in range(5):
            await asyncio.sleep(0)
            absent = state_of(supervisor)
            assert (absent.state, absent.retry_after_s) == ("loading", 5.0)
            assert absent is not state_of(supervisor)
        go_on.set()
        await supervisor.is_serving.wait()
        assert supervisor.llm is garage.opened[0]

    run(use, slow)


def test_an_engine_that_cannot_be_opened_at_first_ends_the_run():
    async def use(supervisor, task):
        with pytest.raises(ModelLoadError, match="no weights"):
            await task

    run(use, Garage(ModelLoadError("no weights")))


def test_an_engine_that_dies_is_replaced_and_counted():
    garage, restarts, opened = Garage(), [], []

    async def use(supervisor, task):
        await supervisor.is_serving.wait()
        first = supervisor.llm
        first.die()
        absent = state_of(supervisor)  # at once, before anybody has looked
        assert absent.state == "restarting"
        assert "killed by SIGKILL" in str(absent)
        assert absent.retry_after_s is not None
        await until(lambda: len(garage.opened) == 2)
        await supervisor.is_serving.wait()
        assert supervisor.llm is garage.opened[1]
        assert first.is_closed
        assert (supervisor.num_restarts, len(restarts), opened) == (1, 1, garage.opened)

    run(use, garage, on_restart=lambda: restarts.append(1), on_open=opened.append)


async def die_again(supervisor, garage, failure="killed by SIGKILL"):
    """Wait for the newest engine and let it die."""
    await supervisor.is_serving.wait()
    supervisor.llm.die(failure)
    supervisor.is_serving.clear()


def test_after_too_many_ends_the_run_ends_and_says_why():
    garage = Garage()

    async def use(supervisor, task):
        for number in range(3):
            await die_again(supervisor, garage, f"death {number}")
        absent = state_of(supervisor)  # also before anybody has looked
        with pytest.raises(EngineUnavailableError) as ended:
            await task
        for error in (absent, state_of(supervisor), ended.value):
            assert (error.state, error.retry_after_s, error.exit_code) == ("failed", None, 69)
            assert "server.max_engine_restarts = 2 within server.restart_window_s = 600" in str(error)
            assert "death 2" in str(error)
        assert len(garage.opened) == 3
        assert all(engine.is_closed for engine in garage.opened)

    run(use, garage)


def test_ends_that_are_far_apart_never_use_the_restarts_up():
    clock, garage = SimulatedClock(), Garage()

    async def use(supervisor, task):
        for _ in range(50):
            await supervisor.is_serving.wait()
            clock.advance(61.0)
            await die_again(supervisor, garage)
        await supervisor.is_serving.wait()
        assert supervisor.num_restarts == 50

    run(use, garage, clock=clock, window_s=60.0, max_restarts=1)


def test_time_that_engines_take_to_load_forgives_nothing():
    """Each loads for an hour and dies at once."""
    clock, garage = SimulatedClock(), Garage()

    def slow():
        clock.advance(3600.0)
        return garage()

    async def use(supervisor, task):
        for _ in range(3):
            await die_again(supervisor, garage)
        with pytest.raises(EngineEndedError):
            await task

    run(use, slow, clock=clock, window_s=60.0)


def test_the_pause_grows_with_recent_ends_only():
    clock, garage = SimulatedClock(), Garage()

    async def use(supervisor, task):
        pauses = []

        async def wait(seconds):
            if seconds != supervisor._watch_s:
                pauses.append(seconds)
            await asyncio.sleep(0)

        supervisor._wait = wait
        await supervisor.is_serving.wait()
        for served_s in (0, 1, 1, 100, 1, 30, 31):
            clock.advance(served_s)
            await die_again(supervisor, garage)
            await until(supervisor.is_serving.is_set)
        assert pauses == [1.0, 2.0, 1.0, 2.0, 1.0]  # none where an end counts alone
        assert supervisor._pause_s(50) == 30.0

    run(use, garage, clock=clock, window_s=60.0, max_restarts=10, backoff_s=1.0)


@pytest.mark.parametrize("fault", [ModelLoadError("busy device"), OSError(11, "no process to be had")])
def test_a_replacement_that_cannot_be_opened_is_tried_again(fault):
    garage = Garage(None, fault)

    async def use(supervisor, task):
        await supervisor.is_serving.wait()
        supervisor.llm.die()
        await until(lambda: len(garage.opened) == 2)
        assert supervisor.num_restarts == 2

    run(use, garage)


def test_a_configuration_that_went_wrong_is_not_tried_again_and_ends_the_run():
    garage = Garage(None, ConfigError("the file has gone"))

    async def use(supervisor, task):
        await supervisor.is_serving.wait()
        supervisor.llm.die()
        with pytest.raises(ConfigError, match="the file has gone"):
            await task
        assert state_of(supervisor).state == "failed"
        assert "the file has gone" in str(state_of(supervisor))
        assert len(garage.opened) == 1

    run(use, garage, max_restarts=5)


def test_closing_ends_the_engine_and_the_run():
    garage = Garage()

    async def use(supervisor, task):
        await supervisor.is_serving.wait()
        await supervisor.close()
        await supervisor.close()
        await task
        assert garage.opened[0].is_closed
        assert state_of(supervisor).state == "closed"

    run(use, garage)


def test_an_engine_that_is_ready_after_the_end_is_closed():
    go_on, garage = threading.Event(), Garage()

    def slow():
        go_on.wait(20)
        return garage()

    async def use(supervisor, task):
        await asyncio.sleep(0)
        await supervisor.close()
        go_on.set()
        await task
        assert garage.opened[0].is_closed

    run(use, slow)
