"""Who stands beside the engine that ``kv_itl.py`` measures: engines, one that holds a prefix, and processes to compare loads with."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from typing import Any

import numpy as np

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams

__all__ = ["Control", "Producer", "engine_of", "serve"]

PIECE_BYTES = 1 << 20
CACHED_BYTES = 16 << 10


def engine_of(args: argparse.Namespace, model: str, connector: str, own: dict[str, Any]) -> Any:
    """Return an engine with a connector and settings of its table."""
    tables = {
        "observer": {"names": []},
        "cache": {"num_blocks": args.blocks},
        "kv_connector": {"name": connector, connector: own},
    }
    if connector == "p2p":
        own |= {"secret": "known to both engines", "peers": ["127.0.0.1:*"]}
    if connector == "none":
        del tables["kv_connector"]["none"]
    config, registry = configure(model, config_file=None, tables=tables)
    return build_engine(config, registry=registry)


def serve(engine: Any, prompt: tuple[int, ...], **more: Any) -> Any:
    """Serve a prompt; returns how it finished."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = Request(request_id=str(random.random()), prompt_token_ids=prompt, params=params, **more)
    engine.add(request)
    finished: list[Any] = []
    while not finished:
        finished += engine.step().finished
    while engine.has_work and "transfer_params" not in more:  # which holds blocks: there is work until they are pulled
        engine.step()
    return finished[0]


class Producer:
    """An engine in another process that holds a prefix for whoever pulls it."""

    def __init__(self, args: argparse.Namespace, model: str, prefix: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=produce, args=(args, model, prefix, theirs), daemon=True)
        self._process.start()

    def hold(self, number: int) -> list[dict[str, Any]]:
        """Return what names the prefix, for so many pulls: each gives its hold back."""
        self._ours.send(number)
        held: list[dict[str, Any]] = self._ours.recv()
        return held

    def close(self) -> None:
        self._ours.send(0)
        self._process.join()


def produce(args: argparse.Namespace, model: str, prefix: tuple[int, ...], pipe: Any) -> None:
    """Hold the prefix as often as the pipe asks for."""
    engine = engine_of(args, model, "p2p", {"lease_s": 50.0, "max_held_bytes": 1 << 40})
    serve(engine, (*prefix, 9))  # computed once, held often
    try:
        while True:
            while not pipe.poll(0.1):  # what was given back is let go in a step
                if engine.has_work:
                    engine.step()
            if not (number := pipe.recv()):
                break
            asked = {"do_remote_decode": True}
            pipe.send([dict(serve(engine, (*prefix, 9), transfer_params=asked).transfer_params) for _ in range(number)])
    finally:
        engine.close()


class Control:
    """A process beside the engine that does no more than what a load cannot do without, over as long a time.

    Args:
        num_bytes: Of a load.
        seconds: That a load takes.
    """

    def __init__(self, num_bytes: int, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=control, args=(num_bytes, seconds, theirs), daemon=True)
        self._process.start()

    def begin(self, kind: str) -> None:
        """``copied``: copy; ``worked``: compute for as long as that takes, within the caches. Returns at once."""
        self._pipe.send(kind)

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def control(num_bytes: int, seconds: float, pipe: Any) -> None:
    """Do what the pipe asks for, a piece at once."""
    source, target = (np.ones((num_bytes // PIECE_BYTES, PIECE_BYTES), np.uint8) for _ in range(2))
    while True:
        kind, until_s = pipe.recv(), time.monotonic()
        if kind not in ("worked", "copied"):
            continue
        for index in range(len(source)):
            if kind == "copied":
                target[index] = source[index]
            else:
                for _ in range(PIECE_BYTES // CACHED_BYTES):
                    target[0, :CACHED_BYTES] = source[0, :CACHED_BYTES]
            until_s += seconds / len(source)
            time.sleep(max(0.0, until_s - time.monotonic()))
