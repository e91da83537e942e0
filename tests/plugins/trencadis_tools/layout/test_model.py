"""What is read of a model, next to what the backend torch makes of it."""

from __future__ import annotations

import functools
import json

import pytest

from support.backends import tiny_encoders
from support.backends.families import SERVED, save_family
from support.backends.mixtures import OwnBlocksDriver
from support.backends.rank_threads import RankedBackend, ThreadCollective, make_groups
from trencadis.clock import SystemClock
from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis.interfaces import AllocationPlan
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver, Work
from trencadis_tools.layout.layouts import expert_obstacle, local_bytes, tensor_obstacle, traffic
from trencadis_tools.layout.model import read_model, read_plan_file
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.loader import find_model
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.parallel.placement import ExpertPlacement
from trencadis_torch.parallel.sharding import shard

PLAN = AllocationPlan(num_blocks=60, block_size=4, num_rows=4, max_model_len=120, max_num_batched_tokens=64)
UNKNOWN = {"ctrl", "jetmoe"}
"""Their attention has projections of names of their own."""
KNOWN = [kind for kind in SERVED if kind not in UNKNOWN]


def shared_bytes(path, size, *, whole_experts):
    """Return the bytes of the first rank's share as the backend divides it, or the error with which it refuses."""
    model = skeleton(find_model(ModelSource(path=str(path))))
    try:
        shard(
            model, make_groups(size)[0].tensor, {}, experts=ExpertPlacement(num_ranks=size) if whole_experts else None
        )
    except ModelLoadError as error:
        return error
    return sum(one.numel() for one in {id(one): one for one in model.parameters()}.values()) * 4


@pytest.mark.representatives(6)
@pytest.mark.parametrize("kind", KNOWN)
def test_the_backend_accepts_and_refuses_the_same_sizes_and_holds_as_many_bytes(tmp_path, kind):
    path = save_family(kind, tmp_path)
    plan = read_model(str(path), dtype="float32")
    for size, expert in ((2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 3), (4, 4)):
        found = shared_bytes(path, size, whole_experts=expert > 1)
        why = tensor_obstacle(plan, size, expert=expert) or expert_obstacle(plan, expert)
        assert isinstance(found, ModelLoadError) == bool(why), (size, expert, found, why)
        if not why:
            assert found == sum(local_bytes(one, size, expert) for one in plan.weights), (size, expert)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("kind", KNOWN)
def test_one_rank_keeps_as_much_of_each_token_as_the_backend_says(tmp_path, kind):
    path = save_family(kind, tmp_path)
    plan = read_model(str(path), dtype="float32")
    backend = TorchBackend(TorchConfig(device="cpu", pack="off"), clock=SystemClock())
    facts = backend.load(ModelSource(path=str(path), dtype="float32"), sampler=ArgmaxSampler())
    assert facts.kv_bytes_per_token == sum(one.local_kv_heads(1) * one.head_bytes for one in plan.attentions)
    assert facts.weights_bytes == sum(local_bytes(one, 1) for one in plan.weights)
    assert (facts.vocab_size, facts.architecture) == (plan.vocab_size, plan.architecture)


