"""The names and signatures of torch that the seam relies on; a new torch that moves them fails
here.
"""

import inspect

import pytest
from torch.distributed import distributed_c10d
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import loss

STAGE_METHODS = {
    "get_fwd_recv_ops": ["fwd_chunk_id"],
    "get_fwd_send_ops": ["fwd_chunk_id"],
    "get_bwd_recv_ops": ["bwd_chunk_id"],
    "get_bwd_send_ops": ["bwd_chunk_id"],
    "set_local_fwd_input": ["prev_stage_outputs", "mb_index"],
    "get_local_bwd_output": ["mb_index"],
    "set_local_bwd_input": ["next_stage_bwd_outputs", "mb_index"],
    "forward_one_chunk": ["fwd_chunk_id", "args", "kwargs", "save_forward_output"],
    "backward_one_chunk": ["bwd_chunk_id", "loss", "full_backward", "last_backward"],
    "backward_weight_one_chunk": ["bwd_chunk_id", "last_backward"],
}


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", STAGE_METHODS)
def test_the_runtime_calls_stages_as_we_answer(name):
    assert parameters(getattr(PipelineStage, name)) == STAGE_METHODS[name]


def test_lowering_and_runtime_have_their_signatures():
    assert parameters(schedules._add_send_recv) == [
        "compute_actions",
        "stage_to_rank",
        "num_stages",
    ]
    assert parameters(schedules._batch_p2p) == ["p2p_ops", "desc"]
    assert schedules._Action._fields[:3] == ("stage_index", "computation_type", "microbatch_index")
    assert parameters(schedules._PipelineScheduleRuntime._initialize_stages)[:2] == [
        "args",
        "kwargs",
    ]
    assert "return_outputs" in parameters(schedules._PipelineScheduleRuntime._step_microbatches)
    assert "scale_grads" in parameters(schedules.PipelineScheduleMulti.__init__)
    assert parameters(distributed_c10d._get_default_store) == []


def test_a_scaler_looks_for_overflows_of_fused_optimizers_where_ours_does():
    assert parameters(ShardedGradScaler._check_inf_per_device) == ["optimizer"]
    assert "self._check_inf_per_device(optimizer)" in inspect.getsource(ShardedGradScaler.step)


def test_distributed_tensors_have_the_parts_that_ours_exchanges():
    kinds = placement_types
    assert "mesh_scatter(" in inspect.getsource(kinds.Shard._shard_tensor)
    assert "mesh_broadcast(" in inspect.getsource(kinds.Replicate._make_replicate_tensor)
    assert parameters(kinds.mesh_scatter)[:3] == ["output", "scatter_list", "mesh"]
    assert parameters(kinds.mesh_broadcast)[0] == "tensor"
    assert parameters(_clear_sharding_prop_cache) == []
    assert "_disable_custom_loss_ops()" in inspect.getsource(loss.loss_parallel)
    handlers = inspect.getsource(loss._enable_custom_loss_ops)
    assert "_op_dispatcher._custom_op_handlers" in handlers
    assert any("backward" in operator.name() for operator in loss.customized_loss_ops)
    assert "self._local_tensor" in inspect.getsource(DTensor.to_local)
    assert "_unscale_grads_(" in inspect.getsource(ShardedGradScaler.unscale_)


def test_what_the_runtime_reads_of_a_stage_is_what_ours_sets():
    """Every attribute of a stage that torch's runtime touches, by its source."""
    import re

    source = inspect.getsource(schedules._PipelineScheduleRuntime) + inspect.getsource(
        schedules.PipelineScheduleMulti.__init__
    )
    touched = set(re.findall(r"\bstages?(?:\[\w+\]|_index_to_stage\[[^]]+\])?\.(\w+)", source))
    ours = {
        "stage_index",
        "num_stages",
        "group_size",
        "group_rank",
        "submod",
        "is_first",
        "is_last",
    }
    ours |= {"stage_index_to_group_rank", "perform_reduce_grad"} | set(STAGE_METHODS)
    assert touched - ours == set()
