"""One example trained twice: by a loop of a page on one device, and by the strategy.

The loop knows nothing of the package but the documented seeds of modules that draw. Where rows
depend on each other (batch norm, dropout, a question to the batch) it takes the micro-batches one
by one, as the documentation says that the strategy does.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from tests.fuzz.model import FuzzModule, Program, as_dict, batches_of, build, optimizer_for
from tests.fuzz.parts import draws
from tests.fuzz.programs import Example, example_of
from tests.split.parity import own_streams
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy
from lightning_pipe.errors import CutError, PeerError, PipelineError
from lightning_pipe.split.rng import mix

TOLERANCE = 1e-9
EQUAL, REFUSED, INVALID, DIFFERS, ERROR = "equal", "refused", "invalid", "differs", "error"


@dataclass(frozen=True)
class Outcome:
    """What became of an example on one rank."""

    seed: int
    kind: str
    text: str = ""


@dataclass
class Numbers:
    """What a training leaves behind."""

    state: dict[str, Tensor]
    losses: list[float]
    validated: float | None = None


# ---------------------------------------------------------------------- one device


def microbatches(example: Example, rows: int) -> int:
    """How many pieces the documentation says that a batch has."""
    return min(example.microbatches, max(1, rows // (2 if example.has_norms else 1)))


def piece(value: Any, rows: int, start: int, stop: int) -> Any:
    """Rows of a batch: of whatever has that many."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and len(value) == rows else value
    if isinstance(value, dict):
        return {key: piece(item, rows, start, stop) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: piece(getattr(value, f.name), rows, start, stop) for f in fields(value)}
        return replace(value, **found)
    if isinstance(value, list) and len(value) == rows and isinstance(value[0], str):
        return value[start:stop]
    if isinstance(value, (list, tuple)):
        return type(value)(piece(item, rows, start, stop) for item in value)
    return value


