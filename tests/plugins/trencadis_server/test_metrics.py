from __future__ import annotations

import types

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server.server_doubles import OneEngine, app_with, ask, make_context
from trencadis.errors import BackendError, EngineEndedError
from trencadis_server.app import make_app
from trencadis_server.routes.metrics import CONTENT_TYPE


def engine(answer):
    async def metrics(timeout_s):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return OneEngine(types.SimpleNamespace(metrics=metrics, stalled=""))


def samples_of(text):
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("text", ["trencadis_steps_total 5.0\n", "trencadis_steps_total 5.0"])
def test_the_engines_metrics_and_the_servers_own_are_one_exposition(text):
    (answer,) = ask(app_with(engines=engine(text)), ("GET", "/metrics"))
    assert answer.headers["content-type"] == CONTENT_TYPE
    samples = samples_of(answer.text)
    assert samples["trencadis_steps_total"] == 5
    assert samples["trencadis_engine_up"] == 1
    assert samples["process_cpu_seconds_total"] > 0


@pytest.mark.parametrize(
    ("error", "up"), [(EngineEndedError("killed"), 0), (BackendError("did not answer within 2 s"), 1)]
)
def test_without_the_engine_the_servers_own_remain(error, up):
    (answer,) = ask(app_with(engines=engine(error)), ("GET", "/metrics"))
    assert answer.status_code == 200
    assert samples_of(answer.text)["trencadis_engine_up"] == up


def test_an_engine_that_loads_or_is_stalled_is_not_asked_and_counts_as_down():
    def never(**_):
        raise AssertionError("it would not answer")

    stalled = types.SimpleNamespace(metrics=never, stalled="stalled: step 3 for 31 s in backend.forward")
    for engines in (OneEngine(stalled), None):
        (answer,) = ask(app_with(engines=engines), ("GET", "/metrics"))
        assert samples_of(answer.text)["trencadis_engine_up"] == 0


def test_what_admission_holds_is_shown():
    context = make_context(engine(""))
    app = make_app(context, routers=())
    with context.admission.hold(7, 2):
        (answer,) = ask(app, ("GET", "/metrics"))
    samples = samples_of(answer.text)
    assert (samples["trencadis_admitted_requests"], samples["trencadis_admitted_waiting_tokens"]) == (2, 7)
