"""Plans a Llama of 405 billion parameters on a laptop: seconds and memory of trace and search.

    python benchmarks/plan_large_model.py [--layers 126] [--length 8192] [--devices 64]

The model is built with its weights as fakes, so nothing of its 1.6 TB is allocated. Also times the
simulation of 64 ranks with 4 chunks and 512 micro-batches, and the partition of 400 units.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
import warnings

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--devices", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_pipe.planning.balance import partition
    from lightning_pipe.planning.choose import search
    from lightning_pipe.planning.costs import LinkCosts, StageCosts
    from lightning_pipe.planning.explain import explain
    from lightning_pipe.planning.profile import tensor_parallel
    from lightning_pipe.planning.request import Request
    from lightning_pipe.planning.schedules import make_schedule
    from lightning_pipe.planning.simulate import simulate
    from lightning_pipe.planning.topology import Topology
    from lightning_pipe.split._fake import large_as_fakes
    from lightning_pipe.split.analyse import trace_step
    from lightning_pipe.split.profile import optimizer_state_bytes, profile_of

    begin_s = time.perf_counter()
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248,
        num_hidden_layers=options.layers, num_attention_heads=128, num_key_value_heads=8,
        max_position_embeddings=options.length, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with large_as_fakes():
        model = LlamaForCausalLM(config)
    built_s = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, options.length, dtype=torch.long)
    trace = trace_step(
        model, lambda x: model(input_ids=x, labels=x).loss, tokens, num_stages=options.devices
    )
    traced_s = time.perf_counter()
    profile = profile_of(
        model, trace, rows=1, optimizer_bytes=optimizer_state_bytes(model, optimizer)
    ).with_flops_per_s(4e14)
    profile = tensor_parallel(profile, 8, LinkCosts(1e-5, 2e11))  # as this model was trained
    profiled_s = time.perf_counter()
    link = Topology(1, LinkCosts(1e-5, 2e11), LinkCosts(2e-5, 2.5e10))
    request = Request(
        rows=4 * options.devices,  # micro-batches of one row: two do not fit
        devices=options.devices,
        topology=link,
        cap_bytes=80 * 2**30,
    )
    found = search(profile, request)
    planned_s = time.perf_counter()
    print(f"{profile.num_parameters / 1e9:.0f} B parameters, {len(profile.units)} unit calls")
    print(f"build {built_s - begin_s:.1f} s, trace {traced_s - built_s:.1f} s, boundaries "
          f"{profiled_s - traced_s:.1f} s, search {planned_s - profiled_s:.1f} s "
          f"({len(found.outcomes)} combinations)")  # fmt: skip
    print("\n".join(explain(found)))

    schedule = make_schedule(
        "interleaved_1f1b", num_ranks=64, num_microbatches=512, virtual_stages=4
    )
    before_s = time.perf_counter()
    simulate(schedule, [StageCosts(1.0, 1.0, 1.0)] * 256)
    print(f"simulation of P=64, V=4, M=512: {time.perf_counter() - before_s:.1f} s")
    costs = [random.Random(0).random() for _ in range(400)]
    before_s = time.perf_counter()
    partition(costs, 64)
    print(f"partition of 400 units into 64: {time.perf_counter() - before_s:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
