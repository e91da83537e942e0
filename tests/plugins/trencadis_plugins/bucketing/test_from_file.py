from __future__ import annotations

import logging

import attrs
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies.bucket_cases import SMALL, fields
from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.config import FromFileConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.from_file import FromFile, read_bucket_file, write_bucket_file
from trencadis_testing.bucketing import SAMPLE_LIMITS, BucketingConformance

LIMITS = attrs.evolve(
    SMALL,
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_prefill_batch_size=4,
    num_blocks=3000,
    contiguous=True,
)
BOTH = "(1, 128, 0)\n(1, 1, 128)\n"


@pytest.fixture
def written(tmp_path):
    """Write a file and return its path as text."""

    def write(text):
        path = tmp_path / "buckets.txt"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


class TestFromFile(BucketingConformance):
    """A file that suits no limits in particular."""

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.path = tmp_path / "buckets.txt"
        self.path.write_text(
            "([1, 2], [8, 16, 64, 100, 1024], [0, 1, 3, 16])\n(1, 2048, range(0, 130, 10))\n"
            "([1, 2, 4, 6, 16], 1, [1, 2, 8, 33, 60, 120, 300, 999])\n(1, 5, 1)\n"
        )

    def make(self, limits):
        return FromFile(limits, FromFileConfig(path=str(self.path), phases="decode"))


@pytest.mark.parametrize(
    ("line", "buckets"),
    [
        ("(1, 2048, 0)", [(1, 2048, 0)]),
        ("(1,[256,512],[0,4,8])", [(1, 256, 0), (1, 256, 4), (1, 256, 8), (1, 512, 0), (1, 512, 4), (1, 512, 8)]),
        ("(1,1,range(256,512,128))", [(1, 1, 256), (1, 1, 384)]),
        ("([64,128,256],1,range(512,1024,32))", [(b, 1, c) for b in (64, 128, 256) for c in range(512, 1024, 32)]),
        ("(1, range(4, 0, -2), 3)", [(1, 2, 3), (1, 4, 3)]),
        ("1, 2, 3", [(1, 2, 3)]),
        ("(1, 2, 3,)", [(1, 2, 3)]),
        ("(1, '256', [\"4\", +5,])  # with a comment", [(1, 256, 4), (1, 256, 5)]),
        ("  # nothing", []),
        ("", []),
    ],
)
def test_line_lists_the_product_of_its_items(written, line, buckets):
    assert fields(read_bucket_file(written(line), strict=True)) == buckets


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("(1, 2)", "2 values, but a bucket has three"),
        ("(1, 2, 3, 4)", "4 values, but a bucket has three"),
        ("()", "0 values"),
        ("(1, 2, 34", "no whole number, list or range"),
        ("1, 2, 34)", "no whole number, list or range"),
        ("(1, 0.7, 3)", "at '0.7, 3'"),
        ("(1, 2.5, 3)", "no whole number, list or range"),
        ("(1, [], 3)", "no whole number, list or range"),
        ("(1, [2, x], 3)", "no whole number, list or range"),
        ("(1, range(4), 3)", "no whole number, list or range"),
        ("(1, range(1, 8, 0), 3)", "range() with a step of 0"),
        ("(1, range(8, 1), 3)", "range(8, 1) is empty"),
        ("(1, range(1, 10002), 3)", "has 10001 values, more than 10000"),
        ("(range(1, 9000), range(1, 9000), range(1, 9000))", "buckets, more than 100000"),
        ("(1, 9999999999, 3)", "no whole number, list or range"),
        ("(0, 2, 3)", "batch size and query length are 1 or more"),
        ("(1, -2, 3)", "batch size and query length are 1 or more"),
        ("(1, 2, -1)", "blocks too in decode"),
        ("(1, 1, 0)", "blocks too in decode"),
        ("__import__('os').system('true')", "no whole number, list or range"),
        ("(" * 5000, "no whole number, list or range"),
        ("(1 2, 3, 4)", "no whole number, list or range"),
        ("hello", "at 'hello'"),
    ],
)
def test_invalid_line_is_skipped_with_its_number_and_what_is_wrong(written, caplog, line, reason):
    path = written(f"# header\n{BOTH}{line}\n(2, 128, 0)\n")
    assert fields(read_bucket_file(path)) == [(1, 128, 0), (2, 128, 0), (1, 1, 128)]
    (message,) = caplog.messages
    assert message.startswith(f"Skipping invalid bucketing line 4 in {path}: ")
    assert reason in message
    with pytest.raises(ConfigValueError, match=r'\[bucketing.from_file\] path = ".*": line 4: .*Correct these lines'):
        read_bucket_file(path, strict=True)


