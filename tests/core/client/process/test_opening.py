from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import attrs
import pytest

from trencadis.client.engine_thread import EngineThread
from trencadis.client.local_engine import LocalEngineClient
from trencadis.client.process import open_placed_frontend, open_runner
from trencadis.client.process.client import RemoteEngineClient
from trencadis.config import Config
from trencadis.registry import Registry

House = Callable[..., tuple[Config, Registry]]


@pytest.mark.parametrize("placement", ["auto", "thread"])
def test_auto_and_thread_are_this_process(fake_house: House, placement: str) -> None:
    config, registry = fake_house()
    config = attrs.evolve(config, engine=attrs.evolve(config.engine, placement=placement))
    frontend = open_placed_frontend(config, registry)
    assert isinstance(frontend.engine, LocalEngineClient)
    frontend.close()


def test_process_is_another(process_house: House) -> None:
    frontend = open_placed_frontend(*process_house())
    assert isinstance(frontend.engine, RemoteEngineClient)
    frontend.close()


def test_coroutines_are_served_by_a_thread_here_and_by_their_loop_for_another_process(
    fake_house: House, process_house: House
) -> None:
    here, there = open_runner(*fake_house()), open_runner(*process_house())
    assert isinstance(here, EngineThread)
    assert isinstance(there.frontend.engine, RemoteEngineClient)
    here.close()
    there.close()
    assert (here.is_alive, there.is_alive) == (False, False)


def test_what_only_another_process_needs_is_not_imported_for_this_one() -> None:
    code = "import sys, trencadis.client.llm, trencadis.client.async_llm; print('zmq' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
