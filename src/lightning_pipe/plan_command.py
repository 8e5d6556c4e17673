"""`lightning-pipe plan`: from the YAML of `fit` to a plan, with one process and without weights.

The model is built with its large tensors as fakes, the first batch is read, the step is traced, and
the planner does the rest. `--measure` runs the units, one at a time, on a device that is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_pipe import _lightning as seam
from lightning_pipe.config_file import (
    ReadsConfig,
    count_devices,
    read_config,
    strategy_arguments,
)
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.layout import Layout
from lightning_pipe.planfile import read_costs
from lightning_pipe.planning.choose import Search, search
from lightning_pipe.planning.conclude import plan_of
from lightning_pipe.planning.costs import (
    FREE,
    GUESSED_CPU_FLOPS_PER_S,
    GUESSED_CPU_LINK,
    GUESSED_FLOPS_PER_S,
    GUESSED_LINK,
    CostTable,
    LinkCosts,
)
from lightning_pipe.planning.estimate import does_it_fit, parse_bytes, rule_of_thumb
from lightning_pipe.planning.memory import HEADROOM, Ledger, smallest_pipeline
from lightning_pipe.planning.plan import Plan, columns
from lightning_pipe.planning.profile import Profile
from lightning_pipe.planning.request import Request
from lightning_pipe.planning.topology import Topology
from lightning_pipe.runtime.measured import measured_costs
from lightning_pipe.split._fake import large_as_fakes, to_dtype
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.joining import join_batches
from lightning_pipe.split.profile import optimizer_state_bytes, profile_of
from lightning_pipe.split.rows import count_rows, split_batch

__all__ = ["plan"]

# What stands for a device of which nothing is known but that it is a current one.
_NODE_LINK = LinkCosts(latency_s=2e-5, bytes_per_s=1.2e10)
_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def plan(arguments: Sequence[str]) -> Plan | None:
    """Plans a run, prints ledger, plan and reasons, and writes the plan to a file."""
    options, rest = _parser().parse_known_args(arguments)
    if options.parameters is not None:
        cap_bytes = parse_bytes(options.memory or "80GB")
        print(does_it_fit(options.parameters, cap_bytes, options.bytes_per_parameter))
        return None
    fit = _Fit(rest)
    found, table = _search(fit, options)
    chosen = plan_of(found)
    print("\n".join(_report(found, chosen)))
    if fit.sharers > 1:
        print(
            f"tensor_parallel_size={fit.sharers}: each stage is planned as one device that "
            f"holds and computes all of it; its {fit.sharers} processes share what "
            "parallelize_module says"
        )
    if table is not None and options.save_costs:
        Path(options.save_costs).write_text(table.to_json())
    if options.output:
        Path(options.output).write_text(yaml.safe_dump(chosen.to_dict(), sort_keys=False))
        shared = f"--trainer.strategy.tensor_parallel_size {fit.sharers} "
        print(
            f"\nwritten to {options.output}: lightning-pipe fit ... --trainer.devices "
            f"{chosen.num_ranks * fit.sharers} --trainer.strategy lightning_pipe.PipelineStrategy "
            f"{shared if fit.sharers > 1 else ''}--trainer.strategy.plan {options.output}"
        )
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe plan",
        description="Says whether a model fits, and how to spread it: from the YAML of `fit`, "
        "without a GPU, without processes and without the weights.",
        epilog="All other arguments are those of `lightning-pipe fit`: --config fit.yaml, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="devices that there are; the config's by default")
    add("--memory", metavar="80GiB", help="memory of one device; without it, nothing is too large")
    add("--headroom", type=float, default=HEADROOM, metavar="0.1", help="share that stays free")
    add("--stages", type=int, metavar="P", help="pin the stages; by default all devices")
    add("--free-stages", action="store_true", help="let the plan use fewer devices than there are")
    add("--copies", action="store_true", help="devices left over run copies of the pipeline")
    add("--checkpointing", choices=("auto", "on", "off"), default="auto")
    add("--devices-per-node", type=int, metavar="N", help="devices of one machine")
    add("--link", metavar="LATENCY_S,BYTES_PER_S", help="between two devices of a machine")
    add("--node-link", metavar="LATENCY_S,BYTES_PER_S", help="between two machines")
    add(
        "--flops-per-s",
        type=float,
        help=f"of a device, if nothing is measured: {GUESSED_FLOPS_PER_S:g}, or "
        f"{GUESSED_CPU_FLOPS_PER_S:g} with accelerator=cpu",
    )
    add("--measure", metavar="DEVICE", help="time each unit on this device, such as cpu or cuda:0")
    add("--costs", metavar="FILE", help="costs that --save-costs wrote")
    add("--save-costs", metavar="FILE", help="write the measured costs for the next plan")
    add("--output", metavar="FILE", default="plan.yaml", help="where the plan goes; '' for nowhere")
    add("--parameters", type=float, metavar="10e9", help="only ask whether so many fit; no config")
    add("--bytes-per-parameter", type=float, default=12.0, metavar="12")
    return parser


class _WithoutWeights(ReadsConfig):
    """Builds the module with its large tensors as fakes."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_instantiator(_without_weights, LightningModule, subclasses=True, prepend=True)


