"""The fused operators' patch against the plain model, with stand-ins that compute what the operators document."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lctrain.config.memory import MemoryConfig, Recompute
from lctrain.config.model import CausalLMConfig, LoraConfig
from lctrain.errors import DeviceError, ModelError
from lctrain.models.build import build_model
from lctrain.models.causal_lm import CausalLM, build_meta, decoder_layers
from lctrain.models.lora import init_lora
from lctrain.models.materialize import init_random, materialize_empty
from lctrain.models.npu_fused import Fused, fuse
from lctrain.ops import npu_fused as ops
from lctrain.ops.attention.interface import attend_batch
from lctrain.ops.attention.sdpa import SdpaKernel
from lctrain.parallel.recompute import apply_recompute
from lctrain.train.language_input import check_fused
from tests.unit.models.tiny_models import config_of, packed_batch, random_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class Documented:
    """torch_npu's operators by their documentation, which take one dtype; `calls` counts them."""

    def __init__(self) -> None:
        self.calls = {"npu_rms_norm": 0, "npu_swiglu": 0, "npu_rotary_mul": 0}

    def npu_rms_norm(
        self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["npu_rms_norm"] += 1
        assert x.dtype == gamma.dtype
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (x.float() * inverse * gamma.float()).to(x.dtype), inverse

    def npu_swiglu(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls["npu_swiglu"] += 1
        gate, up = x.float().chunk(2, dim=dim)
        return (F.silu(gate) * up).to(x.dtype)

    def npu_rotary_mul(self, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
        self.calls["npu_rotary_mul"] += 1
        assert x.dtype == r1.dtype == r2.dtype
        assert x.dim() == r1.dim() == r2.dim() == 4
        first, second = x.chunk(2, dim=-1)
        return r1 * x + r2 * torch.cat((-second, first), dim=-1)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> Documented:
    """The stand-ins in torch_npu's place."""
    stand_ins = Documented()
    monkeypatch.setattr(ops, "_ops", lambda: stand_ins)
    return stand_ins


@contextmanager
def fused(model: CausalLM) -> Iterator[Fused]:
    """The patch, undone at the end whatever happens."""
    patch = fuse(model)
    try:
        yield patch
    finally:
        patch.undo()


def step(model: CausalLM) -> dict[str, torch.Tensor]:
    """The loss and every gradient of one packed batch."""
    model.zero_grad()
    loss = model(*packed_batch())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal to fp32 rounding, relative to each tensor's largest number."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (ours[name] - value).abs().max() / value.abs().max()
        assert difference < 1e-5, (name, difference)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """The same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def rotary_of(model: CausalLM) -> Any:
    """The rotary function the model's modeling module has now."""
    return sys.modules[type(model.model).__module__].apply_rotary_pos_emb


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_equal_the_plain_model(family: str, documented: Documented) -> None:
    model = random_model(family)
    plain, plain_rotary, forwards = step(model), rotary_of(model), {m: m.forward for m in model.modules()}
    with fused(model) as patch:
        norms = 9 if family == "qwen3" else 5
        assert str(patch) == f"{norms} RMSNorm, 2 SwiGLU, rotary embedding of 2 layers"
        assert_close(step(model), plain)
        assert documented.calls == {"npu_rms_norm": norms, "npu_swiglu": 2, "npu_rotary_mul": 4}
    assert rotary_of(model) is plain_rotary
    assert all(m.forward == forwards[m] for m in model.modules())
    assert all("forward" not in vars(m) for m in model.modules())
    assert_equal(step(model), plain)
    assert sum(documented.calls.values()) == norms + 6


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(tiled_mlp=3),
        MemoryConfig(recompute=Recompute.full),
        MemoryConfig(recompute=Recompute.selective, tiled_mlp=2),
    ],
)
def test_under_recomputation_and_tiles(memory: MemoryConfig, documented: Documented) -> None:
    model = random_model()
    plain = step(model)
    patch = fuse(model)
    apply_recompute(decoder_layers(model), memory)
    assert_close(step(model), plain)
    assert documented.calls["npu_swiglu"] > 2
    patch.undo()
    assert torch.equal(step(model)["loss"], plain["loss"])


def test_the_result_has_the_plain_dtype(documented: Documented) -> None:
    model = random_model("qwen3")  # its head norms get bf16 from autocast's matrix products, and have fp32 weights
    norm, x = model.model.model.layers[0].self_attn.q_norm, torch.ones(2, 3, 16, dtype=torch.bfloat16)
    ids, positions, _, documents = packed_batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain, dtypes = model.logits(ids, positions, documents), [norm(x).dtype, norm(x.float()).dtype]
        with fused(model):
            assert [norm(x).dtype, norm(x.float()).dtype] == dtypes
            ours = model.logits(ids, positions, documents)
    assert ours.dtype == plain.dtype
    assert (ours - plain).abs().max() < 0.05 * plain.abs().max()
    half = random_model().to(torch.bfloat16)
    with fused(half):
        assert half.model.model.norm(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_model_on_meta_is_fused_before_it_has_numbers(documented: Documented) -> None:
    model, state = build_meta(config_of()), torch.get_rng_state()
    with fused(model) as patch:
        assert (patch.norms, patch.mlps, patch.layers) == (5, 2, 2)
    assert torch.equal(torch.get_rng_state(), state)  # what follows draws what it would have drawn


def test_a_copy_of_a_fused_model_computes_with_its_own_weights(documented: Documented) -> None:
    model = random_model()
    with fused(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        ids, positions, _, documents = packed_batch()
        assert twin.logits(ids, positions, documents).abs().max() == 0
        assert model.logits(ids, positions, documents).abs().max() > 0


def test_adapters_stay_in_the_fused_mlp(documented: Documented) -> None:
    config = config_of()
    model = build_model(CausalLMConfig(lora=LoraConfig(rank=2)), config)
    materialize_empty(model, torch.device("cpu"))
    init_random(model, seed=0)
    init_lora(model, seed=0)
    model.route_attention(partial(attend_batch, SdpaKernel()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    plain = step(model)
    with fused(model) as patch:
        assert patch.mlps == 2
        assert_close(step(model), plain)
    assert any("lora" in name and "gate_proj" in name for name in plain)


def test_another_model_of_the_family_stays_plain(documented: Documented) -> None:
    first, second = random_model(), random_model(seed=1)
    plain, function = step(second), rotary_of(first)
    with fused(first):
        step(first)
        calls = dict(documented.calls)
        assert_equal(step(second), plain)
        assert documented.calls == calls
        assert rotary_of(first) is function
        with fused(second) as patch:
            assert patch.layers == 2
            assert_close(step(second), plain)


def test_a_forward_that_fails_leaves_the_rotary_function(documented: Documented) -> None:
    model = random_model()
    function = rotary_of(model)
    model.model.model.layers[1].self_attn.o_proj = nn.Linear(3, 3)
    with fused(model), pytest.raises(RuntimeError):
        step(model)
    assert rotary_of(model) is function


def test_a_norm_of_another_formula_stays_as_it_is(documented: Documented) -> None:
    model = random_model("gemma", head_dim=8)
    plain = step(model)
    with fused(model) as patch:
        assert str(patch) == "0 RMSNorm, 0 SwiGLU, rotary embedding of 2 layers"  # 1 + weight, and GELU
        assert_close(step(model), plain)


def test_experts_stay_and_norms_do_not(documented: Documented) -> None:
    model = random_model("mixtral")
    plain = step(model)
    with fused(model) as patch:
        assert (patch.norms, patch.mlps, patch.layers) == (5, 0, 2)
        assert_close(step(model), plain)


@pytest.mark.parametrize(
    ("rope", "layers"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 2),
        # Its cosines go beyond 1, which npu_rotary_mul's documentation excludes.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 0),
    ],
)
def test_rotary_embeddings_out_of_range_stay(rope: dict[str, Any], layers: int, documented: Documented) -> None:
    model = random_model(rope_parameters={"rope_theta": 10000.0, **rope})
    plain = step(model)
    with fused(model) as patch:
        assert patch.layers == layers
        assert_close(step(model), plain)


def test_half_rotated_heads_stay(documented: Documented) -> None:
    model = random_model()
    rotary = model.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:2]
    with fused(model) as patch:
        assert (patch.norms, patch.layers) == (5, 0)


class ScaledMLP(nn.Module):
    """SwiGLU with a multiplier: the same parts, another formula."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, F.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5


class ShiftedRMSNorm(nn.Module):
    """A norm with one more term."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + 0.5


def test_nothing_to_fuse_is_refused(documented: Documented) -> None:
    model = random_model()
    decoder = model.model.model
    decoder.rotary_emb.attention_scaling = 1.5
    for layer in decoder.layers:
        layer.mlp = ScaledMLP(layer.mlp)
        layer.input_layernorm = ShiftedRMSNorm(layer.input_layernorm)
        layer.post_attention_layernorm = ShiftedRMSNorm(layer.post_attention_layernorm)
    decoder.norm = ShiftedRMSNorm(decoder.norm)
    with pytest.raises(ModelError, match=r"npu_fused=true but LlamaForCausalLM has no RMSNorm.*; set model.npu_fused="):
        fuse(model)


def test_an_epsilon_that_is_not_used_is_noticed(documented: Documented) -> None:
    class DeafRMSNorm(ShiftedRMSNorm):
        """A norm that ignores its epsilon."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, x.shape[-1:], self.weight, 1e-12)

    model = random_model()
    model.model.model.norm = DeafRMSNorm(model.model.model.norm)
    with fused(model) as patch:
        assert patch.norms == 4


def test_the_fused_operators_are_for_npu_alone() -> None:
    check_fused(CausalLMConfig(npu_fused=True), "npu")
    check_fused(CausalLMConfig(), "cuda")
    with pytest.raises(DeviceError, match=r"npu_fused=true but the device is cuda, .*; set model.npu_fused=false"):
        check_fused(CausalLMConfig(npu_fused=True), "cuda")


def test_the_operators_come_from_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    assert ops._ops() is torch.ops.npu
