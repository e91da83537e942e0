from __future__ import annotations

import gc
import types

import attrs
import pytest

from support.strategies.hostile_policies import OPTIONS, house
from trencadis.clock import SimulatedClock
from trencadis.config.schema import EmbeddingConfig, ModelConfig, NounConfig, SchedulingConfig
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.errors import (
    CapabilityError,
    ConfigValueError,
    ContractError,
    InvalidRequestError,
    PluginError,
    PluginLoadError,
    PromptTooLongError,
)
from trencadis.hookspecs import NOUNS, hookimpl
from trencadis.interfaces import AcceptanceRule, Component, ComponentContext, Sampler
from trencadis.records import EmbeddingRequest, Request, SamplingParams
from trencadis_stages.embedding.engine import EmbeddingEngine
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.fakes import FakeBackend


def test_a_model_that_generates_gets_an_engine_that_embeds_as_well(fake_house) -> None:
    config, registry = fake_house()
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, Engine)
    engine.take(EmbeddingRequest(request_id="a", token_ids=(1, 2)))
    assert [one.request_id for one in engine.step().embeddings] == ["a"]
    engine.close()


def test_an_encoder_gets_an_engine_that_only_embeds(fake_house) -> None:
    config, registry = fake_house(generates=False)
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, EmbeddingEngine)
    assert engine.max_model_len == 256
    assert engine.plan_hash
    engine.close()


