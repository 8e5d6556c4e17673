"""Tensors in a folder of `torch.distributed.checkpoint`, each of which is read when it is used.

So a rank reads no more than it looks at, and never holds the whole of a model that it has a part
of.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_pipe.errors import CheckpointError
from lightning_pipe.split.stored import StoredTensor

#: what the index of a folder is made of: nothing that runs code of others
_KNOWN = ("torch.distributed.checkpoint.", "torch.storage", "torch.serialization")
_KNOWN_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _Reader(FileSystemReader):
    """Reads an index once, and lets it make nothing but an index."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                self._index = _Unpickler(file).load()
            if getattr(self._index, "storage_meta", None) is not None:
                self._index.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return self._index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module.startswith(_KNOWN) or (module, name) in _KNOWN_NAMES
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise CheckpointError(
                f"the index of the checkpoint asks for {module}.{name}, which no index has: the "
                "file was changed, and loading it could run any code. Use another checkpoint"
            )
        return super().find_class(module, name)


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a folder, by their keys.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    reader = _Reader(str(folder))
    try:
        entries = list(reader.read_metadata().state_dict_metadata.items())
        return {
            key: StoredTensor(
                torch.Size(entry.size), entry.properties.dtype, _read(reader, key, entry)
            )
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no complete checkpoint: it has no index (.metadata), which is written "
            "last. Give the one before"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"the index of {folder} cannot be read: {error!r}") from error


def _read(reader: _Reader, key: str, entry: TensorStorageMetadata) -> Callable[[], Tensor]:
    def read() -> Tensor:
        value = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process reads, on purpose
            try:
                load({key: value}, storage_reader=reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # which is no Exception
                raise CheckpointError(
                    f"'{key}' cannot be read from {reader.path}: {error}. The folder was cut short "
                    "or changed; give the checkpoint before"
                ) from error
        return value

    return read
