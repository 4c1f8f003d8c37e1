"""`python -m lctrain stage data.source=... data.cache=DIR`: images copied into local shards, before any training."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, cast

from lctrain.config.compose import compose_config, conf_dir, explain
from lctrain.config.images import ImagesConfig
from lctrain.data.images.prepare import prepare_images
from lctrain.errors import EXIT_OK, ConfigError
from lctrain.runtime.signals import insisting


def run(command: Any) -> int:
    """Stage the training and the validation images; what is there already is checked, and copied where damaged."""
    cfg = _images(command.overrides, command.config_dir)
    if command.show_config:
        return _show(cfg)
    report = partial(print, flush=True)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell starts what runs in the background so
        signal.signal(signal.SIGINT, _leave)
    with insisting(signal.SIGINT, by=signal.SIGINT):
        train = prepare_images(cfg, split="train", report=report, verify=True)
        held = prepare_images(cfg, split="eval", report=report, verify=True)
    assert train is not None
    if held is None:
        report("data: the source has no validation part (val/, validation/ or test/); data.eval_source gives one")
    for store in (train, held):
        if store is not None:
            report(f"staged: {store.folder}")
    if any("://" in (source or "") for source in (cfg.source, cfg.eval_source)):
        report("an object store is not asked again for what is staged; remove a folder to copy what changed there")
    return EXIT_OK


def _leave(_: int, __: FrameType | None) -> NoReturn:
    # Raising would not do: an import could swallow it, and threads that read from the source would be waited for.
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # the progress bar hides the cursor
    os.write(2, f"{shown}interrupted; the same command goes on where this one stopped\n".encode())
    os._exit(128 + signal.SIGINT)


def _images(overrides: Sequence[str], config_dir: str | None) -> ImagesConfig:
    """The recipe's data, or the images group alone when no recipe is named. Raises ConfigError."""
    if any(word.startswith("recipe=") for word in overrides):
        data = compose_config(overrides, config_dir=config_dir).data
        if not isinstance(data, ImagesConfig):
            raise ConfigError(f"data={data.kind} of this recipe is text; stage copies images: choose data=images")
        return data
    if config_dir is not None:
        raise ConfigError(f"--config-dir={config_dir} has no effect without recipe=NAME; leave it out")
    return _alone([word for word in overrides if word != "data=images"])


def _alone(overrides: list[str]) -> ImagesConfig:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from lctrain.config.registry import register

    for word in overrides:
        if not word.lstrip("+~").startswith("data."):
            raise ConfigError(f"{word} is no field of the images; stage takes data.FIELD=VALUE, or a whole recipe=NAME")
    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            raw = compose("data/images", overrides=overrides)
            return cast(ImagesConfig, OmegaConf.to_object(raw.data))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, [*overrides, "data=images"]) from error


def _show(cfg: ImagesConfig) -> int:
    import yaml

    from lctrain.config.plain import to_plain

    print(yaml.safe_dump({"data": to_plain(cfg)}, sort_keys=False), end="")
    return EXIT_OK
