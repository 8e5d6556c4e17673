"""The ``lru_cache`` of user code: a helper that ran on fakes would return them to a real step."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

#: packages whose memoised helpers never hold tensors of a user's step
_SAFE_CACHES = frozenset(
    (
        *("torch", "re", "functools", "typing", "inspect", "sympy", "lightning", "torchmetrics"),
        *("jsonargparse", "rich", "networkx", "numpy"),
    )
)
_MEMOISED: weakref.WeakSet[Any] = weakref.WeakSet()


def clear_memoised(*, search: bool = True) -> None:
    """Empty the memoised helpers of user code.

    Args:
        search: Look for such helpers among all objects; if not, those of the last search are meant.
    """
    if search:
        for item in gc.get_objects():
            if type(item) is functools._lru_cache_wrapper:
                root = (getattr(item, "__module__", "") or "").split(".")[0]
                if root not in _SAFE_CACHES:
                    _MEMOISED.add(item)
    for item in _MEMOISED:
        if item.cache_info().currsize:
            item.cache_clear()
