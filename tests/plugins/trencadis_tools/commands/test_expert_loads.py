from __future__ import annotations

import io
import json

import numpy as np
import pytest

from trencadis.cli import main
from trencadis.errors import ConfigValueError
from trencadis_tools.commands.expert_loads import read_page
from trencadis_torch.parallel.experts import load_metrics
from trencadis_torch.parallel.placement import ExpertSlots, read_loads

SLOTS = ExpertSlots(num_experts=12, ranks=(tuple(range(6)), tuple(range(6, 12))))
COUNTS = {layer: np.arange(12) * 3 + layer for layer in (1, 2, 10)}
PAGE = "# HELP other Something.\n# TYPE other counter\nother 3\n" + load_metrics(COUNTS, dict.fromkeys(COUNTS, SLOTS))
EXPECTED = {layer: tuple(map(float, own)) for layer, own in COUNTS.items()}


def test_a_page_becomes_the_file_that_the_backend_reads(tmp_path, capsys, monkeypatch):
    page, loads = tmp_path / "page.txt", tmp_path / "loads.json"
    page.write_text(PAGE)
    assert main(["expert-loads", str(page), "-o", str(loads)]) == 0
    assert read_loads(str(loads))[0] == EXPECTED
    assert list(json.loads(loads.read_text())) == ["1", "2", "10"]
    monkeypatch.setattr("sys.stdin", io.StringIO(PAGE))
    assert main(["expert-loads"]) == 0
    assert capsys.readouterr().out == loads.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no trencadis_torch_expert_tokens_total"),
        ("other 3\n", "has no trencadis_torch_expert_tokens_total"),
        ("not a page }{\n", "no page of metrics"),
        (PAGE.replace('expert="3"', 'expert="99"'), "layer 1 of the page"),
    ],
)
def test_a_page_without_them_is_refused(text, said):
    with pytest.raises(ConfigValueError, match=said):
        read_page(text)
