from __future__ import annotations

import sys

import pytest

from trencadis.errors import ConfigError
from trencadis.records import Bucket, Phase, Shape
from trencadis_gallery.bucketing.workloads import Passes, Workload
from trencadis_tools.buckets import TableReport
from trencadis_tools.buckets.plot import plot_tables

REPORT = TableReport(table=(Bucket(1, 128, 0), Bucket(2, 1, 8, Phase.DECODE)), warmup_s=1.0, graph_bytes=1.0)
RAN = Workload((Passes(Shape(1, 100, 0), 3, 300), Passes(Shape(2, 1, 5, Phase.DECODE), 9, 18)))


def test_a_picture_names_strategies_with_their_number_of_buckets_or_is_named_if_it_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install trencadis[plot]")
    plot_tables(tmp_path / "p.svg", {"even": REPORT, "odd": REPORT}, RAN)
    drawn = (tmp_path / "p.svg").read_text()
    assert all(text in drawn for text in ("even (1)", "odd (1)", "ran", "query length, tokens", "KV blocks"))
    plot_tables(tmp_path / "p.png", {"even": REPORT})
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name in ("folder/p.png", "p.nothing"):
        with pytest.raises(ConfigError, match="cannot be written"):
            plot_tables(tmp_path / name, {"even": REPORT})


def test_missing_matplotlib_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "trencadis\[plot\]"'):
        plot_tables(tmp_path / "p.png", {"even": REPORT})
