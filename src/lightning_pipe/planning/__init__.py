"""Planning: schedules, balance, simulation and pictures. Standard library only, no torch.

Imports in milliseconds and plans a pipeline of a thousand ranks on a laptop. The words, which mean
the same in the whole package:

    stage        a contiguous piece of the whole model, numbered globally
    chunk        one of the V stages that a rank holds (virtual stage)
    unit         a module whose call is placed whole
    rank         position in the pipeline; the process's number in the job is its global rank
    microbatch   one slice of a batch
    action       one thing a rank does, such as 2F0: stage 2, forward, micro-batch 0
    op           the kind of an action: F forward, B backward, I input gradient, W weight gradient
    order        the list of actions of one rank
    schedule     the orders of all ranks
    cut          index of the first unit call of a stage
    boundary     the values that cross a cut
    plan         cuts, schedule, number of micro-batches and predicted numbers

Counts are ``num_*``, from 1; indices are bare nouns, from 0. Quantities end in their unit:
``forward_s``, ``activation_bytes``, ``bubble_fraction`` (0 to 1).

Import from the files: ``ir`` and ``schedules`` for schedules, ``balance`` for cuts, ``costs`` and
``simulate`` for predictions, ``timeline``, ``plan`` and ``render`` for results.
"""
