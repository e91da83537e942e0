from __future__ import annotations

import pytest

from trencadis.records import Bucket, Phase
from trencadis_plugins.bucketing.from_file import bucket_file_text, read_bucket_file, write_bucket_file

TABLE = (Bucket(1, 128, 0), Bucket(2, 256, 4), Bucket(1, 1, 8, Phase.DECODE), Bucket(4, 1, 32, Phase.DECODE))


def test_lines_are_tuples_prefill_first():
    assert bucket_file_text(TABLE[::-1]) == "(1, 128, 0)\n(2, 256, 4)\n(1, 1, 8)\n(4, 1, 32)\n"


def test_reader_finds_the_same_buckets(tmp_path):
    write_bucket_file(tmp_path / "b.txt", TABLE, comment="made for a test\n\nof two lines")
    assert (tmp_path / "b.txt").read_text().startswith("# made for a test\n#\n# of two lines\n(1,")
    assert read_bucket_file(tmp_path / "b.txt", strict=True) == TABLE


def test_drafts_are_left_to_the_reader():
    drafts = (*TABLE, Bucket(4, 3, 32, Phase.DECODE))
    assert bucket_file_text(drafts) == bucket_file_text(TABLE)


def test_prefill_of_one_token_has_no_place_in_the_format():
    with pytest.raises(ValueError, match="a query of one token means decode"):
        bucket_file_text([Bucket(1, 1, 0)])
