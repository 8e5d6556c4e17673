"""Checkpoints of which every rank writes its part, with `torch.distributed.checkpoint`.

A folder holds the tensors of the model and its optimizers under names that say nothing of stages,
and `meta.pt`, an ordinary Lightning checkpoint without them. It is written beside its place and
moved there when all ranks are done, so that a crash leaves the old one or the new one. A folder
takes no folder's place in one go: between two steps the old one is there as `last.old.ckpt`, which
`ckpt_path="last"` finds too.

    last.ckpt/  .metadata  __0_0.distcp  __1_0.distcp  ...  meta.pt
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from lightning_pipe.errors import CheckpointError, ConfigError
from lightning_pipe.folders import discard, replace
from lightning_pipe.manners import AtomicCheckpointIO, to_disk
from lightning_pipe.runtime.axes import DATA
from lightning_pipe.runtime.meeting import at, meet
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.share import gather_objects
from lightning_pipe.runtime.stored import stored_tensors

META = "meta.pt"
_PARTS = "lightning_pipe_parts"
_VERSION = 1


class ShardedCheckpoints:
    """Writes folders; all ranks of a pipeline call everything here together.

    Args:
        ranks: This rank.
        group: A gloo group of the ranks that write; None if there is one.
        in_background: Whether training goes on meanwhile.
        by_all_copies: Whether other copies of the pipeline hold parts of the weights, too.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
        *,
        in_background: bool = False,
        by_all_copies: bool = False,
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._in_background = in_background and group is not None
        self._by_all_copies = by_all_copies
        self._pending: Future[Any] | None = None
        self._removals: list[Callable[[], None]] = []

    def save(self, checkpoint: Mapping[str, Any], path: Any, order: Sequence[str]) -> None:
        """Writes this rank's part of a checkpoint; in the background if there is a group for it.

        Args:
            checkpoint: As Lightning makes it, with this rank's own weights and optimizer state.
            path: The folder to be.
            order: The names of the model's whole state.

        Raises:
            CheckpointError: It, or the one before, could not be written.
        """
        if "://" in str(path):
            raise CheckpointError(
                f"{path}: sharded checkpoints are written to a file system that all ranks share; "
                "give a path there, or save_distributed_checkpoint=False"
            )
        if self._ranks.data_parallel_rank and not self._by_all_copies:  # copies have the same
            return
        self.wait()
        target = Path(path)
        part = target.with_name(f".{target.name}.part")
        tensors, rest = _taken_apart(checkpoint)
        if self._ranks.is_spare:
            tensors = {key: value for key, value in tensors.items() if isinstance(value, DTensor)}
        else:
            with at(self._ranks, "begins to write a checkpoint"):
                parts = gather_objects(self._ranks, rest, self._ranks.first_position)
                if parts is not None:
                    _begin(part, {**checkpoint, **_joined(parts, order)})
        self._meet("has begun to write a checkpoint")  # whoever writes first would make the folder
        if not self._in_background:
            with at(self._ranks, "writes its part of a checkpoint"):
                _write(tensors, part, self._group)
            self._finish(part, target)
            return
        # it copies first what training goes on to change
        response = async_save(tensors, checkpoint_id=str(part), process_group=self._group)
        pending = cast("Future[Any]", getattr(response, "upload_completion", response))
        done: Future[Any] = Future()

        def finish(written: Future[Any]) -> None:
            try:
                written.result()
                self._finish(part, target)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        pending.add_done_callback(finish)
        self._pending = done

    def _meet(self, place: str) -> None:
        """Waits for the ranks of this pipeline, then for the others that write."""
        meet(self._ranks, place)
        others = self._ranks.copies if self._by_all_copies else self._ranks.tensor
        if others is not None:
            meet(others, place)

    def wait(self) -> None:
        """Until what is written in the background is there.

        Raises:
            CheckpointError: It could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"the last checkpoint was not written: {error}") from error
        self._remove_old()

    def remove(self, remove: Callable[[], None]) -> None:
        """Removes an old checkpoint, when the new one is complete."""
        if self._pending is None or self._pending.done():
            remove()
        else:
            self._removals.append(remove)

    def _finish(self, part: Path, target: Path) -> None:
        """Moves a folder to its place, on the rank that logs."""
        if not self._ranks.is_first or self._ranks.is_spare:
            return
        lacking = [name for name in _files(part) if not (part / name).exists()]
        if lacking:
            raise CheckpointError(
                f"{part} lacks {', '.join(lacking)}, which other ranks have written: the folder is "
                "not on a file system that all ranks share. Give one that is, or "
                "save_distributed_checkpoint=False"
            )
        replace(part, target)
        self._remove_old()

    def _remove_old(self) -> None:
        while self._removals:
            self._removals.pop()()


def is_sharded(path: Any) -> bool:
    """Whether a path is a folder that this module has written."""
    return "://" not in str(path) and (Path(path) / META).is_file()


def read_sharded(path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Reads a checkpoint as of one file; its tensors are read when they are used.

    Args:
        path: The folder.
        weights_only: As of `torch.load`, for `meta.pt`.

    Raises:
        CheckpointError: The folder is not complete.
    """
    folder = Path(path)
    try:
        checkpoint: dict[str, Any] = torch.load(
            folder / META, map_location="cpu", weights_only=weights_only is not False
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{folder / META} cannot be read: {error}. If it holds objects, such as "
            "hyperparameters, and you trust who wrote it, give weights_only=False to the Trainer's "
            "method, or --trusted to `lightning-pipe consolidate`"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{folder / META} is damaged: {error}. Give the checkpoint before, or a copy"
        ) from error
    parts = checkpoint.pop(_PARTS, None)
    if not isinstance(parts, dict) or parts.get("version") != _VERSION:
        raise CheckpointError(
            f"{folder / META} is of another version or program; a checkpoint of lightning-pipe "
            f"{_VERSION} was expected"
        )
    tensors = stored_tensors(folder)

    def of(key: str) -> Any:
        if key in tensors:
            return tensors[key]
        if key not in parts["others"]:
            raise CheckpointError(f"{folder} lacks '{key}': it was cut short or changed")
        return parts["others"][key]

    checkpoint["state_dict"] = {name: of(_weight(name)) for name in parts["state_dict"]}
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            {
                **state,
                "state": {
                    index: {key: of(_entry(number, index, key)) for key in keys}
                    if keys is not None
                    else of(_entry(number, index, None))
                    for index, keys in entries
                },
            }
            for number, (state, entries) in enumerate(
                zip(checkpoint["optimizer_states"], parts["optimizers"], strict=True)
            )
        ]
    return checkpoint


