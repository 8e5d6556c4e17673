"""Split a batch into micro-batches: what in it are rows, and what goes whole to every micro-batch.

Rows are what most tensors of the batch have along their first dimension. Values with that many rows
are split, everything else goes whole to every micro-batch; a *rule* says otherwise for a key.
Pieces may be uneven; their weights are their rows. Knows nothing of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_pipe.errors import BatchError, ConfigError
from lightning_pipe.split.nest import describe, first_size, is_text_list, items, leaves, rebuilt

#: "replicate" or None: whole to every micro-batch; "list": one item per row; a number: the
#: dimension of the rows
Rule = int | str | None
REPLICATE, LIST = "replicate", "list"
_NO_RULES: Mapping[str, Rule] = {}
UNRULED: Any = object()
"""No rule is for this key."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A batch, split.

    Attributes:
        batches: The micro-batches, each of the structure of the batch.
        rows: Rows of each.
    """

    batches: tuple[Any, ...]
    rows: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each micro-batch in a mean over the rows; they sum to 1."""
        total = sum(self.rows)
        return tuple(rows / total for rows in self.rows)


def check_rules(rules: Mapping[str, Any]) -> None:
    """Refuse rules that mean nothing.

    Raises:
        ConfigError: With the key and what was given for it.
    """
    for key, rule in rules.items():
        known = rule is None or rule in (REPLICATE, LIST)
        is_dim = isinstance(rule, int) and not isinstance(rule, bool) and rule >= 0
        if not isinstance(key, str) or not (known or is_dim):
            raise ConfigError(
                f"split_batch={{{key!r}: {rule!r}}}: keys are names of values in the batch, such "
                f"as 'mask' or 'inputs.mask'; give 'replicate', 'list', or the number of the "
                f"dimension of the rows, 0 at least"
            )


def unused_rules(batch: Any, rules: Mapping[str, Rule]) -> list[str]:
    """Name the keys of ``rules`` that are nowhere in the batch."""
    paths = list(_paths(batch, ""))
    return [key for key in rules if not any(_matches(path, key) for path in paths)]


def count_rows(batch: Any, rules: Mapping[str, Rule] = _NO_RULES) -> int:
    """Return the number of rows of a batch: the most frequent first size among its tensors.

    Tensors that are in lists inside of the batch count less than others: a list of pictures, one
    per row, says nothing. Of sizes that are equally frequent, the one of the tensor with more
    dimensions counts, then the first. Size 1 counts only if there is no other.

    Args:
        batch: Any nest of tensors.
        rules: What the user says about keys; a dimension or "list" decides.

    Raises:
        BatchError: Nothing in the batch has rows, or there are none.

    >>> count_rows({"x": torch.ones(6, 4), "y": torch.ones(6), "classes": torch.ones(3)})
    6
    """
    votes = list(_votes(batch, "", rules, inside=False, top=True))
    ruled = [vote for vote in votes if vote.ruled]
    rows = _elect(ruled or votes) if ruled or any(not vote.inside for vote in votes) else None
    if rows is None:
        rows = _rows_of_lists(batch, rules)
    if rows is None and votes:
        rows = _elect(votes)
    if rows is None:
        texts = Counter(len(value) for value in _text_lists(batch))
        rows = texts.most_common(1)[0][0] if texts else None
    if rows is None:
        raise BatchError(
            f"the batch cannot be split into micro-batches: it is {describe(batch)} and "
            "no tensor in it "
            "has a first dimension; give num_microbatches=1, or batches of tensors with rows"
        )
    if rows == 0:
        raise BatchError(
            f"the batch cannot be split into micro-batches: {describe(batch)} has 0 rows; "
            "give batches with 1 row at least"
        )
    return rows


def has_rows(batch: Any) -> bool:
    """Tell whether a batch could be split at all."""
    if any(first_size(leaf) for leaf in leaves(batch)) or any(_text_lists(batch)):
        return True
    return any(isinstance(value, PackedSequence) for value in _values(batch))


