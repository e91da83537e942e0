"""Names for the array types that records and contracts use, and the way to show one to a strategy."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["BoolArray", "Float32Array", "FloatArray", "Int32Array", "Int64Array", "read_only"]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
A = TypeVar("A", bound=npt.NDArray[np.generic])


def read_only(array: A) -> A:
    """Return a view of an array that cannot be written to, nor made writable again as a plain view can. Pure; O(1)."""
    view: A = np.asarray(memoryview(array).toreadonly())  # type: ignore[arg-type,assignment]
    return view
