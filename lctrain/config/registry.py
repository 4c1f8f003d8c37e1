"""Every group's classes, by the `kind` their option carries, and Hydra's view of them."""

from __future__ import annotations

import os

from lctrain.config import data, images, launch, memory, model, optim, parallel, precision, root, schedule

GROUPS: dict[str, tuple[type, ...]] = {
    "model": (model.CausalLMConfig, model.ResNetConfig, model.LeNetConfig),
    "data": (data.TextConfig, data.JsonlConfig, data.ParquetConfig, data.HubConfig, images.ImagesConfig),
    "parallel": (
        parallel.SingleConfig,
        parallel.DdpConfig,
        parallel.FsdpConfig,
        parallel.HsdpConfig,
        parallel.FsdpSpConfig,
        parallel.FsdpCpConfig,
        parallel.FsdpUspConfig,
        parallel.FsdpTpConfig,
        parallel.Zero1Config,
        parallel.Zero2Config,
        parallel.Zero3Config,
        parallel.Zero3SpConfig,
        parallel.Zero3OffloadConfig,
    ),
    "memory": (memory.MemoryConfig,),
    "optim": (optim.AdamWConfig, optim.SgdConfig, optim.LarsConfig),
    "schedule": (
        schedule.ConstantConfig,
        schedule.CosineConfig,
        schedule.LinearConfig,
        schedule.PolynomialConfig,
        schedule.StepConfig,
    ),
    "precision": (precision.Fp32Config, precision.Bf16Config, precision.Fp16Config),
    "checkpoint": (root.CheckpointConfig,),
    "logging": (root.LoggingConfig,),
    "launch": (launch.LaunchConfig, launch.TorchrunConfig, launch.SlurmConfig, launch.ModelArtsConfig),
}


def kind_of(cls: type) -> str:
    """The `kind` a config class carries."""
    return cls.__dataclass_fields__["kind"].default  # type: ignore[attr-defined]


def classes(group: str) -> dict[str, type]:
    """The classes of `group` by kind."""
    return {kind_of(cls): cls for cls in GROUPS[group]}


def register() -> None:
    """Store the schemas in Hydra's ConfigStore and the resolvers recipes use. Safe to call twice."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store(name="schema", node=root.TrainConfig)
    for group, members in GROUPS.items():
        for cls in members:
            # A causal LM's schema is stored as schema_causal_lm, the only memory schema as schema_memory, ...
            store.store(group=group, name=f"schema_{kind_of(cls)}", node=cls)
    OmegaConf.register_new_resolver("python_stdlib", lambda: os.path.dirname(os.__file__), replace=True)
