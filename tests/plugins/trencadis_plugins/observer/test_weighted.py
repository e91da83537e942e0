from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from trencadis_plugins.observer.weighted import WeightedHistogram

BOUNDS = (0.1, 0.5, 1.0)
VALUES = ((0.05, 3), (0.1, 2), (0.3, 1), (1.0, 4), (7.0, 2))


def samples_of(registry):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_it_equals_a_histogram_that_is_told_each_value_by_itself():
    weighted, single = CollectorRegistry(), CollectorRegistry()
    mine = WeightedHistogram("gap_seconds", "Gaps.", registry=weighted, buckets=BOUNDS)
    theirs = Histogram("gap_seconds", "Gaps.", registry=single, buckets=BOUNDS)
    for value, weight in VALUES:
        mine.observe(value, weight)
        for _ in range(weight):
            theirs.observe(value)
    got, expected = samples_of(weighted), samples_of(single)
    assert got.keys() == expected.keys()
    assert all(abs(got[key] - expected[key]) < 1e-9 for key in expected)


def test_it_is_in_the_exposition():
    registry = CollectorRegistry()
    WeightedHistogram("gap_seconds", "Gaps.", registry=registry, buckets=BOUNDS).observe(0.2)
    text = generate_latest(registry).decode()
    assert 'gap_seconds_bucket{le="+Inf"} 1.0' in text
    assert "# TYPE gap_seconds histogram" in text