NUMBER = st.integers(-3, 300).map(str)
ITEM = st.one_of(
    NUMBER,
    st.lists(NUMBER, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
    st.lists(NUMBER, min_size=1, max_size=4).map(lambda items: f"range({', '.join(items)})"),
)
LINE = st.one_of(
    st.lists(ITEM, min_size=2, max_size=4).map(lambda items: f"({', '.join(items)})"),
    st.lists(ITEM, min_size=3, max_size=3).map(lambda items: f"({','.join(items)})  # {len(items)}"),
    st.text(st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]), max_size=12),
)


@settings(max_examples=60, phases=[Stage.explicit, Stage.generate])
@given(st.lists(LINE, min_size=1, max_size=6))
def test_file_is_the_sum_of_its_lines_and_each_bad_one_is_named(tmp_path_factory, lines):
    """A line alone is good or bad; in a file it is the same, under its number, and spoils no other."""
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    warned = Named()
    logger = logging.getLogger("trencadis.bucketing")
    logger.addHandler(warned)
    logger.propagate = False
    try:
        expected, bad = set(), []
        for number, line in enumerate(lines, start=1):
            path.write_text(line, encoding="utf-8")
            expected.update(read_bucket_file(path))
            bad += [number] * len(warned.numbers)
            warned.numbers.clear()
        path.write_bytes("\n".join(lines).encode())
        assert set(read_bucket_file(path)) == expected
        assert warned.numbers == bad
    finally:
        logger.removeHandler(warned)
        logger.propagate = True
    if bad:
        with pytest.raises(ConfigValueError, match=rf"line {bad[0]}: "):
            read_bucket_file(path, strict=True)


