from __future__ import annotations

import attrs

from trencadis.config import Config
from trencadis.config.schema import EngineConfig, ModelConfig, ObserverConfig
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.preparation import config_to_serve, model_names_of


@attrs.frozen(kw_only=True)
class Labelled:
    model_name: str = ""


@attrs.frozen(kw_only=True)
class Plain:
    interval_s: float = 1.0


def config(**tables):
    return Config(**tables)


def test_the_engine_gets_a_process_of_its_own_unless_told_otherwise():
    assert config_to_serve(config()).engine.placement == "process"
    assert config_to_serve(config(engine=EngineConfig(placement="thread"))).engine.placement == "thread"
    assert config_to_serve(config(), placement="thread").engine.placement == "thread"


def test_the_observer_of_the_metrics_is_added_once():
    assert config_to_serve(config()).observer.names == ("log", "prometheus")
    named = config(observer=ObserverConfig(names=("prometheus", "log")))
    assert config_to_serve(named).observer.names == ("prometheus", "log")
    assert config_to_serve(config(tables={"server": ServerConfig(observer="")})).observer.names == ("log",)


def test_observers_that_ask_for_the_models_name_are_told_it():
    components = {"a": Labelled(), "b": Labelled(model_name="mine"), "c": Plain(), "pkg:Class": {"model_name": ""}}
    served = config_to_serve(
        config(
            observer=ObserverConfig(names=(), components=components), tables={"server": ServerConfig(model_name="x, y")}
        )
    ).observer.components
    assert served == {**components, "a": Labelled(model_name="x")}


def test_the_model_is_served_under_the_names_given_or_its_path():
    assert model_names_of(config(model=ModelConfig(path="dir/model"))) == ("dir/model",)
    assert model_names_of(config(tables={"server": ServerConfig(model_name=" a, b ,a,")})) == ("a", "b")