def pieces(example: Example, batch: Any) -> list[Any]:
    """The batch as one device has to see it to be a measure."""
    rows = len(as_dict(batch)["x"])
    if not example.in_pieces:
        return [batch]
    count = microbatches(example, rows)
    stops = [sum(rows // count + (j < rows % count) for j in range(i + 1)) for i in range(count)]
    return [piece(batch, rows, a, b) for a, b in zip([0, *stops], stops, strict=False)]


@contextmanager
def _seeded(module: FuzzModule, example: Example, index: int, number: int) -> Iterator[None]:
    """The documented seeds of one micro-batch."""
    key = mix(mix(example.seed, 0, index), number)
    with own_streams(module, key, lambda part: draws(part) or isinstance(part, Program)):
        yield


def one_device(example: Example) -> Numbers:
    """Three optimizer steps without Lightning's loops and without any of the package's."""
    module = build(example).train()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = optimizer_for(module, example.optimizer)
    batches, losses = batches_of(example), []
    for index, batch in enumerate(batches):
        losses.append(_one_batch(module, example, index, batch))
        if (index + 1) % example.accumulate == 0:
            _clip(module, example)
            optimizer.step()
            optimizer.zero_grad()
    validated = None
    if example.validates:
        module.eval()
        with torch.no_grad():
            values = as_dict(batches[0])
            last = module.run_program(values)[-1]
            validated = torch.nn.functional.mse_loss(last, values["y"]).item()
    return Numbers(dict(module.state_dict()), losses, validated)


def _one_batch(module: FuzzModule, example: Example, index: int, batch: Any) -> float:
    counters = {n: b.clone() for n, b in module.named_buffers() if n in ("count", "seen")}
    found, weights = [], []
    for number, part in enumerate(pieces(example, batch)):
        for name, buffer in counters.items():
            getattr(module, name).copy_(buffer)  # a step counts once
        with _seeded(module, example, index, number) if example.in_pieces else nullcontext():
            loss, weight = module.loss_of(as_dict(part))
        if example.counts:
            module.count += 1
            module.seen += len(as_dict(batch)["x"])
        found.append(loss)
        weights.append(len(as_dict(part)["x"]) if weight is None else weight)
    if weights[0] == "sum":
        loss = torch.stack(found).sum()
    else:
        shares = torch.tensor([float(w) for w in weights], dtype=torch.float64)
        loss = (torch.stack(found) * shares).sum() / shares.sum()
    loss = loss / example.accumulate  # which is what callbacks are told, too
    loss.backward()
    return loss.item()


def _clip(module: FuzzModule, example: Example) -> None:
    if example.clip is None:
        return
    kind, value = example.clip
    if kind == "norm":
        torch.nn.utils.clip_grad_norm_(module.parameters(), value)
    else:
        torch.nn.utils.clip_grad_value_(module.parameters(), value)


# ---------------------------------------------------------------------- the strategy


class Losses(pl.Callback):
    """Takes down the loss of every batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def over_stages(example: Example) -> tuple[pl.Trainer, Numbers]:
    """The same by a Trainer with the strategy."""
    module, losses = build(example), Losses()
    loader = DataLoader(batches_of(example), batch_size=None)
    torch.manual_seed(example.seed)
    clip = example.clip or (None, None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=example.ranks,
        strategy=PipelineStrategy(
            virtual_stages=example.chunks,
            num_microbatches=example.microbatches,
            schedule=example.schedule,
            activation_checkpointing=example.recompute,
            balance=example.balance,
        ),
        max_epochs=1,
        accumulate_grad_batches=example.accumulate,
        gradient_clip_algorithm=clip[0],
        gradient_clip_val=clip[1],
        limit_val_batches=1 if example.validates else 0,
        num_sanity_val_steps=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, loader, loader if example.validates else None)
    except PipelineError as error:
        error.__dict__["steps"] = trainer.global_step
        raise
    validated = trainer.callback_metrics.get("validated")
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return trainer, Numbers(state, losses.found, None if validated is None else float(validated))


# ---------------------------------------------------------------------- compared


def differences(expected: Numbers, got: Numbers) -> list[str]:
    """Says where two trainings differ by more than rounding."""
    found = []
    if expected.state.keys() != got.state.keys():
        found.append(f"other names: {sorted(expected.state.keys() ^ got.state.keys())}")
    for name in expected.state.keys() & got.state.keys():
        one, other = expected.state[name].double(), got.state[name].double()
        if one.shape != other.shape:
            found.append(f"{name}: {tuple(other.shape)} and not {tuple(one.shape)}")
            continue
        error = float((one - other).abs().max()) if one.numel() else 0.0
        if not error <= TOLERANCE * max(1.0, float(one.abs().max()) if one.numel() else 0.0):
            found.append(f"{name}: {error:.1e}")
    pairs = list(zip(expected.losses, got.losses, strict=False))
    if len(expected.losses) != len(got.losses):
        found.append(f"{len(got.losses)} losses and not {len(expected.losses)}")
    pairs += [(expected.validated, got.validated)] if expected.validated is not None else []
    for number, (one_loss, other_loss) in enumerate(pairs):
        if not _near(one_loss, other_loss):
            found.append(f"loss {number}: {other_loss} and not {one_loss}")
    return found


def _near(one: float, other: float | None) -> bool:
    return other is not None and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def is_usable(numbers: Numbers) -> bool:
    """Whether rounding is no part of the story: finite, and not huge."""
    values = [*numbers.losses, *(float(v.abs().max()) for v in numbers.state.values() if v.numel())]
    return all(math.isfinite(value) and abs(value) < 1e4 for value in values)


def judge(example: Example) -> Outcome:
    """Trains an example both ways in this process, which is one of its ranks."""
    try:
        expected = one_device(example)
    except Exception as error:  # no example: torch or the model refuses it
        return Outcome(example.seed, INVALID, f"{type(error).__name__}: {error}")
    if not is_usable(expected):
        return Outcome(example.seed, INVALID, "not finite")
    before = random.getstate(), np.random.get_state()
    try:
        _, got = over_stages(example)
    except PeerError as error:
        return Outcome(example.seed, REFUSED, f"PeerError: {error}")
    except PipelineError as error:
        # what a unit's values will decide is not known before they do
        is_late = error.__dict__.get("steps") and not (
            example.peeks and isinstance(error, CutError)
        )
        kind = ERROR if is_late else REFUSED
        return Outcome(example.seed, kind, f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome(example.seed, ERROR, traceback.format_exc())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    found = differences(expected, got)
    return Outcome(example.seed, DIFFERS if found else EQUAL, "; ".join(sorted(found)))


def judge_all(seeds: list[int], ranks: int) -> list[Outcome]:
    """Examples one after the other, in every rank; stops after one that raised, whose process
    group is not to be trusted any more."""
    return _judged([copy.copy(example_of(seed, ranks)) for seed in seeds])


def judge_drawn(example: Example) -> list[Outcome]:
    """The one that is given."""
    return _judged([example])


def _judged(examples: list[Example]) -> list[Outcome]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for example in examples:
            outcomes.append(judge(example))
            if outcomes[-1].kind in (REFUSED, ERROR):
                break
    return outcomes


# ---------------------------------------------------------------------- many


def merged(outcomes: list[Outcome]) -> Outcome:
    """One outcome of those of all ranks."""
    kinds = {outcome.kind for outcome in outcomes}
    own = [o for o in outcomes if not o.text.startswith("PeerError")] or outcomes
    if kinds == {REFUSED} and own[0].text.startswith("PeerError"):
        return replace(own[0], kind=ERROR)
    if len(kinds) == 1:
        return own[0]
    worst = next(kind for kind in (ERROR, DIFFERS, REFUSED, EQUAL) if kind in kinds)
    found = next(o for o in own if o.kind == worst) if worst in {o.kind for o in own} else own[0]
    if REFUSED in kinds:  # others went on
        return replace(found, kind=ERROR, text=f"not the same on all ranks {kinds}: {found.text}")
    return found


def fuzz(seeds: list[int], pool: Any, *, per_body: int = 10) -> list[Outcome]:
    """Trains an example for each seed, in warm processes; nothing here waits for ever.

    Args:
        seeds: Of the examples; each says its number of ranks itself.
        pool: ``pool(n, fn, *args, timeout=...)`` runs a function on n ranks.
        per_body: Examples that are sent at once.
    """
    outcomes = []
    by_ranks: dict[int, list[int]] = {}
    for seed in seeds:
        by_ranks.setdefault(example_of(seed).ranks, []).append(seed)
    for ranks, todo in by_ranks.items():
        while todo:
            found = _some(todo[:per_body], ranks, pool)
            outcomes += found
            todo = todo[len(found) :]
    return outcomes


def fuzz_drawn(example: Example, pool: Any) -> Outcome:
    """Trains one example that no seed stands for."""
    try:
        results = pool(example.ranks, judge_drawn, example, timeout=35)
    except (AssertionError, ChildProcessError, RuntimeError) as error:
        others: list[list[Outcome]] = error.__dict__.get("others") or []
        return _ended(example.seed, error, [found[0] for found in others if found])
    return merged([result[0] for result in results])


def _some(seeds: list[int], ranks: int, pool: Any) -> list[Outcome]:
    """Some examples; after a hang or a death, those before it, or the first to see which it was."""
    try:
        results = pool(ranks, judge_all, seeds, ranks, timeout=30 + 5 * len(seeds))
    except (AssertionError, ChildProcessError, RuntimeError) as error:
        others: list[list[Outcome]] = error.__dict__.get("others") or []
        before = min((len(found) - 1 for found in others if found), default=0)
        outcome = _ended(seeds[0], error, [found[0] for found in others if found])
        if len(seeds) == 1 or (not before and outcome.kind == REFUSED):
            return [outcome]
        return _some(seeds[: max(1, before)], ranks, pool)
    shortest = min(len(result) for result in results)
    return [merged([result[i] for result in results]) for i in range(shortest)]


def _ended(seed: int, error: BaseException, others: list[Outcome]) -> Outcome:
    """Of an example of which a process ended: as documented, a rank that still waits seconds after
    another has refused; here nothing else ends its wait, since the refusing process stays."""
    refused = [o for o in others if o.kind == REFUSED and not o.text.startswith("PeerError")]
    if refused and "exit code 1" in str(error) and {o.kind for o in others} == {REFUSED}:
        return refused[0]
    return Outcome(seed, ERROR, f"hangs or dies: {error}")