def piece_sizes(rows: int, num_pieces: int) -> tuple[int, ...]:
    """Return how many rows each piece gets: the first ones take the remainder.

    >>> piece_sizes(6, 4)
    (2, 2, 1, 1)
    """
    least, more = divmod(rows, num_pieces)
    return tuple(least + (piece < more) for piece in range(num_pieces))


def split_batch(batch: Any, num_microbatches: int, rules: Mapping[str, Rule] = _NO_RULES) -> Pieces:
    """Split a batch by rows into that many pieces, or into single rows if there are fewer.

    Row-wise tensors, arrays, packed sequences and lists are split (tensors as views), all else is
    the same object in each piece. A list is row-wise if it has one item per row and nothing inside
    of an item has rows of its own.

    Args:
        batch: Any nest of tensors.
        num_microbatches: Pieces that are wanted.
        rules: By key ("mask", "inputs.mask", "0.mask" in a tuple): "replicate", "list", or the
            dimension of the rows. Counts for all that is below the key.

    Raises:
        BatchError: The batch has no rows, or does not fit a rule.

    >>> split_batch([torch.arange(5), "all"], 2).batches
    ([tensor([0, 1, 2]), 'all'], [tensor([3, 4]), 'all'])
    """
    rows = 1 if num_microbatches == 1 and not has_rows(batch) else count_rows(batch, rules)
    sizes = piece_sizes(rows, min(num_microbatches, rows))
    if len(sizes) == 1:
        return Pieces((batch,), sizes)
    stops = np.cumsum(sizes).tolist()
    parts = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    return Pieces(tuple(_taken(batch, "", rows, part, rules) for part in parts), sizes)


# ---------------------------------------------------------------------- counting


@dataclass(frozen=True, slots=True)
class _Vote:
    size: int
    num_dims: int
    inside: bool  # of a list that is inside of the batch
    ruled: bool = False


def _votes(
    value: Any, path: str, rules: Mapping[str, Rule], *, inside: bool, top: bool = False
) -> Iterator[_Vote]:
    rule = rule_for(path, rules)
    if rule is not UNRULED:
        yield from _ruled_votes(value, rule)
        return
    size = first_size(value)
    found = items(value)
    if size is not None:
        num_dims = value.data.dim() + 1 if isinstance(value, PackedSequence) else value.ndim
        yield _Vote(size, num_dims, inside)
    elif found is not None:
        is_list = _is_plain_list(value)
        for key, item in found:
            in_list = inside or (is_list and (not top or items(item) is not None))
            yield from _votes(item, join_path(path, key), rules, inside=in_list)


def _ruled_votes(value: Any, rule: Any) -> Iterator[_Vote]:
    if rule == LIST and isinstance(value, (list, tuple)):
        yield _Vote(len(value), 0, inside=False, ruled=True)
    elif isinstance(rule, int):
        for leaf in leaves(value):
            if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > rule:
                yield _Vote(int(leaf.shape[rule]), leaf.ndim, inside=False, ruled=True)


def _elect(votes: Sequence[_Vote]) -> int:
    """The most frequent size; those outside of lists first, then by dimensions and order."""
    sizes = dict.fromkeys(vote.size for vote in votes if vote.size != 1) or {votes[0].size: None}
    outside = Counter(vote.size for vote in votes if not vote.inside)
    inside = Counter(vote.size for vote in votes if vote.inside)
    dims = {size: max(v.num_dims for v in votes if v.size == size) for size in sizes}
    return max(sizes, key=lambda size: (outside[size], inside[size], dims[size]))


def _rows_of_lists(batch: Any, rules: Mapping[str, Rule]) -> int | None:
    """The length of lists of records (one per row), where no tensor has rows of its own."""
    found = items(batch) or []
    lists = [value for _, value in found if _is_plain_list(value)]
    lengths = {len(value) for value in lists}
    if len(lists) > 1 and len(lengths) == 1 and any(map(_are_records, lists)):
        return lengths.pop()
    if len(found) > 1 and _is_plain_list(batch) and _are_records(batch):
        sizes = [{first_size(leaf) for leaf in leaves(record)} for record in batch]
        return None if all(len(s - {None}) <= 1 and None not in s for s in sizes) else len(batch)
    return None


