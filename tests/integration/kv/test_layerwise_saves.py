"""Blocks that are copied out while the next step is computed: the store holds what it holds when they are copied before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from support.core.invariants import broken_invariants
from trencadis.client.factory import configure
from trencadis.clock import SimulatedClock
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_kv.store.layer_copy import LayerCopy
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import StoreConnector, store_connector
from trencadis_kv.store.store_worker import StoreWorker
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.kv_faults import DictStore

_PATIENCE_S = 60.0
_MAX_STEPS = 600


def shelf(objects: dict[str, bytes], **config: Any) -> StoreConnector:
    """Return a connector over a dictionary, which never runs out of time or room."""
    chosen = StoreSettings(**{"lookup_timeout_s": 60.0, **config})
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    return store_connector(lambda: DictStore(objects), chosen, context, name="shelf")


def requests(seed: int, number: int) -> list[tuple[int, Request]]:
    """Return requests with the steps before which they come: some share a beginning, all are too many for the cache."""
    noise = random.Random(seed)
    beginnings = [tuple(noise.randrange(1, 90) for _ in range(noise.randrange(4, 20))) for _ in range(3)]
    found = []
    for i in range(number):
        tail = tuple(noise.randrange(1, 90) for _ in range(noise.randrange(1, 24)))
        params = SamplingParams(max_tokens=noise.randrange(1, 16), ignore_eos=True)
        request = Request(request_id=f"r{i}", prompt_token_ids=noise.choice([(), *beginnings]) + tail, params=params)
        found.append((noise.randrange(2 * number), request))
    return found


class Run:
    """A workload on fake devices, served to its end.

    Attributes:
        objects: What is stored then.
        num_by_layer: Steps in which layers were copied one by one.
        num_unasked: Blocks dropped because a step did not ask for their layers.
        num_failed_steps: Of the engine.
    """

    def __init__(
        self,
        seed: int,
        *,
        layout: str = "ragged",
        preemption: str = "recompute",
        fails: Callable[[Any, Any], None] | None = None,
        **config: Any,
    ) -> None:
        self.objects: dict[str, bytes] = {}
        pair = shelf(self.objects, **config)
        batch_size = 2 if layout == "padded" else 0
        backend = FakeBackend(eos=-1, layout=layout, max_prefill_batch_size=batch_size, fails=fails)
        engine = make_engine(
            connector=pair,
            backend=backend,
            num_blocks=16,
            prefix_caching=False,
            preemption=preemption,
            max_num_batched_tokens=24,
            max_num_seqs=4,
        )
        self.num_by_layer = self.num_preemptions = 0
        todo, ends, worker = requests(seed, 10), {}, pair.worker
        assert isinstance(worker, StoreWorker)
        for step in range(_MAX_STEPS):
            for _, request in (one for one in todo if one[0] == step):
                engine.add(request)
            ends |= {end.request_id: end for end in engine.step().finished}
            self.num_by_layer += self._count(worker)
            assert worker.wait_idle(_PATIENCE_S)  # what is saved by when does not depend on threads
            assert broken_invariants(engine) == []
            if step > 20 and not engine.has_work:
                break
        self.num_preemptions = sum(end.num_preemptions for end in ends.values())
        for _, request in todo:
            text = fake_text(list(request.prompt_token_ids), request.params.max_tokens, eos=-1)
            assert ends[request.request_id].token_ids.tolist() == text
        engine.close()
        self.num_failed_steps = engine.totals.num_failed_steps
        dropped = worker._parts.counters
        self.num_unasked = dropped.value("dropped_saves_total", reason="unasked")

    def _count(self, worker: StoreWorker) -> int:
        count, worker.__dict__["num_waits"] = worker.__dict__.get("num_waits", 0), 0
        return int(count > 0)


@pytest.fixture
def _nobody_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never comes to copying ahead of the step: each layer is copied at the last moment."""
    monkeypatch.setattr(LayerCopy, "run", lambda self, client: None)


