from __future__ import annotations

import pytest

from trencadis_plugins.bucketing.vision import ImageSize, image_batches, image_sizes, vision_buckets


@pytest.mark.parametrize(
    ("model_type", "text", "buckets"),
    [
        ("gemma3", "", (1, 2, 4, 8)),
        ("any_other", "", (1, 2, 4, 8)),
        ("qwen2_5_vl", "", (1600, 3136, 4096, 6400, 7744, 9216, 12544)),
        ("qwen3_vl", "", (196, 256, 441, 480, 576, 900, 1156)),
        ("qwen3_5", "", ()),
        ("kimi_k25", "", ()),
        ("gemma4", "", ()),
        ("gemma3", "16, 4,4", (4, 16)),
        ("gemma3", "None", ()),
    ],
)
def test_model_type_has_its_buckets_unless_a_text_gives_others(model_type, text, buckets):
    assert vision_buckets(model_type, text) == buckets


@pytest.mark.parametrize("text", ["1,,2", "none", "0", "-1", "1.5"])
def test_text_that_lists_no_numbers_is_refused(text):
    with pytest.raises(ValueError, match="VLLM_MULTIMODAL_BUCKETS="):
        vision_buckets("gemma3", text)


def test_sizes_of_images_have_an_optional_number_or_range():
    assert image_sizes("448x336, 1024x768x2,640x480x1-4") == (
        ImageSize(448, 336),
        ImageSize(1024, 768, 2, 2),
        ImageSize(640, 480, 1, 4),
    )
    assert image_sizes("") == ()


@pytest.mark.parametrize("text", ["448", "448x336x0", "448x336x3-2", "0x336", "448x336x1-", "axb", "4x4x1-2-3"])
def test_entry_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="VLLM_MULTIMODAL_RESOLUTIONS: "):
        image_sizes(text)


@pytest.mark.parametrize(
    ("num_images", "batches", "expected"),
    [
        (11, (1, 2, 4, 8), (8, 2, 1)),
        (17, (1, 2, 4, 8), (8, 8, 1)),
        (3, (2, 4), (2, 2)),
        (1, (4, 8), (4,)),
        (0, (1, 2), ()),
        (5, (), (5,)),
    ],
)
def test_images_fill_the_largest_batches_and_the_rest_is_padded(num_images, batches, expected):
    assert image_batches(num_images, batches) == expected
