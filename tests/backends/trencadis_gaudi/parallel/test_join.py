"""A rank's place as on a Gaudi: the emulated device passes for a real one, gloo for HCCL, and hosts have a group beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import attrs
import pytest

from support.backends import fp8_scene, gaudi_ranks, tiny_models
from support.backends.rank_threads import make_groups
from trencadis.errors import BackendError
from trencadis.interfaces import AllocationPlan, RankGroups, SupportsRanks
from trencadis.records import Bucket, ModelSource, ParallelLayout, Phase
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.parallel.join import join_ranks
from trencadis_gaudi.parallel.support import FEATURES
from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_plugins.executor.collectives.owner import GroupAddress
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.driver import BackendDriver, Work

PLAN = AllocationPlan(num_blocks=24, block_size=16, num_rows=2, max_model_len=96, max_num_batched_tokens=64)
BUCKETS = (Bucket(1, 32, 0), Bucket(1, 32, 4), Bucket(2, 1, 8, Phase.DECODE))


def real(**options):
    """Return a backend whose device passes for a Gaudi."""
    backend = gaudi_ranks.make_gaudi(**options)
    device = backend.habana.emulated
    backend.habana = attrs.evolve(backend.habana, emulated=None)
    return backend, device


def serve(rank: int, address: GroupAddress, path: str, mode: str) -> dict[str, object]:
    """Be a rank: load, warm up and run a few steps; returns what happened."""
    backend, device = real(mode=mode, check_model=True)
    group = open_group(address)
    layout = ParallelLayout(tensor=2)
    backend.join(RankGroups(layout=layout, rank=rank, tensor=group, world=group))
    facts = backend.load(ModelSource(path=path), sampler=StandardSampler(standard_chain("vllm")))
    backend.memory(max_num_batched_tokens=64, max_num_seqs=2)
    backend.allocate(PLAN)
    backend.warm_up(BUCKETS)
    device.frozen = True
    driver = BackendDriver(backend, PLAN, bucket=lambda shape: next(one for one in BUCKETS if one.covers(shape)))
    driver.start(0, tiny_models.prompt(30))
    outputs = [driver.step([Work(0)]) for _ in range(4)]
    device_group = backend._share.exchange._group
    found = {
        "dtype": facts.dtype,
        "tokens": [token for one in outputs for token in one.token_ids.tolist()],
        "compiled": sum(one.num_compilations for one in outputs),
        "graphs": len(backend._capture.graphs),
        "host": type(device_group._host).__name__,
        "device": type(device_group._group).__name__,
    }
    backend.close()
    device_group.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_two_ranks_serve_in_bfloat16_and_decide_between_their_hosts(tmp_path, mode):
    path = fp8_scene.save_clear_model(tmp_path)
    expected = tiny_models.greedy_reference(path, tiny_models.prompt(30), 4)
    owner = create_group("gloo", size=2, timeout_s=30.0)
    program = "import json, sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\nimport test_join\nprint(json.dumps(test_join.main(sys.argv[2:])))"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
    }
    started = []
    for rank in range(2):
        address = json.dumps(attrs.asdict(owner.address(rank)))
        command = [sys.executable, "-c", program, os.path.dirname(__file__), str(rank), address, str(path), mode]
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    told = [one.communicate(timeout=300) for one in started]
    owner.unlink()
    assert all(out for out, _ in told), [error for _, error in told]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in told)
    assert first.pop("tokens") == expected
    assert second.pop("tokens") == []
    assert first == second
    assert first == {
        "dtype": "bfloat16",
        "compiled": 0,
        "graphs": len(BUCKETS) if mode == "lazy" else 0,
        "host": "HostGroup",
        "device": "TorchCollective",
    }


def main(argv: list[str]) -> dict[str, object]:
    """Run one rank of the test above."""
    rank, address, path, mode = argv
    found = json.loads(address)
    return serve(int(rank), GroupAddress(**{**found, "members": tuple(found["members"])}), path, mode)


def test_lazy_mode_without_lazy_collectives_is_an_error(monkeypatch):
    backend, _ = real()
    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false")
    with pytest.raises(BackendError, match="PT_HPU_ENABLE_LAZY_COLLECTIVES=false in lazy mode"):
        join_ranks(make_groups(2)[0], backend._config, backend.habana)


def test_one_rank_has_no_share_and_decides_alone():
    backend = gaudi_ranks.make_gaudi()
    assert isinstance(backend, SupportsRanks)
    share, agreement = join_ranks(make_groups(1)[0], backend._config, backend.habana)
    assert share is None
    assert not agreement.all_hold(False)


def test_a_gaudi_computes_with_hccl_and_the_emulated_device_with_what_cpus_have():
    backend = gaudi_ranks.make_gaudi()
    assert backend.capabilities.collectives == ("shared_memory", "gloo")


ASKING = {
    "mode": "lazy",
    "capture": "budgeted",
    "layout": "unified",
    "contiguous": True,
    "merged_prefill": True,
    "fused_kernels": True,
    "fp8": "dynamic",
    "kv_cache_dtype": "fp8",
    "warmup_required": 4,
}
"""A value of each setting that asks for the feature."""
KEYS = [one.setting.rpartition(".")[2] for one in FEATURES]


def test_every_row_is_of_a_setting_and_asked_for():
    fields = attrs.fields_dict(GaudiConfig)
    for feature, key in zip(FEATURES, KEYS, strict=True):
        assert feature.setting == f"backend.gaudi.{key}"
        assert key in fields
        assert feature.is_asked(ASKING[key])


@pytest.mark.representatives(1)
@pytest.mark.parametrize("key", KEYS)
def test_joining_others_works_as_the_table_says_and_stages_are_refused_before_any_setting(ranks, key):
    options = {"max_prefill_batch_size": 2} if key == "merged_prefill" else {}
    started = ranks(lambda groups: groups, 2)
    joined = started.call(lambda groups: gaudi_ranks.make_gaudi(**options, **{key: ASKING[key]}).join(groups))
    assert joined == [None, None]
    (error, _) = ranks(lambda groups: groups, 1, pipeline=2).errors(
        lambda groups: gaudi_ranks.make_gaudi(**options, **{key: ASKING[key]}).join(groups)
    )
    assert isinstance(error, BackendError)
    assert str(error).startswith("[parallel] pipeline = 2: the backend gaudi has no stages.")


PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from trencadis.errors import CollectiveError
from trencadis_gaudi.parallel.host_group import HostGroup
rank = int(sys.argv[1])
# As HCCL's would be: the group of the process, to which the hosts' is added.
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
group, found = HostGroup(rank, 2), {}
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32):
    own = (torch.arange(6).view(2, 3) + 10 * rank).to(dtype)
    gathered = group.all_gather(own.mT)
    told = own.clone()
    group.broadcast(told, source=1)
    group.all_reduce(own)
    found[str(dtype)] = [one.tolist() for one in (gathered, told, own)]
if rank:
    group.send(torch.tensor([7.0, 8.0]), target=0)
else:
    received = torch.zeros(2)
    group.receive(received, source=1)
    found["received"] = received.tolist()
group.barrier()
print(json.dumps(found), flush=True)
if rank:
    os._exit(1)
try:
    group.barrier()
except CollectiveError as error:
    print("ended", flush=True)
try:
    group.barrier()
except CollectiveError as error:
    print("aborted" in str(error), flush=True)
group.close()
group.close()
os._exit(0)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each of two ranks printed."""
    store = tmp_path_factory.mktemp("store") / "ranks"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [one.communicate(timeout=120) for one in started]
    assert all(out for out, _ in told), [error for _, error in told]
    return [out.splitlines() for out, _ in told]


@pytest.mark.nightly
def test_ranks_exchange_tensors_of_every_kind(answers):
    first, second = (json.loads(lines[0]) for lines in answers)
    assert first.pop("received") == [7.0, 8.0]
    assert first == second
    assert len(first) == 4
    for gathered, told, summed in first.values():
        assert gathered == [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
        assert told == [[10, 11, 12], [13, 14, 15]]
        assert summed == [[10, 12, 14], [16, 18, 20]]


@pytest.mark.nightly
def test_the_end_of_a_process_ends_what_the_other_waits_for(answers):
    assert answers[0][1:] == ["ended", "True"]