def _without_weights(kind: type[LightningModule], *args: Any, **kwargs: Any) -> LightningModule:
    """Builds a module with its large tensors as fakes; for real if its constructor needs values."""
    try:
        with large_as_fakes():
            return kind(*args, **kwargs)
    except Exception:
        return kind(*args, **kwargs)


class _Fit:
    """The run that the config describes, up to its first batch."""

    def __init__(self, arguments: Sequence[str]) -> None:
        cli = read_config(arguments, "plan", _WithoutWeights)
        self.module: LightningModule = cli.model
        self.on_cpu = cli.asked["accelerator"] == "cpu"
        self.arguments = strategy_arguments(cli.asked["strategy"])
        #: processes that share a stage, which is planned as if it had one device
        self.sharers = int(self.arguments.pop("tensor_parallel_size", 1))
        devices = count_devices(cli.asked["devices"]) * int(cli.asked["num_nodes"])
        self.devices = max(1, devices // self.sharers)
        self._trainer = cli.trainer
        dtype = _DTYPES.get(str(cli.asked["precision"]))
        with large_as_fakes():
            seam.prepare_fit(cli.trainer, self.module, cli.datamodule)
        if dtype is not None:
            to_dtype(self.module, dtype)
        self.batch = seam.ready_batch(
            cli.trainer, seam.one_training_batch(cli.trainer), torch.device("cpu")
        )
        self.rules = self.arguments.get("split_batch") or {}
        self.rows = count_rows(self.batch, self.rules)
        drawn = self.arguments.get("microbatch_size")
        if drawn and self.arguments.get("num_microbatches"):  # a step is several such batches
            num_batches = max(1, drawn * int(self.arguments["num_microbatches"]) // self.rows)
            self.batch = join_batches([self.batch] * num_batches, self.rules)
            self.rows *= num_batches

    def step(self, piece: Any) -> Any:
        """One training step of the module."""
        takes_index = seam.takes_batch_idx(self.module)
        return self.module.training_step(*((piece, 0) if takes_index else (piece,)))

    def profile(self, num_stages: int, num_microbatches: int) -> Profile:
        """Traces the step of a micro-batch, fine enough for so many stages."""
        piece = split_batch(self.batch, num_microbatches, self.rules)
        with seam.step_name(self.module, "training_step"), self._context():
            trace = trace_step(self.module, self.step, piece.batches[0], num_stages=num_stages)
        optimizer_bytes: dict[str, int] = {}
        notes: tuple[str, ...] = ()
        try:
            for optimizer in seam.own_optimizers(self._trainer):
                optimizer_bytes |= optimizer_state_bytes(self.module, optimizer)
        except Exception as error:
            notes = (f"configure_optimizers failed here ({error}): 8 bytes per parameter assumed",)
            optimizer_bytes = {n: 8 * p.numel() for n, p in self.module.named_parameters()}
        made = profile_of(self.module, trace, rows=piece.rows[0], optimizer_bytes=optimizer_bytes)
        return replace(made, notes=(*made.notes, *notes))

    def measure(self, num_stages: int, num_microbatches: int, device: torch.device) -> CostTable:
        """Times every unit of the step of a micro-batch."""
        piece = split_batch(self.batch, num_microbatches, self.rules)
        with seam.step_name(self.module, "training_step"), self._context():
            return measured_costs(
                self.module,
                self.step,
                piece.batches[0],
                num_stages=num_stages,
                device=device,
                rows=piece.rows[0],
            )

    def _context(self) -> Any:
        return self._trainer.precision_plugin.train_step_context()


def _search(fit: _Fit, options: Any) -> tuple[Search, CostTable | None]:
    """Chooses on a fine trace; then cuts on the one that `fit` will make for the choice."""
    known = _known_costs(fit, options)
    request = _request(fit, options, known)
    finest = (request.num_ranks or request.devices) * (request.virtual_stages or 2)
    first = request.num_microbatches or min(fit.rows, 4 * (request.num_ranks or request.devices))
    table = known
    if known is None and options.measure:
        table = fit.measure(finest, first, torch.device(options.measure))
    rough = _priced(fit, fit.profile(finest, first), table, options)
    chosen = search(rough, request).chosen.candidate
    stages = chosen.num_ranks * chosen.virtual_stages
    profile = _priced(fit, fit.profile(stages, chosen.num_microbatches), table, options)
    found = search(profile, request)
    now = found.chosen.candidate
    if now.num_ranks * now.virtual_stages != stages:  # the coarser trace led elsewhere
        pinned = replace(
            request,
            num_ranks=chosen.num_ranks,
            virtual_stages=chosen.virtual_stages,
            num_microbatches=chosen.num_microbatches,
            schedule=chosen.schedule_name,
        )
        found = search(profile, pinned)
    return found, table


def _known_costs(fit: _Fit, options: Any) -> CostTable | None:
    """What was measured before: the option's table, or the strategy's."""
    if options.costs:
        return read_costs(options.costs)
    table: CostTable | None = fit.arguments.get("costs")
    return table


def _priced(fit: _Fit, profile: Profile, table: CostTable | None, options: Any) -> Profile:
    if table is None:
        guessed = GUESSED_CPU_FLOPS_PER_S if fit.on_cpu else GUESSED_FLOPS_PER_S
        return profile.with_flops_per_s(options.flops_per_s or guessed)
    return profile.with_costs(table)


def _request(fit: _Fit, options: Any, known: CostTable | None) -> Request:
    given = fit.arguments
    devices = options.devices or fit.devices
    free = options.free_stages or options.copies
    of_copy = devices // (given.get("data_parallel_size") or 1)
    num_ranks = options.stages or given.get("pipeline_parallel_size") or (None if free else of_copy)
    if num_ranks is not None and num_ranks > devices:
        raise ConfigError(f"{num_ranks} stages on {devices} devices: give --devices {num_ranks}")
    virtual_stages = given.get("virtual_stages", 1)
    schedule = given.get("schedule", "auto")
    open_chunks = given.get("chunks_are_free") or (virtual_stages == 1 and schedule == "auto")
    asked = {"all": True, "none": False}.get(given.get("activation_checkpointing", "auto"))
    if num_ranks is not None:
        sizes = ("pipeline_parallel_size", "data_parallel_size")
        Layout(num_ranks, **{k: v for k, v in given.items() if k not in sizes})
    guessed = GUESSED_CPU_LINK if fit.on_cpu else GUESSED_LINK
    return Request(
        rows=fit.rows,
        devices=devices,
        num_ranks=num_ranks,
        virtual_stages=None if open_chunks else virtual_stages,
        num_microbatches=given.get("num_microbatches"),
        schedule=None if schedule == "auto" else schedule,
        checkpointing={"auto": asked, "on": True, "off": False}[options.checkpointing],
        balance=given.get("balance", "auto"),
        split_points=given.get("split_points"),
        cap_bytes=None if options.memory is None else parse_bytes(options.memory),
        headroom_fraction=options.headroom,
        topology=Topology(
            options.devices_per_node,
            _link(options.link, _measured(known, "link") or guessed),
            _link(options.node_link, _measured(known, "node_link") or _NODE_LINK)
            if options.devices_per_node
            else None,
        ),
        copies=options.copies,
    )


def _measured(table: CostTable | None, name: str) -> LinkCosts | None:
    """A link of a cost table; one that costs nothing was not measured."""
    link: LinkCosts | None = None if table is None else getattr(table, name)
    return None if link == FREE else link


def _link(text: str | None, default: LinkCosts) -> LinkCosts:
    if text is None:
        return default
    try:
        latency_s, bytes_per_s = map(float, text.split(","))
        return LinkCosts(latency_s, bytes_per_s)
    except ValueError:
        raise PlanError(
            f"link {text!r}: give seconds and bytes per second, such as 1e-5,5e10"
        ) from None


def _report(found: Search, chosen: Plan) -> list[str]:
    """Does it fit, the ledger, the plan, the reasons."""
    profile, request = found.profile, found.request
    ledger: Ledger = found.chosen.ledger
    parameters = profile.num_parameters
    lines = ["Does it fit?"]
    each = profile.state_bytes / max(parameters, 1)
    if request.cap_bytes is not None:
        lines.append(does_it_fit(parameters, request.cap_bytes, each))
        needed = smallest_pipeline(
            found.chosen.profile, request.cap_bytes, headroom_fraction=request.headroom_fraction
        )
        stages = f"{needed} stage{'s' if needed != 1 else ''}"
        none = f"no number of stages up to {len(profile.units)}, as it is"
        lines.append(
            f"with activations and {request.headroom_fraction:.0%} head-room: "
            f"{stages if needed else none}"
        )
    lines += [rule_of_thumb(parameters), "", *columns(ledger.table_rows()), ledger.verdict()]
    lines += ["", "Plan", chosen.describe()]
    return lines
