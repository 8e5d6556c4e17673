"""Stage-local state to whole-model state.

Every rank holds part of the names; the first global rank of the pipeline collects them one by one,
so that no more than one tensor is under way and nobody else needs memory for the whole model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from lightning_pipe.errors import CheckpointError
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.share import gather_objects, receive_object, send_object

K = TypeVar("K", bound=Hashable)


def gather_state(
    ranks: Ranks, local: Mapping[K, Any], owner_of: Mapping[K, int]
) -> dict[K, Any] | None:
    """Collects the state of a model, or of an optimizer, on the first global rank of the pipeline.

    Args:
        ranks: This rank.
        local: What this rank holds: tensors by name, or the state of the optimizer by parameter
        index.
            Any values that can be pickled; what it holds but does not own is left out.
        owner_of: The position that has each entry, in the order of the result; the same on all
        ranks. A
            replicated parameter has one owner.

    Returns:
        The whole on that rank, with the tensors of others on the host; None elsewhere.

    Raises:
        CheckpointError: An owner does not have its entry; on all ranks.
    """
    own = [key for key, owner in owner_of.items() if owner == ranks.position]
    missing = gather_objects(ranks, [key for key in own if key not in local])
    assert missing is not None
    if any(missing):
        raise CheckpointError(
            "the stages do not make up the whole: "
            + "; ".join(f"rank {r} lacks {keys}" for r, keys in enumerate(missing) if keys)
        )
    if not ranks.is_first:
        for key in own:
            send_object(ranks, local[key], ranks.first_position)
        return None
    return {
        key: local[key] if owner == ranks.position else receive_object(ranks, owner)
        for key, owner in owner_of.items()
    }