class Counting(ThreadCollective):
    """Counts what a rank hands over."""

    def _count(self, num_bytes):
        num_before, calls_before = getattr(self, "sent", (0, 0))
        self.sent = num_before + num_bytes, calls_before + 1

    def all_reduce(self, tensor):
        self._count(tensor.nbytes)
        super().all_reduce(tensor)

    def all_gather(self, tensor):
        found = super().all_gather(tensor)
        self._count(found.nbytes)
        return found

    def broadcast(self, tensor, *, source=0):
        self._count(tensor.nbytes)
        super().broadcast(tensor, source=source)


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("kind", "size", "expert", "attention"),
    [
        ("llama", 2, 1, "tensor"),
        ("llama", 4, 1, "tensor"),
        ("qwen3_moe", 2, 1, "tensor"),
        ("qwen3_moe", 2, 2, "tensor"),
        ("qwen3_moe", 2, 2, "data"),
        ("phi3", 2, 1, "tensor"),
        ("olmo2", 2, 1, "tensor"),
        ("gpt_oss", 2, 2, "tensor"),
        ("deepseek_v3", 2, 2, "data"),
    ],
)
def test_a_rank_sends_what_was_computed(tmp_path, monkeypatch, kind, size, expert, attention):
    monkeypatch.setattr("support.backends.rank_threads.ThreadCollective", Counting)
    path = save_family(kind, tmp_path)
    plan = read_model(str(path), dtype="float32")
    backend = RankedBackend(
        functools.partial(TorchBackend, TorchConfig(device="cpu", pack="off"), clock=SystemClock()),
        size,
        expert=expert,
        attention=attention,
    )
    try:
        facts = backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
        backend.allocate(PLAN)
        sharing = 1 if attention == "data" else size
        assert facts.kv_bytes_per_token == sum(one.local_kv_heads(sharing) * one.head_bytes for one in plan.attentions)
        weights = sum(local_bytes(one, size, expert, attention) for one in plan.weights)
        if attention == "data":
            assert sum(one.nbytes for one in backend.ranks.all[0]._model.parameters()) == weights
        driver = (OwnBlocksDriver if attention == "data" else BackendDriver)(backend, PLAN)
        rank = backend.ranks.all[0]._share._groups.tensor
        other = PLAN.num_rows // 2  # of the second rank, where each has its own
        driver.start(0, [5, 7, 11, 13, 17])
        driver.start(other, [3, 9, 27, 1, 2])
        padding = -plan.vocab_size % size * 4
        steps = (
            (((0,), 5), ((other,), 5), ((0, other), 2))
            if attention == "tensor"
            else (((0, other), 10), ((0, other), 2))
        )
        for rows, num_tokens in steps:
            rank.sent = 0, 0
            driver.step([Work(row) for row in rows])
            sizes = {"tensor": size, "expert": expert, "attention": attention}
            expected = traffic(plan, **sizes, num_tokens=num_tokens, num_logits=len(rows))
            assert rank.sent == (expected.num_bytes + padding * len(rows), expected.num_messages)
    finally:
        backend.ranks.close()


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("kind", sorted(UNKNOWN))
def test_attention_of_an_unknown_kind_is_refused(tmp_path, kind):
    with pytest.raises(ModelLoadError, match=r"the attention of layers 0, 1 of .* projections that are not known here"):
        read_model(str(save_family(kind, tmp_path)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/at/all", "there is no such directory"),
        ("./model", "there is no such directory"),
        ("tiny.gguf", "a .gguf file has no config.json"),
    ],
)
def test_what_is_no_model_is_an_error(path, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_model(path)
    assert "config.json" in caught.value.hint


def test_a_directory_without_or_with_a_broken_configuration_is_an_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json there"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read: .*no such model"):
        read_model(str(tmp_path))


def test_an_encoder_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="BertModel is no decoder"):
        read_model(str(tiny_encoders.save_encoder("bert", tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised in its files"),
        ({"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "layer 31 is linear_attention"),
    ],
)
def test_what_the_backend_does_not_divide_is_refused(described, changes, message):
    with pytest.raises(ModelLoadError, match=message):
        read_model(described("llama", **changes))


def test_a_model_without_a_plan_has_one_rank_and_a_configured_plan_divides_it(tmp_path):
    path, file = save_family("opt", tmp_path), tmp_path / "plan.json"
    assert "OPTForCausalLM comes without a plan" in tensor_obstacle(read_model(str(path)), 2)
    layer = "model.decoder.layers.*"
    styles = {f"{layer}.self_attn.{own}_proj": "colwise" for own in "qkv"}
    file.write_text(
        json.dumps(
            {**styles, f"{layer}.self_attn.out_proj": "rowwise", f"{layer}.fc1": "colwise", f"{layer}.fc2": "rowwise"}
        )
    )
    configured = read_plan_file(str(file), "tensor_plan")
    plan = read_model(str(path), dtype="float32", configured=configured)
    assert [n for n in range(1, 9) if not tensor_obstacle(plan, n)] == [1, 2, 4]
    model = skeleton(find_model(ModelSource(path=str(path))))
    shard(model, make_groups(2)[0].tensor, configured)
    assert sum(one.numel() * 4 for one in model.parameters()) == sum(local_bytes(one, 2) for one in plan.weights)
    unknown = read_model(str(path), configured={f"{layer}.fc1": "sequence_parallel"})
    assert tensor_obstacle(unknown, 2) == 'its plan has the style "sequence_parallel", which is not known here'


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "x ="), ("a.json", "[1]"), ("a.json", '{"a": 1}'), ("gone.toml", None)]
)
def test_a_plan_that_cannot_be_read_is_an_error_that_names_the_setting(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigValueError, match=rf"^\[backend\.torch\] tensor_plan = .*{name}"):
        read_plan_file(str(tmp_path / name), "[backend.torch] tensor_plan")


def test_numbers_are_held_as_the_configuration_says_or_as_asked_for(described):
    path = described("llama", num_hidden_layers=1)
    own, wide = read_model(path), read_model(path, dtype="float32")
    assert (own.dtype, own.itemsize, wide.dtype, wide.itemsize) == ("bfloat16", 2, "float32", 4)
    assert [2 * one.num_bytes for one in own.weights] == [one.num_bytes for one in wide.weights]
    assert (own.max_model_len, own.hidden_size, own.num_layers, own.vocab_size) == (8192, 4096, 1, 128256)


def test_the_demo_model_is_known_by_name():
    plan = read_model("demo")
    assert (plan.num_layers, plan.hidden_size, plan.dtype) == (5, 256, "bfloat16")
    assert {(one.num_heads, one.num_kv_heads) for one in plan.attentions} == {(8, 4)}