def test_what_is_asked_of_a_stage_that_is_not_there_is_not_left_out(
    fake_house, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, registry = fake_house()
    swaps = attrs.evolve(config, engine=attrs.evolve(config.engine, preemption="swap"))
    monkeypatch.setattr(registry, "_stages", {})
    with pytest.raises(PluginError, match="the built-in stages are missing: swap"):
        build_engine(swaps, registry=registry)
    blocks = attrs.evolve(config, plugins=attrs.evolve(config.plugins, blocked=("trencadis:stages",)))
    with pytest.raises(PluginError, match="the built-in stages are missing: an engine would leave out"):
        build_engine(blocks, registry=registry)


def test_a_shorter_limit_holds_for_texts_too(fake_house) -> None:
    config, registry = fake_house(generates=False)
    engine = build_engine(attrs.evolve(config, model=ModelConfig(path="demo", max_model_len=4)), registry=registry)
    with pytest.raises(PromptTooLongError, match="limit is 4"):
        engine.take(EmbeddingRequest(request_id="a", token_ids=[1] * 5))
    engine.close()


def test_an_encoder_is_not_stretched(fake_house) -> None:
    config, registry = fake_house(generates=False)
    longer = attrs.evolve(config, model=ModelConfig(path="demo", max_model_len=257))
    with pytest.raises(ConfigValueError, match="was made for 256 tokens"):
        build_engine(longer, registry=registry)


@pytest.mark.parametrize(("noun", "name"), [("speculation", "Speculator"), ("kv_connector", "ConnectorPair")])
def test_a_component_that_needs_tokens_is_refused_beside_an_encoder(fake_house, noun: str, name: str) -> None:
    config, registry = fake_house(generates=False)
    config = attrs.evolve(config, **{noun: NounConfig(name=f"trencadis.interfaces:{name}")})
    with pytest.raises(ConfigValueError, match=rf"\[{noun}\] name = .*{name}.*: Fake is an encoder"):
        build_engine(config, registry=registry)


def test_the_backend_is_told_how_to_embed(fake_house, monkeypatch) -> None:
    told = []
    load = FakeBackend.load
    monkeypatch.setattr(
        FakeBackend, "load", lambda self, source, *, sampler: told.append(source) or load(self, source, sampler=sampler)
    )
    config, registry = fake_house()
    table = EmbeddingConfig(pooling="mean", normalize=False)
    build_engine(attrs.evolve(config, embedding=table), registry=registry).close()
    assert [(source.pooling, source.normalize_embeddings) for source in told] == [("mean", False)]


def test_a_bucketing_that_does_not_know_unified_shapes_is_an_error_before_the_model_is_loaded(fake_house, monkeypatch):
    config, registry = fake_house(layout="unified")
    monkeypatch.setattr(FakeBackend, "load", None)
    with pytest.raises(CapabilityError, match=r'requires the capability "bucketing\.unified"'):
        build_engine(config, registry=registry)


class _Unsaid(Sampler):
    """Does not state which parameters it honours."""

    def check(self, params):
        """Refuse nothing."""

    def allocate(self, *, num_rows, vocab_size, device):
        """Need nothing."""

    def start_row(self, start):
        """Need nothing."""

    def sample(self, logits, context):
        """Never called: the fake backend chooses by itself."""


class _Picky(_Unsaid):
    """Knows one processor, ``mine``."""

    honours = frozenset()

    def check(self, params):
        if set(params.logits_processors) - {"mine"}:
            raise InvalidRequestError("only mine is enabled.")


def test_processors_that_a_request_names_are_judged_by_the_sampler_before_it_runs(fake_house) -> None:
    config, registry = fake_house()
    config = attrs.evolve(config, sampling=NounConfig(name=f"{__name__}:_Picky"))
    engine = build_engine(config, registry=registry)
    for name in ("mine", "yours"):
        request = Request(request_id=name, prompt_token_ids=(1, 2), params=SamplingParams(logits_processors={name: {}}))
        if name == "mine":
            engine.add(request)
            continue
        with pytest.raises(InvalidRequestError, match="only mine is enabled"):
            engine.add(request)
    engine.close()


class _HonoursNothing(_Unsaid):
    honours = frozenset()


def test_a_sampler_that_honours_nothing_is_asked_for_nothing(fake_house) -> None:
    config, registry = fake_house()
    config = attrs.evolve(config, sampling=NounConfig(name=f"{__name__}:_HonoursNothing"))
    engine = build_engine(config, registry=registry)
    engine.add(Request(request_id="it", prompt_token_ids=(1, 2), params=SamplingParams()))
    with pytest.raises(InvalidRequestError, match=r"top_k = 3: .*_HonoursNothing.* does not honour it") as caught:
        engine.add(Request(request_id="that", prompt_token_ids=(1, 2), params=SamplingParams(top_k=3)))
    assert caught.value.field == "top_k"
    engine.close()


def test_a_sampler_that_does_not_state_what_it_honours_is_refused_before_a_request_is(fake_house) -> None:
    """Else each request with a temperature would be refused, in words that say nothing of the cause."""
    config, registry = fake_house()
    config = attrs.evolve(config, sampling=NounConfig(name=f"{__name__}:_Unsaid"))
    with pytest.raises(ContractError, match=r"_Unsaid.* does not state which parameters of requests it honours"):
        build_engine(config, registry=registry)


class _Breaks(ScriptedSpeculator):
    def __init__(self) -> None:
        super().__init__(lambda tokens: 1 / 0)


class _Steady(ScriptedSpeculator):
    def __init__(self) -> None:
        super().__init__(lambda tokens: [1])


@pytest.mark.parametrize(("fallback", "named"), [(f"{__name__}:_Steady", f"{__name__}:_Steady"), ("", "")])
def test_totals_name_the_speculator_that_drafts_now(fake_house, fallback, named) -> None:
    config, registry = fake_house(speculator=lambda: ScriptedSpeculator(lambda tokens: []))
    broken = f"{__name__}:_Breaks"
    config = attrs.evolve(config, speculation=NounConfig(name=broken, fallback=fallback))
    engine = build_engine(config, registry=registry)
    assert engine.answer("totals", {})["drafter"] == broken
    engine.add(Request(request_id="it", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=6)))
    while engine.has_work:
        engine.step()
    assert engine.answer("totals", {})["drafter"] == named
    engine.close()


class _ReadsDistributions(AcceptanceRule):
    """By import path nothing says beforehand that it does."""

    lossless = True
    needs_distributions = True

    def accept(self, verification):
        """Never called."""


def test_a_rule_that_reads_distributions_is_refused_beside_a_sampler_that_tells_none(fake_house) -> None:
    config, registry = fake_house(speculator=lambda: ScriptedSpeculator(lambda tokens: []))
    config = attrs.evolve(config, acceptance=NounConfig(name=f"{__name__}:_ReadsDistributions"))
    with pytest.raises(
        CapabilityError,
        match=r"_ReadsDistributions needs the distributions .* sampler ArgmaxSampler does not provide them",
    ):
        build_engine(config, registry=registry)