def _are_records(value: Any) -> bool:
    keys = [tuple(item) if isinstance(item, Mapping) else None for item in value]
    return bool(keys) and keys[0] is not None and all(other == keys[0] for other in keys)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _values(value: Any) -> Iterator[Any]:
    yield value
    for _, item in items(value) or ():
        yield from _values(item)


def _text_lists(value: Any) -> Iterator[Sequence[str]]:
    return (found for found in _values(value) if is_text_list(found))


# ---------------------------------------------------------------------- rules


def join_path(path: str, key: Any) -> str:
    """The path of an item."""
    return f"{path}.{key}" if path else str(key)


def _paths(value: Any, path: str) -> Iterator[str]:
    yield path
    for key, item in items(value) or ():
        yield from _paths(item, join_path(path, key))


def _matches(path: str, key: str) -> bool:
    return path == key or (bool(key) and path.endswith("." + key))


def rule_for(path: str, rules: Mapping[str, Rule]) -> Any:
    """What the user says about a path; `UNRULED` for nothing."""
    if not rules:
        return UNRULED
    if path in rules:
        return rules[path]
    return next((rule for key, rule in rules.items() if _matches(path, key)), UNRULED)


def _by_rule(value: Any, path: str, rows: int, part: slice, rule: Any) -> Any:
    if rule is None or rule == REPLICATE:
        return value
    if rule == LIST:
        if not isinstance(value, (list, tuple)) or len(value) != rows:
            raise _misfit(path, rule, value, rows)
        return value[part]
    if items(value) is not None:
        return rebuilt(value, lambda item: _by_rule(item, path, rows, part, rule))
    if not isinstance(value, (Tensor, np.ndarray)):
        return value
    if value.ndim <= rule or value.shape[rule] != rows:
        raise _misfit(path, rule, value, rows)
    return value[(slice(None),) * rule + (part,)]


def _misfit(path: str, rule: Any, value: Any, rows: int) -> BatchError:
    return BatchError(
        f"split_batch={{{path!r}: {rule!r}}}: the batch has {rows} rows, but this is "
        f"{describe(value)}; name the dimension of size {rows}, or 'replicate'"
    )


# ---------------------------------------------------------------------- taking


def _taken(value: Any, path: str, rows: int, part: slice, rules: Mapping[str, Rule]) -> Any:
    rule = rule_for(path, rules)
    if rule is not UNRULED:
        return _by_rule(value, path, rows, part, rule)
    if first_size(value) is not None:
        return _rows_of(value, part) if first_size(value) == rows else value
    found = items(value)
    if found is None:
        return value
    if is_list_of_rows(value, rows):
        return value[part]
    keys = iter(found)
    return rebuilt(
        value, lambda item: _taken(item, join_path(path, next(keys)[0]), rows, part, rules)
    )


def is_list_of_rows(value: Any, rows: int) -> bool:
    """Tell whether a value is a list with an item for each row."""
    return _is_plain_list(value) and len(value) == rows and _is_row_wise(value, rows)


def _is_row_wise(value: Any, rows: int) -> bool:
    """Tell whether a list of as many items as rows has one for each."""
    if all(items(item) is None and first_size(item) is None for item in value):
        # numbers in a tuple are a size, (224, 224); in a list there is one per row
        return isinstance(value, list) or is_text_list(value)
    has_rows = [
        any(
            first_size(found) == rows or (is_text_list(found) and len(found) == rows)
            for found in _values(item)
        )
        for item in value
    ]
    # one of the records may have as many boxes as there are rows
    return not (all(has_rows) if _are_records(value) else any(has_rows))


def _rows_of(value: Any, part: slice) -> Any:
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return pack_padded_sequence(
            padded[part], lengths[part], batch_first=True, enforce_sorted=False
        )
    if not isinstance(value, Tensor):
        return value[part]
    if value.is_nested:
        return torch.nested.nested_tensor(list(value.unbind()[part]), layout=value.layout)
    if value.layout is torch.strided:
        return value[part]
    chosen = torch.arange(part.start, part.stop, device=value.device)
    if value.layout is torch.sparse_coo:
        return value.index_select(0, chosen)
    return value.to_sparse_coo().index_select(0, chosen).to_sparse(layout=value.layout)
