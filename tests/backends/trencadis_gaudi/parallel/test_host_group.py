"""The group of the hosts beside one of the devices: two processes, the second of which tells the first what it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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


pytestmark = pytest.mark.nightly


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


def test_ranks_exchange_tensors_of_every_kind(answers):
    first, second = (json.loads(lines[0]) for lines in answers)
    assert first.pop("received") == [7.0, 8.0]
    assert first == second
    assert len(first) == 4
    for gathered, told, summed in first.values():
        assert gathered == [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
        assert told == [[10, 11, 12], [13, 14, 15]]
        assert summed == [[10, 12, 14], [16, 18, 20]]


def test_the_end_of_a_process_ends_what_the_other_waits_for(answers):
    assert answers[0][1:] == ["ended", "True"]