def consolidate(folder: Any, file: Any, *, weights_only: bool = True) -> None:
    """Makes one plain Lightning file of a folder; it takes memory for the whole of it.

    Raises:
        CheckpointError: The folder is not complete.
    """
    if not is_sharded(folder):
        raise CheckpointError(
            f"{folder} is no folder of a sharded checkpoint ({META} is not there)"
        )
    checkpoint = read_sharded(folder, weights_only)
    checkpoint["state_dict"] = {n: _whole(v) for n, v in checkpoint["state_dict"].items()}
    for state in checkpoint.get("optimizer_states", ()):
        state["state"] = {
            index: {k: _whole(v) for k, v in entry.items()} if isinstance(entry, dict) else entry
            for index, entry in state["state"].items()
        }
    target = Path(file)
    part = target.with_name(f".{target.name}.part")
    try:
        torch.save(checkpoint, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_wanted(wanted: bool | str) -> bool | str:
    """The argument of the strategy, if it is legal.

    Raises:
        ConfigError: It is not.
    """
    if wanted not in (False, True, "async"):
        raise ConfigError(f"save_distributed_checkpoint={wanted!r}: give True, False or 'async'")
    return wanted


def refuse_io(io: CheckpointIO) -> None:
    """Refuses a plug-in for files beside folders.

    Raises:
        ConfigError: With the alternative.
    """
    if type(io) is not AtomicCheckpointIO:
        raise ConfigError(
            f"save_distributed_checkpoint with {type(io).__name__}: each rank writes its part with "
            "torch.distributed.checkpoint, and the plug-in would not be asked. Leave one of them "
            "out; save_distributed_checkpoint='async' writes in the background"
        )


def make_group(
    ranks: Ranks, *, in_background: bool, by_all_copies: bool
) -> dist.ProcessGroup | None:
    """The group of the ranks that write; every process of the job has to call this.

    Args:
        ranks: This rank.
        in_background: Whether it is used while training goes on, and so by nobody else.
        by_all_copies: Whether all copies of the pipeline write.
    """
    axes = ranks.axes
    if axes.tensor_parallel == 1 and not by_all_copies and not in_background:
        return ranks.control_group
    made: dist.ProcessGroup | None = None
    writers: dict[int, list[int]] = {}
    for rank in range(axes.num_ranks):
        writers.setdefault(0 if by_all_copies else axes.place(DATA, rank), []).append(rank)
    for members in writers.values():
        if len(members) > 1:
            group = dist.new_group(members, backend="gloo")
            if ranks.global_rank in members:
                made = group
    return made


def _weight(name: str) -> str:
    return f"state_dict/{name}"


def _entry(number: int, index: Any, key: str | None) -> str:
    return f"optimizer/{number}/{index}" + ("" if key is None else f"/{key}")


def _taken_apart(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of this rank by their keys, and what else its part consists of."""
    found: dict[str, Any] = {_weight(n): v for n, v in checkpoint["state_dict"].items()}
    optimizers: list[list[tuple[Any, list[str] | None]]] = []
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        entries: list[tuple[Any, list[str] | None]] = []
        for index, entry in state["state"].items():
            if isinstance(entry, Mapping):
                entries.append((index, list(entry)))
                found |= {_entry(number, index, key): value for key, value in entry.items()}
            else:
                entries.append((index, None))
                found[_entry(number, index, None)] = entry
        optimizers.append(entries)
    tensors = {k: v.detach().contiguous() for k, v in found.items() if _is_plain(v)}
    others = {k: v for k, v in found.items() if k not in tensors}
    return tensors, {
        "state_dict": list(checkpoint["state_dict"]),
        "optimizers": optimizers,
        "others": others,
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0


def _joined(parts: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """What `meta.pt` says about the tensors, of what each rank says."""
    places = {name: place for place, name in enumerate(order)}
    names = [name for part in parts for name in part["state_dict"]]
    optimizers = [
        sorted((e for entries in of_all for e in entries), key=lambda e: (type(e[0]) is str, e[0]))
        for of_all in zip(*(part["optimizers"] for part in parts), strict=True)
    ]
    return {
        _PARTS: {
            "version": _VERSION,
            "state_dict": sorted(names, key=lambda name: places.get(name, len(places))),
            "optimizers": optimizers,
            "others": {k: v for part in parts for k, v in part["others"].items()},
        }
    }


def _begin(part: Path, checkpoint: dict[str, Any]) -> None:
    """Makes a folder with what is no tensor of the model or its optimizers."""
    discard(part)
    part.mkdir(parents=True)
    checkpoint["state_dict"] = {}
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            {**state, "state": {}} for state in checkpoint["optimizer_states"]
        ]
    torch.save(checkpoint, part / META)
    to_disk(part / META)


def _write(tensors: dict[str, Any], part: Path, group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process writes, where there is one
        try:
            save(
                tensors,
                checkpoint_id=str(part),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:  # of any rank, on all
            raise CheckpointError(
                f"{part} cannot be written: {error}. The checkpoint before it is as it was"
            ) from error


def _files(part: Path) -> list[str]:
    index = FileSystemReader(str(part)).read_metadata()
    return sorted({info.relative_path for info in (index.storage_data or {}).values()})


def _whole(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
