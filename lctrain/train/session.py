"""What every job of ranks needs before its own work: device, checked input, data, groups, mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from lctrain.config.data import DataConfig
from lctrain.config.model import ModelInit
from lctrain.config.precision import Bf16Config, Fp16Config
from lctrain.config.resolve import Resolved, resolve
from lctrain.config.root import TrainConfig
from lctrain.data.prepare import open_prepared, prepare
from lctrain.data.prepared import PreparedData
from lctrain.data.tokenizer import check_fits, load_tokenizer
from lctrain.engines.build import check_engine
from lctrain.errors import DeviceError
from lctrain.models.build import build_model
from lctrain.models.causal_lm import CausalLM, decoder_layers
from lctrain.models.check import read_config
from lctrain.models.pretrained_files import check_pretrained
from lctrain.ops.attention.select import select_kernel
from lctrain.runtime.device import Accelerator, choose, host_memory_bytes
from lctrain.runtime.mesh import Mesh
from lctrain.runtime.process import Ranks, start_groups
from lctrain.train.gate import first_on_node, share
from lctrain.train.log import Log
from lctrain.train.memory_check import ModelCounts, check_memory
from lctrain.train.stop import StopFlag

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass
class Session:
    """One rank of a job, from its rank number to its mesh."""

    config: TrainConfig
    ranks: Ranks
    store: Store
    stop: StopFlag

    def __post_init__(self) -> None:
        self.resolved: Resolved = resolve(
            self.config, world_size=self.ranks.world_size, launcher=self.ranks.launcher or "lctrain"
        )
        # What transformers warns about is either refused here by name or chosen on purpose.
        transformers.logging.set_verbosity_error()
        self.log = Log(speaks=self.ranks.is_main)
        self.device: Accelerator = choose(self.config.device, self.ranks.local_rank, self.ranks.local_world_size)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        match self.config.precision:
            case Bf16Config():
                return torch.bfloat16
            case Fp16Config():
                return torch.float16
        return torch.float32

    def read_model(self) -> Any:
        """The transformers config the job builds, checked. Raises ConfigError or ModelError."""
        return read_config(self.config.model, max_length=self.config.data.max_length)

    def build_meta(self, hf_config: Any) -> CausalLM:
        """The model on meta. Raises ModelError when its own code refuses the configuration."""
        return build_model(self.config.model, hf_config, loss_chunk_mb=self.config.memory.loss_chunk_mb)

    def check(self) -> None:
        """Everything that can be refused without weights, data or other ranks."""
        if isinstance(self.config.precision, Bf16Config) and not self.device.supports_bf16():
            raise DeviceError(f"precision=bf16 but {self.device.name} has no bf16; use precision=fp16")
        check_engine(self.resolved)
        hf_config = self.read_model()
        model = self.config.model
        check_fits(
            load_tokenizer(self.config.data.tokenizer, model.path, trust_remote_code=model.trust_remote_code),
            hf_config.vocab_size,
        )
        select_kernel(model.attention, device_type=self.device.type, dtype=self.compute_dtype)
        if self.config.model.init is ModelInit.pretrained:
            assert self.config.model.path is not None
            check_pretrained(self.config.model.path)
        self._check_memory(self.build_meta(hf_config))

    def _check_memory(self, model: CausalLM) -> None:
        counts = ModelCounts(
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            layers=len(decoder_layers(model)),
            width=model.model.config.get_text_config().hidden_size,
        )
        check_memory(
            self.resolved,
            counts,
            compute_bytes=self.compute_dtype.itemsize,
            device_name=self.device.name,
            device_room=self.device.total_memory_bytes(),
            host_room=host_memory_bytes(),
            on_cpu=self.device.type == "cpu",
            ranks_here=self.ranks.local_world_size,
        )

    def prepare(self, splits: tuple[str, ...]) -> dict[str, PreparedData | None]:
        """Check, then tokenise on the node's first rank while the others wait; then open on every rank.

        Raises what `check` and data.prepare raise, on the first rank; PeerFailed on the others.
        """
        keys: dict[str, str] = {}

        def first() -> str:
            self.check()
            for split in splits:
                prepared = self._prepare(split)
                keys[split] = prepared.key if prepared else ""
            return ",".join(keys[s] for s in splits)

        note = first_on_node(
            self.ranks, self.store, "prepared", first, lambda text: text, self.config.launch.prepare_timeout_s
        )
        return {
            split: self._open(key, split) if key else None for split, key in zip(splits, note.split(","), strict=True)
        }

    def _open(self, key: str, split: str) -> PreparedData:
        return open_prepared(
            self.config.data,
            model_path=self.config.model.path,
            key=key,
            split=split,  # type: ignore[arg-type]
            trust_remote_code=self.config.model.trust_remote_code,
        )

    def _prepare(self, split: str) -> PreparedData | None:
        data: DataConfig = self.config.data
        return prepare(
            data,
            model_path=self.config.model.path,
            vocab_size=self.read_model().vocab_size,
            split=split,  # type: ignore[arg-type]
            trust_remote_code=self.config.model.trust_remote_code,
            report=self.log,
        )

    def share(self, name: str, make: Callable[[], str]) -> str:
        """A string made by rank 0, on every rank."""
        return share(self.ranks, self.store, name, make)

    def connect(self) -> Mesh:
        """Create process groups and the mesh."""
        self.device.activate()
        start_groups(self.ranks, self.store, self.device, self.config.launch.timeout_s)
        return Mesh(self.resolved.sizes, self.device)

    def describe(self) -> None:
        """Say what runs where."""
        sizes, train = self.resolved.sizes, self.config.train
        axes = ", ".join(f"{axis} {size}" for axis, size in vars(sizes).items() if size > 1) or "one rank"
        self.log(
            f"{self.config.recipe or 'run'}: parallel={self.config.parallel.kind} ({axes}) on {sizes.world} x "
            f"{self.device.name}, precision {self.config.precision.kind}, started by {self.ranks.launcher or 'hand'}"
        )
        self.log(
            f"batch: {train.global_batch_size} sequences of {self.config.data.max_length:,} tokens a step = "
            f"{train.micro_batch_size} x {sizes.data} data ranks x {self.resolved.accumulation} micro-steps"
        )
        self.log(
            f"timeouts: collectives {self.config.launch.timeout_s} s, data preparation "
            f"{self.config.launch.prepare_timeout_s} s"
        )


def versions() -> dict[str, str]:
    """What ran, for summary.json."""
    from lctrain import __version__

    return {
        "lctrain": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