class Named(logging.Handler):
    """Keeps the numbers of the lines that are warned about."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def emit(self, record):
        self.numbers.append(record.args[0])


@settings(max_examples=150, phases=[Stage.explicit, Stage.generate])
@given(
    st.binary(max_size=60) | st.text(alphabet="()[]range, 0123456789-+'\"#.x\t\u00e9\x0b", max_size=40).map(str.encode)
)
def test_no_file_crashes_the_reader(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(content)
    reason = ""
    try:
        buckets = read_bucket_file(path)
        assert all(bucket.batch_size >= 1 and bucket.query_len >= 1 and bucket.num_blocks >= 0 for bucket in buckets)
    except ConfigValueError as error:
        reason = str(error)
    assert not reason or "it is no text" in reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"x\n{BOTH}(1)\n".encode(), r"line 1: .*; line 4: "),
        (
            "\n".join(f"({i}, range(2, 202), range(0, 200))" for i in range(1, 5)).encode(),
            "100000 buckets up to line 3",
        ),
        (b"\xff\xfe\x00(1, 2, 3)", "it is no text.*Give a text file"),
        (None, r'path = ".*buckets.txt": .*No such file.*Give a text file'),
    ],
    ids=["all invalid lines at once", "more than any device prepares", "no text", "no file"],
)
def test_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "buckets.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigValueError, match=message):
        read_bucket_file(path, strict=True)


def test_byte_order_mark_and_foreign_line_ends_are_no_fault(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_bytes(b"\xef\xbb\xbf(1, 128, 0)\r\n(1, 1, 128)\r\n")
    assert read_bucket_file(path, strict=True) == (Bucket(1, 128, 0), Bucket(1, 1, 128, Phase.DECODE))


def test_listed_buckets_are_prepared_and_used(written):
    strategy = FromFile(LIMITS, FromFileConfig(path=written("(1, 2048, 0)\n(2, 128, 0)\n(8, 1, 512)\n")))
    assert fields(strategy.buckets(LIMITS)) == [(1, 2048, 0), (2, 128, 0), (8, 1, 512)]
    assert strategy.bucket_for(Shape(1, 100, 0)) == Bucket(2, 128, 0)
    assert strategy.bucket_for(Shape(3, 1, 500, Phase.DECODE)) == Bucket(8, 1, 512, Phase.DECODE)


def test_decode_entries_are_cut_to_their_sequences_longest_tables(written):
    limits = attrs.evolve(LIMITS, contiguous=False)
    strategy = FromFile(limits, FromFileConfig(path=written("(1, 128, 0)\n(1, 1, [256, 384])\n")))
    assert fields(strategy.buckets(limits)) == [(1, 128, 0), (1, 1, 32)]


def test_contiguous_entries_end_with_the_cache(written):
    strategy = FromFile(LIMITS, FromFileConfig(path=written("(1, 128, 0)\n(1, 1, [2999, 3500, 5000])\n")))
    assert fields(strategy.buckets(LIMITS)) == [(1, 128, 0), (1, 1, 2999), (1, 1, 3000)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("(5, 128, 0)", "the prefill bucket (5, 128, 0) is left out: 5 sequences, but a prefill pass has at most 4."),
        ("(1, 128, 33)", "(1, 128, 33) is left out: 33 context blocks, but a sequence has at most 32."),
        ("(1, 5000, 0)", "(1, 5000, 0) is left out: a query of 5000 tokens, but max_model_len is 4096."),
        ("(4, 4000, 0)", "(4, 4000, 0) is left out: 16000 tokens, but max_num_batched_tokens is 8192."),
        (
            "(300, 1, 900)",
            "the decode bucket (300, 1, 900) is left out: 300 sequences, but a decode pass has at most 256.",
        ),
        ("(9, 1, 8)", "the decode bucket (9, 1, 8) is left out: 8 blocks for 9 sequences."),
    ],
)
def test_entry_outside_the_limits_is_left_out_with_a_warning(written, caplog, line, message):
    limits = attrs.evolve(LIMITS, contiguous=False)
    config = FromFileConfig(path=written(f"(1, 128, 0)\n(1, 1, 16)\n{line}\n"))
    assert fields(FromFile(limits, config).buckets(limits)) == [(1, 128, 0), (1, 1, 16)]
    (said,) = caplog.messages
    assert said.endswith(message)


@pytest.mark.parametrize(
    ("text", "phase", "other", "why"),
    [
        ("(1, 1, 128)", "prefill", "decode", "it lists none"),
        ("(1, 128, 0)", "decode", "prefill", "it lists none"),
        ("(1, 9999, 0)\n(1, 1, 128)", "prefill", "decode", "none of its 1 is within the engine's limits"),
    ],
)
def test_both_phases_need_a_bucket_unless_the_config_says_otherwise(written, text, phase, other, why):
    path = written(text)
    with pytest.raises(ConfigValueError, match=rf'no {phase} bucket: {why}.*phases = "{other}"'):
        FromFile(LIMITS, FromFileConfig(path=path))
    with pytest.raises(ConfigValueError, match=rf"no {phase} bucket"):
        FromFile(LIMITS, FromFileConfig(path=path, phases=phase))
    assert len(FromFile(LIMITS, FromFileConfig(path=path, phases=other)).buckets(LIMITS)) == 1


def test_drafts_add_longer_queries_or_more_rows(written):
    limits, path = attrs.evolve(LIMITS, max_draft_tokens=2), written("(1, 128, 0)\n(2, 1, 64)\n")
    assert fields(FromFile(limits, FromFileConfig(path=path)).buckets(limits))[1:] == [
        (2, 1, 64),
        (2, 2, 64),
        (2, 3, 64),
    ]
    flat = FromFile(limits, FromFileConfig(path=path, flat_drafts=True)).buckets(limits)
    assert fields(flat)[1:] == [(2, 1, 64), (6, 1, 64), (6, 1, 192)]


@pytest.mark.parametrize("name", ["uneven", "contiguous", "small_cache", "drafts", "long_context"])
def test_written_table_is_read_back_equal(tmp_path, name):
    limits, path = SAMPLE_LIMITS[name], tmp_path / "buckets.txt"
    table = Exponential(limits).buckets(limits)
    write_bucket_file(path, table, comment="made from exponential\nfor a test")
    assert path.read_text().startswith("# made from exponential\n# for a test\n(1, ")
    assert FromFile(limits, FromFileConfig(path=str(path), strict=True)).buckets(limits) == table


def test_written_lines_are_exact_and_sorted(tmp_path):
    path = tmp_path / "buckets.txt"
    decode = [Bucket(2, query_len, 8, Phase.DECODE) for query_len in (4, 1)]
    write_bucket_file(path, [*decode, Bucket(2, 64, 0), Bucket(1, 256, 3)])
    assert path.read_text() == "(1, 256, 3)\n(2, 64, 0)\n(2, 1, 8)\n"


def test_prefill_of_one_token_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="a query of one token means decode"):
        write_bucket_file(tmp_path / "buckets.txt", [Bucket(1, 1, 0)])
