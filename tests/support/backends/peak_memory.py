"""Run as a program: loads a model, and prints how much memory it took at most, how much its weights take, and what its logits are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import torch


def main(path: str, options: str, place: str = "") -> None:
    """Print the JSON of what loading a model took."""
    # What is imported anyhow is no part of a load.
    from transformers.models.llama import modeling_llama  # noqa: F401

    from trencadis.clock import SystemClock
    from trencadis.records import ModelSource
    from trencadis_testing.backend import ArgmaxSampler
    from trencadis_torch.backend import TorchBackend
    from trencadis_torch.config import TorchConfig
    from trencadis_torch.linear import native, native_decoder

    native.native(), native_decoder.native_decoder()
    torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64))  # PyTorch's own threads and buffers
    settings: dict[str, Any] = json.loads(options)
    backend = TorchBackend(TorchConfig(device="cpu", **settings), clock=SystemClock())
    if place:
        backend.join(_groups(**json.loads(place)))
    before = _memory("VmRSS")
    facts = backend.load(ModelSource(path=path), sampler=ArgmaxSampler())
    peak = _memory("VmHWM")  # getrusage would count the process that started this one
    sys.stdout.write(
        json.dumps({"before": before, "peak": peak, "after": _memory("VmRSS"), "weights": facts.weights_bytes}) + "\n"
    )


def _groups(rank: int, layout: dict[str, Any], tensor: dict[str, Any], world: dict[str, Any]) -> Any:
    from trencadis.interfaces import RankGroups
    from trencadis.records import ParallelLayout
    from trencadis_plugins.executor.collectives.groups import open_group
    from trencadis_plugins.executor.collectives.owner import GroupAddress

    addresses = (GroupAddress(**{**one, "members": tuple(one["members"])}) for one in (tensor, world))
    own, everyone = map(open_group, addresses)
    return RankGroups(layout=ParallelLayout(**layout), rank=rank, tensor=own, world=everyone)


def of_ranks(path: Path, options: dict[str, Any], **layout: int) -> list[dict[str, int]]:
    """Load a model on ranks in processes of their own, side by side; returns what it took on each."""
    from trencadis.records import ParallelLayout
    from trencadis_plugins.executor.collectives.groups import create_group

    sizes = ParallelLayout(**layout)
    world = create_group("shared_memory", size=sizes.num_ranks, timeout_s=120)
    stages = [
        world.subgroup(tuple(rank for rank in range(sizes.num_ranks) if sizes.stage(rank) == stage))
        for stage in range(sizes.pipeline)
    ]
    children = []
    try:
        for rank in range(sizes.num_ranks):
            own = stages[sizes.stage(rank)].address(sizes.tensor_rank(rank))
            place = {
                "rank": rank,
                "layout": layout,
                "tensor": attrs.asdict(own),
                "world": attrs.asdict(world.address(rank)),
            }
            command = [sys.executable, __file__, str(path), json.dumps(options), json.dumps(place)]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        outputs = [child.communicate()[0] for child in children]
    finally:
        world.unlink()
    assert not any(child.returncode for child in children), "a rank failed; it says why"
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _memory(name: str) -> int:
    """Return the memory of this process, bytes: ``VmRSS`` now, ``VmHWM`` at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
