"""What the machine can do: bytes read and operations of a matrix product, per second and per CPU second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from peers.drivers.protocol import serve, versions_of

REPEATS = 5

_loaded: dict[str, Any] = {}


def load(threads: int, read_bytes: int, matmul_size: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    size = matmul_size
    _loaded["buffer"] = torch.ones(read_bytes // 4096 // 4, 4096)
    _loaded["vector"] = torch.ones(4096)
    _loaded["a"], _loaded["b"] = torch.rand(size, size), torch.rand(size, size)
    _loaded["packed"] = torch.ops.mkldnn._reorder_linear_weight(_loaded["b"], size)
    _loaded["a8"] = torch.randint(0, 127, (size, size), dtype=torch.int8)
    _loaded["b8"] = torch.randint(-127, 127, (size, size), dtype=torch.int8)
    _loaded["int8"] = _our_layer()
    return {"versions": versions_of("torch")}


def _our_layer() -> Callable[[Any], Any]:
    """Return our int8 layer with such weights; without a compiler, PyTorch's product alone counts."""
    import torch

    from trencadis_torch.linear.held import ChannelWeight
    from trencadis_torch.linear.native import native
    from trencadis_torch.linear.packed import pack

    if (library := native()) is None:
        return lambda _: torch._int_mm(_loaded["a8"], _loaded["b8"])
    return pack([ChannelWeight(_loaded["b8"], torch.ones(len(_loaded["b8"])))], [None], library)


def measure() -> dict[str, Any]:
    import torch

    buffer, vector = _loaded["buffer"], _loaded["vector"]
    operations = 2 * len(_loaded["a"]) ** 3
    found = {
        "read": _best((buffer.sum, lambda: buffer @ vector), buffer.nbytes),
        # torch's own product is at half the rate of the processor's where it is MKL's on an AMD.
        "fp32": _best((lambda: _loaded["a"] @ _loaded["b"], _packed_product), operations),
    }
    try:
        # torch's own product has no vector code without VNNI; ours has, and is nearer to what the processor can do.
        found["int8"] = _best((lambda: torch._int_mm(_loaded["a8"], _loaded["b8"]), _our_product), operations)
    except (AttributeError, RuntimeError) as error:
        return {"ceilings": found, "note": f"no int8 product: {error}"}
    return {"ceilings": found}


def _our_product() -> Any:
    return _loaded["int8"](_loaded["a"])


def _packed_product() -> Any:
    import torch

    product = torch.ops.mkldnn._linear_pointwise
    return product(_loaded["a"], _loaded["packed"], None, "none", [], "")


def _best(works: Sequence[Callable[[], Any]], amount: float) -> dict[str, float]:
    return max((_rates(work, amount) for work in works), key=lambda rate: rate["per_s"])


def _rates(work: Callable[[], Any], amount: float) -> dict[str, float]:
    """Return the median rate of some repetitions: of wall time and of CPU time."""
    work()
    walls, cpus = [], []
    for _ in range(REPEATS):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - start_s)
        cpus.append(time.process_time() - start_cpu_s)
    return {"per_s": amount / statistics.median(walls), "per_cpu_s": amount / statistics.median(cpus)}


if __name__ == "__main__":
    serve(load=load, measure=measure)
