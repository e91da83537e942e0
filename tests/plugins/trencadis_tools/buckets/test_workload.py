from __future__ import annotations

import attrs
import pytest

from trencadis.errors import ConfigError
from trencadis.records import Phase, Shape
from trencadis_gallery.bucketing.workloads import DeviceCost, Passes, Workload
from trencadis_gallery.bucketing.workloads.trace import Arrival
from trencadis_gallery.bucketing.workloads.workload import Source, read_source, write_shapes

DECODE = Shape(2, 1, 9, Phase.DECODE)
HEAD = "phase,batch_size,query_len,num_blocks,count,num_tokens\n"


def test_trace_becomes_shapes_of_the_limits(tmp_path, limits):
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,20,2\n")
    source = read_source(file)
    assert source == Source("trace.csv", arrivals=(Arrival(0.0, 20, 2),))
    assert source.workload(limits, DeviceCost()).passes == (
        Passes(Shape(1, 4, 4), 1, 4),
        Passes(Shape(1, 16, 0), 1, 16),
        Passes(Shape(1, 1, 6, Phase.DECODE), 1, 1),
    )
    wide = attrs.evolve(limits, max_num_batched_tokens=32)
    assert source.workload(wide, DeviceCost()).passes[0] == Passes(Shape(1, 20, 0), 1, 20)


def test_written_shapes_read_back_the_same(tmp_path, limits):
    workload = Workload((Passes(Shape(2, 16, 3), 5, 100), Passes(DECODE, 7, 14)))
    write_shapes(tmp_path / "shapes.csv", workload)
    assert read_source(tmp_path / "shapes.csv").workload(limits, DeviceCost()) == workload


def test_recorded_shapes_are_sorted_and_equal_ones_added_up(tmp_path, limits):
    file = tmp_path / "s.csv"
    file.write_text(f"{HEAD}decode,2,1,9,1,\nprefill,1,8,0,2,15\nprefill,1,8,0,1,8\n")
    assert read_source(file).workload(limits, DeviceCost()).passes == (
        Passes(Shape(1, 8, 0), 3, 23),
        Passes(DECODE, 1, 2),
    )


def test_tokens_need_not_be_recorded(tmp_path):
    file = tmp_path / "s.csv"
    file.write_text("phase,batch_size,query_len,num_blocks,count\nprefill,2,8,0,3\n")
    assert read_source(file).recorded == (Passes(Shape(2, 8, 0), 3, 48),)


def test_phases_are_told_apart():
    workload = Workload((Passes(Shape(1, 8, 0), 1, 8), Passes(DECODE, 1, 2)))
    assert workload.of_phase(Phase.DECODE) == (Passes(DECODE, 1, 2),)


def test_unwritable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_shapes(tmp_path, Workload(()))