@pytest.fixture
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_layer = StoreWorker.wait_layer

    def counted(self: StoreWorker, layer: int, *, budget_s: float) -> bool:
        self.__dict__["num_waits"] = self.__dict__.get("num_waits", 0) + 1
        return wait_layer(self, layer, budget_s=budget_s)

    monkeypatch.setattr(StoreWorker, "wait_layer", counted)


@pytest.mark.slow
@pytest.mark.usefixtures("_counted", "_nobody_ahead")
@pytest.mark.representatives(2)
@pytest.mark.parametrize("seed", range(16))
def test_store_holds_the_same_bytes_when_each_layer_is_copied_at_the_last_moment(seed: int) -> None:
    options: dict[str, Any] = {"layout": ("ragged", "padded")[seed % 2], "preemption": ("recompute", "swap")[seed // 8]}
    whole = Run(seed, loads=False, **options)
    layered = Run(seed, loads=False, layerwise_saves=True, **options)
    assert layered.objects == whole.objects
    assert (whole.num_by_layer, layered.num_unasked) == (0, 0)
    assert layered.num_by_layer > 5
    assert layered.num_preemptions > 0 or options["layout"] == "padded"


@pytest.mark.usefixtures("_nobody_ahead")
def test_step_that_fails_before_its_layers_costs_what_it_was_to_save() -> None:
    has_failed = False

    def fails(batch: Any, one: Any) -> None:
        nonlocal has_failed
        if batch.connector_message and not has_failed:  # loads are off: it asks for saves
            has_failed = True
            raise RuntimeError("a kernel gave up")

    whole = Run(0, loads=False)
    run = Run(0, loads=False, layerwise_saves=True, fails=fails)
    assert run.num_failed_steps == 1
    assert run.num_unasked > 0
    assert run.objects.items() <= whole.objects.items()


# ------------------------------------------------------------------------------------------------ a real model

PROMPTS = [tuple(5 + (i * 37 + i * i % 11 + 13 * n) % 200 for i in range(40 + 23 * n)) for n in range(6)]


def stored_of_demo(layout: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[dict[str, bytes], int]:
    """Return what an engine on the demo model has stored after prompts that take each other's blocks, and layers waited for."""
    objects: dict[str, bytes] = {}
    num_waits = 0
    wait_layer = StoreWorker.wait_layer

    def counted(self: StoreWorker, layer: int, *, budget_s: float) -> bool:
        nonlocal num_waits
        num_waits += 1
        return wait_layer(self, layer, budget_s=budget_s)

    monkeypatch.setattr("trencadis_kv.connectors.host_offload.connector.HostStore", lambda memory: DictStore(objects))
    monkeypatch.setattr(StoreWorker, "wait_layer", counted)
    tables = {
        "observer": {"names": []},
        "backend": {"name": "torch", "torch": {"layout": layout}},
        "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 2, "warmup": False},
        "cache": {"num_blocks": 14, "prefix_caching": False},
        "model": {"max_model_len": 208},
        "kv_connector": {"name": "host_offload", "host_offload": {"loads": False, **config}},
    }
    made, registry = configure("demo", config_file=None, tables=tables)
    engine = build_engine(made, registry=registry)
    assert isinstance(engine, Engine)
    for n, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=f"r{n}", prompt_token_ids=prompt, params=params))
    num_ended = 0
    while num_ended < len(PROMPTS):
        num_ended += len(engine.step().finished)
    engine.step()
    engine.close()
    return objects, num_waits


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_demo_models_blocks_are_the_same_bytes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, no_waits = stored_of_demo(layout, monkeypatch)
    layered, num_waits = stored_of_demo(layout, monkeypatch, layerwise_saves=True)
    assert layered == whole
    assert len(whole) >= sum(len(prompt) // 16 for prompt in PROMPTS)
    assert no_waits == 0
    assert num_waits > 10
