"""Static shapes of image encoders: how many images, or how many patches, run together. Rules alone; no backend uses them.

Source: vllm-gaudi, extension/bucketing/vision.py, rules of 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

__all__ = ["BATCHES", "PATCHES", "ImageSize", "image_batches", "image_sizes", "vision_buckets"]

BATCHES = (1, 2, 4, 8)
"""Images that run together, of a model without patch counts of its own."""

PATCHES = {
    "qwen2_5_vl": (1600, 3136, 4096, 6400, 7744, 9216, 12544),
    "qwen3_vl": (196, 256, 441, 480, 576, 900, 1156),
    "qwen3_5": (),
    "kimi_k25": (),
    "gemma4": (),
}
"""Patches of one pass by model type; none where shapes are used as they come."""

_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})(?:x(\d{1,6})(?:-(\d{1,6}))?)?")


@attrs.frozen
class ImageSize:
    """Images to prepare for.

    Attributes:
        width: Pixels.
        height: Pixels.
        min_images: Fewest images of a request, at least 1.
        max_images: Most images of a request.
    """

    width: int
    height: int
    min_images: int = 1
    max_images: int = 1


def vision_buckets(model_type: str, text: str = "") -> tuple[int, ...]:
    """Return the batch sizes, or for model types in :data:`PATCHES` the patch counts, ascending. Pure.

    Args:
        model_type: As the model's own configuration says.
        text: ``VLLM_MULTIMODAL_BUCKETS``: numbers with commas between them, or ``None`` for no buckets; empty: the model's.

    Raises:
        ValueError: The text is neither.
    """
    if not text:
        return PATCHES.get(model_type, BATCHES)
    if text == "None":
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(
            f"VLLM_MULTIMODAL_BUCKETS={text}: neither numbers of 1 or more with commas between them, nor None"
        )
    return tuple(sorted({int(word) for word in words}))


def image_sizes(text: str) -> tuple[ImageSize, ...]:
    """Return what ``VLLM_MULTIMODAL_RESOLUTIONS`` lists: ``WxH``, ``WxHxN`` or ``WxHxN-M``, with commas between. Pure.

    Raises:
        ValueError: An entry is none of these, or its numbers of images are not 1 or more and ascending.
    """
    return tuple(_image_size(entry.strip()) for entry in text.split(",") if entry.strip())


def _image_size(entry: str) -> ImageSize:
    match = _SIZE.fullmatch(entry)
    if match is None:
        raise ValueError(f"VLLM_MULTIMODAL_RESOLUTIONS: {entry!r} is not of the form WxH, WxHxN or WxHxN-M")
    width, height, fewest, most = (int(group) if group else None for group in match.groups())
    fewest = 1 if fewest is None else fewest
    most = fewest if most is None else most
    if not width or not height or not 1 <= fewest <= most:
        raise ValueError(f"VLLM_MULTIMODAL_RESOLUTIONS: {entry!r}: sizes are 1 or more, and so are images, ascending")
    return ImageSize(width, height, fewest, most)


def image_batches(num_images: int, batches: Sequence[int]) -> tuple[int, ...]:
    """Return the batches in which images run: the largest that is full, again and again; what is left fills the smallest. Pure.

    Args:
        num_images: 0 or more.
        batches: Prepared batch sizes, ascending; none: all images are one batch.
    """
    found = []
    while num_images > 0:
        full = [size for size in batches if size <= num_images]
        size = full[-1] if full else min(batches, default=num_images)
        found.append(size)
        num_images -= size
    return tuple(found)
