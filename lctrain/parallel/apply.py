"""The one place where a model meets its layout, in one order: attention, tensor parallel, recompute, then FSDP2.

DDP wraps later (engines/native.py), because it needs real parameters and FSDP2 needs meta ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lctrain.config.memory import MemoryConfig
from lctrain.config.parallel import CpMethod, FsdpConfig, FsdpCpConfig, FsdpTpConfig, FsdpUspConfig, ParallelConfig
from lctrain.ops.attention.interface import Attend, Kernel, attend_batch
from lctrain.parallel.recompute import apply_recompute
from lctrain.parallel.ring import allgather_attend, ring_attend
from lctrain.parallel.tensor import apply_tensor_parallel
from lctrain.parallel.ulysses import ulysses_attend
from lctrain.runtime.mesh import Mesh


def attention_for(kernel: Kernel, parallel: ParallelConfig, mesh: Mesh) -> Attend:
    """The attention of a layout: the kernel, in a ring (axis cp), between two all-to-alls (axis sp)."""
    attend: Attend = partial(attend_batch, kernel)
    if mesh.sizes.cp > 1:
        assert isinstance(parallel, FsdpCpConfig | FsdpUspConfig), type(parallel)
        around = ring_attend if parallel.cp_method is CpMethod.ring else allgather_attend
        attend = partial(around, kernel, group=mesh.cp_group)
    if mesh.sizes.sp > 1:
        attend = partial(ulysses_attend, attend, group=mesh.sp_group)
    return attend


def apply_layout(
    model: nn.Module,
    layers: Sequence[nn.Module],
    *,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    mesh: Mesh,
    compute_dtype: torch.dtype,
) -> None:
    """Tensor parallel, recompute, then shard `layers` one by one and the rest as the root. `model` may be on meta."""
    if isinstance(parallel, FsdpTpConfig):
        apply_tensor_parallel(model.model, layers, mesh.tp_mesh)
    apply_recompute(layers, memory)
    if not isinstance(parallel, FsdpConfig):
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if parallel.offload_params else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh.shard_mesh, mp_policy=policy, offload_policy=offload)
    for layer in layers:
        shard(layer, reshard_after_forward=parallel.reshard_after_forward)
    # The root's own parameters (embedding, last norm, head) are needed first and last in every pass.
    shard(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums: the loss was already divided by the global count.
            module.set_gradient_divide_factor(1.0)
            # A plain sum is the one reduction every backend has (gloo and HCCL lack NCCL's pre-multiplied one).
            module.set_force_sum_reduction_for_comms(True)
