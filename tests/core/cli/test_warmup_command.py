from __future__ import annotations

import argparse
import json

import attrs
import pytest

from trencadis.config.schema import EngineConfig
from trencadis.errors import ConfigValueError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, Phase, WarmUpReport
from trencadis_testing.fakes import FakeBackend
from trencadis_tools.commands import warmup as warmup_command

BUCKETS = (Bucket(1, 256, 64), Bucket(8, 1, 512, Phase.DECODE))


class Table(BucketingStrategy):
    """Two buckets that cover what the command runs."""

    def buckets(self, limits):
        return BUCKETS

    def bucket_for(self, shape):
        return next((bucket for bucket in BUCKETS if bucket.covers(shape)), Bucket.of(shape))


@pytest.fixture
def run(fake_house, capsys):
    def call(*arguments: str, bucketing=Table, engine=None, **backend):
        config, registry = fake_house(bucketing=bucketing, **{"layout": "padded", **backend})
        config = attrs.evolve(config, engine=engine or EngineConfig(warmup=True, max_num_seqs=8))
        parser = argparse.ArgumentParser()
        warmup_command.add_arguments(parser)
        assert warmup_command.run(parser.parse_args(list(arguments)), config, registry) == 0
        return capsys.readouterr().out

    return call


def test_report_counts_buckets_graphs_and_what_the_run_afterwards_compiled(run) -> None:
    report = json.loads(run("--json", "--requests", "5"))
    assert (report["num_buckets"], report["num_prefill_buckets"], report["num_decode_buckets"]) == (2, 1, 1)
    assert (report["num_prepared"], report["skipped"], report["num_recompilations"]) == (2, [], 0)
    assert report["num_requests"] == 5
    assert (report["num_deferred"], report["num_fallbacks"], report["num_substituted"]) == (0, 0, 0)
    assert 0 < report["padding_ratio"] < 1


def test_skipped_buckets_are_listed(run, monkeypatch) -> None:
    monkeypatch.setattr(
        FakeBackend,
        "warm_up",
        lambda self, buckets, *, progress=None: WarmUpReport(
            prepared=tuple(buckets[:1]), num_graphs=1, graph_bytes=77, num_compilations=4, num_cached=3
        ),
    )
    report = json.loads(run("--json", "--requests", "0"))
    assert report["skipped"] == [["decode", 8, 1, 512]]
    assert (report["num_graphs"], report["graph_bytes"], report["num_compilations"]) == (1, 77, 4)
    assert report["num_cached"] == 3
    assert report["num_requests"] == 0
    printed = dict(line.split(maxsplit=1) for line in run("--requests", "0").splitlines())
    assert printed["skipped"] == "decode 8x1+512"
    assert printed["num_buckets"] == "2"


def test_nothing_to_warm_up_is_an_error_with_a_remedy(run) -> None:
    with pytest.raises(ConfigValueError, match="has no buckets") as caught:
        run(layout="ragged")
    assert "gaudi" in caught.value.hint
    with pytest.raises(ConfigValueError, match="has no buckets"):
        run(engine=EngineConfig(warmup=False))
    with pytest.raises(ConfigValueError, match="has no buckets"):
        run(generates=False)


def test_negative_number_of_requests_is_refused(run) -> None:
    with pytest.raises(ConfigValueError, match="must be at least 0"):
        run("--requests", "-1")
