"""Folders that are complete or not there: each is made beside its place and moved there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace(part: Path, target: Path) -> None:
    """Moves a complete folder to its place; at any moment there is one that is complete."""
    old = target.with_name(f"{target.stem}.old{target.suffix}")
    if target.exists():
        _retire(old)
        os.replace(target, old)
    os.replace(part, target)
    _retire(old)


def _retire(folder: Path) -> None:
    """Removes a folder, of which no part is ever there under its name."""
    hidden = folder.with_name(f".{folder.name}")
    discard(hidden)
    if folder.exists():
        os.replace(folder, hidden)
        discard(hidden)


def discard(folder: Path) -> None:
    """Removes a folder, or a file in its place, if it is there."""
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)  # a checkpoint of one file was there