def test_a_component_may_make_another_one_of_what_serves_the_engine_and_find_models(fake_house) -> None:
    contexts: list[ComponentContext] = []

    def make(_: object, context: ComponentContext) -> ServeInOrder:
        contexts.append(context)
        return ServeInOrder()

    component = Component(name="nosy", factory=make, summary="Looks around.", interface_version=1)
    plugin = types.ModuleType("nosy")
    setattr(plugin, NOUNS["scheduling"], hookimpl(specname=NOUNS["scheduling"])(lambda: [component]))
    config, registry = fake_house()
    registry.register(plugin)
    engine = build_engine(attrs.evolve(config, scheduling=SchedulingConfig(name="nosy")), registry=registry)
    first, second = (contexts[0].make("backend", "") for _ in range(2))
    assert isinstance(first, FakeBackend)
    assert first is not second
    assert contexts[0].quarantine_s == config.cache.release_timeout_s == 60.0
    assert contexts[0].named_model("demo-draft").source.path.endswith("draft")
    engine.close()


def test_a_context_of_no_engine_says_so() -> None:
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    with pytest.raises(ContractError, match="'demo-draft'"):
        context.named_model("demo-draft")
    with pytest.raises(ContractError, match="without an engine"):
        context.make("backend", "")


def test_collections_are_as_before_once_an_engine_is_built_or_refused(fake_house) -> None:
    before = gc.get_threshold()
    during = []
    config, registry = fake_house(policy=lambda: during.append(gc.get_threshold()) or ServeInOrder())
    build_engine(config, registry=registry).close()
    assert during[0][0] > before[0]
    assert gc.get_threshold() == before
    with pytest.raises(ConfigValueError):
        build_engine(attrs.evolve(config, model=ModelConfig(path="demo", max_model_len=1 << 30)), registry=registry)
    assert gc.get_threshold() == before


def raising(path: str, **options: object) -> dict[str, object]:
    return {"name": f"support.strategies.hostile_policies:{path}", "options": options}


AT_START = {
    "load": {"backend": raising("RaisingBackend", where="load", **OPTIONS)},
    "allocate": {"backend": raising("RaisingBackend", where="allocate", **OPTIONS)},
    "load by sys.exit": {"backend": raising("ExitingBackend", where="load", **OPTIONS)},
    "buckets": {
        "bucketing": {**raising("RaisingShapes"), "fallback": ""},
        "backend": {"name": "trencadis_testing.fakes:FakeBackend", "options": {**OPTIONS, "layout": "padded"}},
        "engine": {"warmup": True},
    },
    "allocate of a drafter": {"speculation": raising("RaisingDrafter")},
    "register": {"kv_connector": raising("raising_connector", where="register")},
    "on_ready": {"kv_connector": raising("raising_connector", where="on_ready")},
}


@pytest.mark.parametrize("where", AT_START)
def test_what_raises_at_the_start_is_named_with_its_method_and_what_to_do(where: str) -> None:
    tables = {**AT_START[where]}
    noun = next(noun for noun in tables if "hostile" in tables[noun].get("name", ""))  # type: ignore[attr-defined]
    config, registry = house(**tables)
    with pytest.raises(PluginLoadError) as caught:
        build_engine(config, registry=registry)
    error, method = "SystemExit" if "exit" in where else "ValueError", where.split(maxsplit=1)[0]
    said = str(caught.value)
    assert said.startswith(f'{noun} component "{tables[noun]["name"]}" of support.strategies.hostile_policies')
    assert f"raised {error}: a bug in a plugin in {method}()." in said
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize("table", [None, 7, [1, 2], "many"])
def test_a_bucketing_that_lists_no_buckets_is_named(table: object) -> None:
    backend = {"name": "trencadis_testing.fakes:FakeBackend", "options": {**OPTIONS, "layout": "padded"}}
    bucketing = {"name": "support.strategies.hostile_policies:Lists", "options": {"table": table}, "fallback": ""}
    config, registry = house(backend=backend, bucketing=bucketing, engine={"warmup": True})
    with pytest.raises(
        ContractError,
        match=r'^bucketing component "support.strategies.hostile_policies:Lists" .* returned .* from buckets\(\)',
    ):
        build_engine(config, registry=registry)


def test_a_backend_that_says_nothing_of_its_model_is_named() -> None:
    config, registry = house(backend=raising("SilentBackend", **OPTIONS))
    with pytest.raises(
        ContractError,
        match=r'with backend component "support.strategies.hostile_policies:SilentBackend" .* returned None from load',
    ):
        build_engine(config, registry=registry)
