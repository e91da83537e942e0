"""A whole engine whose decodes are replayed as CUDA graphs would be."""

from __future__ import annotations

import pytest

from support.devices import DEVICE, ON_CUDA
from trencadis import LLM, SamplingParams
from trencadis.errors import BackendError

PROMPTS = ["The old man looked at the sea", "Alice was beginning to get very tired of", "x"]
BUCKETS = """# batch size, query length, blocks
(1, 24, [0, 8])
([1, 2, 4], 1, [16, 32])
"""


def generate(tmp_path, options, **tables) -> tuple[list[list[int]], str]:
    """Return greedy and drawn tokens, and the metrics."""
    buckets = tmp_path / "buckets.txt"
    buckets.write_text(BUCKETS)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=12, ignore_eos=True) for t in (0, 1.0, 0)]
    with LLM(
        "demo",
        cache={"num_blocks": 32},
        engine={"max_num_batched_tokens": 24, "max_num_seqs": 4},
        bucketing={"name": "from_file", "from_file": {"path": str(buckets)}},
        backend={"torch": {"device": DEVICE, "layout": "padded", "pack": "off", **options}},
        **tables,
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm._frontend.engine.engine.metrics()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        {"speculation": {"name": "ngram"}, "draft_length": {"name": "fixed"}},
        pytest.param({}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_texts_are_those_without_graphs_and_decodes_are_replayed(tmp_path, tables):
    expected, _ = generate(tmp_path, {}, **tables)
    found, metrics = generate(tmp_path, {"graphs": "buckets" if ON_CUDA else "checked"}, **tables)
    assert found == expected
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("trencadis_torch_"))
    assert float(counts["trencadis_torch_captured_graphs"]) > 0
    assert sum(float(value) for name, value in counts.items() if "graph_replays_total" in name) >= 6
    assert float(counts["trencadis_torch_graph_misses_total"]) == 0


def test_cpu_captures_nothing():
    with pytest.raises(BackendError, match=r'graphs = "buckets": for cuda devices, and this one is cpu'):
        LLM("demo", backend={"torch": {"device": "cpu", "layout": "padded", "graphs": "buckets"}})
