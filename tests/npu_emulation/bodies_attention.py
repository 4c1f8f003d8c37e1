"""What ranks run on emulated cards for attention: the program's own layouts around the fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 2


@dataclass(frozen=True)
class Case:
    """bounds: documents of ROWS equally long sequences. sp, cp: how ranks split each of them."""

    bounds: tuple[int, ...]
    sp: int = 1
    cp: int = 1
    method: str = "ring"

    def __str__(self) -> str:
        return f"sp{self.sp}-cp{self.cp}-{self.method if self.cp > 1 else 'whole'}-{len(self.bounds) - 1}documents"


def differences(ranks: Any, case: Case, dtype: str) -> dict[str, float]:
    """Largest difference of this rank's output and gradients from the reference kernel on whole CPU tensors."""
    import torch

    from lctrain.config.parallel import CpMethod, FsdpUspConfig
    from lctrain.config.sizes import Sizes
    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.interface import attend_batch
    from lctrain.ops.attention.npu import NpuKernel
    from lctrain.ops.attention.reference import ReferenceKernel
    from lctrain.parallel.apply import attention_for
    from lctrain.runtime.device import Accelerator
    from lctrain.runtime.mesh import Mesh

    device = Accelerator("npu", ranks.rank)
    mesh = Mesh(Sizes(1, 1, sp=case.sp, cp=case.cp), device)
    documents, length = Documents(case.bounds), case.bounds[-1] // ROWS
    generator = torch.Generator().manual_seed(len(case.bounds))
    shapes = [(ROWS, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *whole, grad = (torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in whole]
    right = attend_batch(ReferenceKernel(), *leaves, documents, scale=0.3)
    right_all = [right, *torch.autograd.grad(right, leaves, grad)]

    columns = _columns(length, mesh)
    attend = attention_for(NpuKernel(), FsdpUspConfig(cp_method=CpMethod[case.method]), mesh)
    own = [x[:, columns].to(device.torch_device).requires_grad_() for x in whole]
    out = attend(*own, documents, scale=0.3)
    grads = torch.autograd.grad(out, own, grad[:, columns].to(device.torch_device))
    found = {}
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), (out, *grads), right_all, strict=True):
        found[name] = (ours.float().cpu() - theirs[:, columns].float()).abs().max().item()
    return found


def _columns(length: int, mesh: Any) -> Any:
    """Which columns this rank holds."""
    import torch

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.text_batch import TextBatch
    from lctrain.parallel.sequence import split_batch

    numbers = torch.arange(length)[None]
    batch = TextBatch(numbers, numbers, numbers, Documents((0, length)), 0, 0)
    sizes = mesh.sizes
    part = split_batch(batch, mesh.sp_rank, sizes.sp, cp_rank=mesh.cp_rank, cp_size=sizes.cp)
    return part.input_ids[0]


def ignores_sparse_mode_without_mask(ranks: Any) -> tuple[float, float]:
    """(difference from causal attention, from full attention) of the op with sparse mode 3 and no mask."""
    import torch

    from lctrain.ops.attention.documents import Documents
    from lctrain.ops.attention.reference import ReferenceKernel

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, HEADS, DIM, generator=generator) for _ in range(3))
    out = torch.ops.npu.npu_fusion_attention(
        *(x[None].to("npu") for x in (q, k, v)), HEADS, "BSND", scale=0.3, sparse_mode=3
    )[0][0].cpu()
    rights = (
        ReferenceKernel().forward(q, k, v, Documents((0, 12)), scale=0.3, causal=causal)[0] for causal in (True, False)
    )
    causal, full = ((out - right).abs().max().item() for right in rights)
    return causal, full


def refusals(ranks: Any) -> list[str]:
    """What the emulated library answers to arguments the op documents as wrong, and fake tensors accept."""
    import torch

    q = torch.randn(8, HEADS, DIM, device="npu")
    k = torch.randn(8, KV_HEADS, DIM, device="npu")
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    common = {"scale": 0.3, "sparse_mode": 3, "atten_mask": mask, "softmax_layout": "TND"}
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, k, HEADS + 1, "TND"), {"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}),
        ((q, k, k, HEADS, "TND"), {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 7]}),
        ((q, k, k, HEADS, "TND"), {"actual_seq_qlen": [5, 3, 8], "actual_seq_kvlen": [5, 3, 8]}),
        ((q, k.half(), k, HEADS, "TND"), {"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}),
        ((q, k, k, HEADS, "TND"), {"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "atten_mask": mask[:8, :8]}),
    ]
    return [_answer(*args, **{**common, **kwargs}) for args, kwargs in wrong]


def _answer(*args: Any, **kwargs: Any) -> str:
    import torch

    try:
        torch.ops.npu.npu_fusion_attention(*args, **kwargs)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "computed"
