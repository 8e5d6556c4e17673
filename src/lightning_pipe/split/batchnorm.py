"""Modules whose result for a row depends on the other rows of its micro-batch: batch norms."""

from __future__ import annotations

from torch import nn

#: they refuse a micro-batch that leaves one value per channel
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the batch norms of ``root`` (lazy ones are subclasses)."""
    return [(n, m) for n, m in root.named_modules() if isinstance(m, BATCH_NORMS)]


def least_rows(norms: list[tuple[str, nn.Module]]) -> int:
    """How many rows a micro-batch needs: 2 where a batch norm takes its statistics from it."""
    return 2 if any(norm.training for _, norm in norms) else 1
