from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.backends import tiny_models
from support.backends.rank_threads import make_groups
from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis_torch.parallel.plan import expand_plan, plan_of, read_plan_file
from trencadis_torch.parallel.sharding import shard


def on_meta(kind):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_models._config(kind), attn_implementation="eager")


def test_a_plan_names_modules_and_parameters_of_every_layer():
    model = on_meta("mixtral")
    found = expand_plan(model, plan_of(model, {}))
    assert found["lm_head"] == "colwise_gather_output"
    assert [found[f"model.layers.{i}.self_attn.k_proj"] for i in range(3)] == ["colwise"] * 3
    assert found["model.layers.2.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert not any("norm" in name for name in found)


def test_a_configured_style_counts_more_and_replicate_takes_one_away():
    model = on_meta("llama")
    found = expand_plan(model, plan_of(model, {"lm_head": "replicate", "model.layers.1.mlp.up_proj": "colwise_rep"}))
    assert "lm_head" not in found
    assert found["model.layers.1.mlp.up_proj"] == "colwise_gather_output"
    assert found["model.layers.0.mlp.up_proj"] == "colwise"


def test_a_model_without_a_plan_is_refused_with_a_way_out():
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel comes without a plan") as found:
        plan_of(on_meta("gpt2"), {})
    assert "tensor_plan" in found.value.hint


def test_a_style_that_is_not_known_is_refused_by_name():
    model = on_meta("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "sequence_parallel"}
    with pytest.raises(ModelLoadError, match=r'model.layers.0.mlp.up_proj as "sequence_parallel"'):
        expand_plan(model, plan_of(model, {}))


def test_a_configured_name_that_is_not_in_the_model_is_refused():
    (groups, _) = make_groups(2)
    with pytest.raises(ConfigValueError, match=r"no module or parameter model.layers.\*.q_proj"):
        shard(on_meta("llama"), groups.tensor, {"model.layers.*.q_proj": "colwise"})


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_plan_is_read_from_a_file(tmp_path, suffix):
    plan, path = (
        {"h.*.attn.c_attn": "packed_colwise_3", "lm_head": "colwise_gather_output"},
        tmp_path / f"plan.{suffix}",
    )
    text = json.dumps(plan) if suffix == "json" else "".join(f'"{name}" = "{style}"\n' for name, style in plan.items())
    path.write_text(text)
    assert read_plan_file(str(path)) == plan


def test_without_a_file_there_is_no_plan():
    assert read_plan_file("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "cannot be read"), ("[a]\nb = 'colwise'", "no table"), ("a = 'columns'", 'a = "columns": no such style')],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigValueError, match=message):
        read_plan_file(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigValueError, match="cannot be read"):
        read_plan_file(str(tmp_path / "none.toml"))
