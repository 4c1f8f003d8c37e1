"""From command-line overrides to a typed config, and Hydra's errors to ones that say what to change."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from lctrain.config.plain import from_plain, to_plain
from lctrain.config.registry import GROUPS, register
from lctrain.config.root import TrainConfig
from lctrain.errors import ConfigError

# Names other tools use for what is derived, or lives elsewhere, here.
_ELSEWHERE = {
    "gradient_accumulation_steps": "it is derived: train.global_batch_size / (train.micro_batch_size x data ranks)",
    "per_device_train_batch_size": "use train.micro_batch_size",
    "learning_rate": "use optim.lr",
    "num_train_epochs": "use train.max_epochs",
    "attn_implementation": "use model.attention",
    "activation_checkpointing": "use memory=full or memory=none",
    "gradient_checkpointing": "use memory=full or memory=none",
    "resume_from_checkpoint": "use checkpoint.resume",
    "max_seq_length": "use data.max_length",
    "output_dir": "use run_dir",
}


# Mappings that take any key.
_OPEN = ("model.architecture.", "parallel.deepspeed.extra.")


def conf_dir() -> Path:
    """The folder of config groups: `lctrain/conf` in a wheel, `conf/` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def options(group: str, config_dir: str | None = None) -> dict[str, str]:
    """Option names of `group` with the one line that describes each."""
    found: dict[str, str] = {}
    for base in [conf_dir(), *([Path(config_dir)] if config_dir else [])]:
        for path in sorted((base / group).glob("*.yaml")):
            comments = [ln[1:].strip() for ln in path.read_text(encoding="utf-8").splitlines() if ln.startswith("#")]
            found[path.stem] = next((c for c in comments if not c.startswith("@package")), "")
    return found


def compose_raw(overrides: Sequence[str], *, config_dir: str | None = None) -> Any:
    """Hydra's composed DictConfig of `overrides`.

    Raises ConfigError naming the override and the nearest valid names.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    extra = list(overrides)
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={config_dir} is not a folder; give one that holds recipe/NAME.yaml")
        extra.append(f"hydra.searchpath=[file://{folder}]")
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("train", overrides=extra)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_dir=config_dir) from error


def to_config(raw: Any) -> TrainConfig:
    """Typed config of a composed DictConfig; runs one-field checks."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(raw, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{_first_line(error)}; correct the interpolation") from error
    return from_plain(plain)  # type: ignore[arg-type]


def compose_config(overrides: Sequence[str], *, config_dir: str | None = None) -> TrainConfig:
    """Compose and type in one call."""
    return to_config(compose_raw(overrides, config_dir=config_dir))


def overlay(saved: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """A saved run's config with command-line overrides on top; `group=option` replaces the group.

    Raises ConfigError as compose_raw does.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    plain = to_plain(saved)
    # Composing a throw-away recipe with the same overrides checks every name and parses every value.
    base = {g: plain[g]["kind"] for g in ("model", "data", "parallel", "optim", "schedule", "precision")}
    groups = [f"{g}={k}" for g, k in base.items() if not any(o.startswith(f"{g}=") for o in overrides)]
    recipe = f"recipe={saved.recipe}" if saved.recipe in options("recipe") else "~recipe"
    fresh = OmegaConf.to_container(compose_raw([recipe, *groups, *overrides]), resolve=True, enum_to_str=True)
    fresh = cast(dict[str, Any], fresh)
    for parsed in OverridesParser.create().parse_overrides(list(overrides)):
        key = parsed.key_or_group
        if key in GROUPS:
            plain[key] = fresh[key]
        elif key != "recipe":
            _copy_key(fresh, plain, key.split("."))
    return from_plain(plain)


def _copy_key(source: dict[str, Any], target: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        source, target = source[key], target.setdefault(key, {})
    target[keys[-1]] = source[keys[-1]]


def explain(error: Exception, overrides: Sequence[str], *, config_dir: str | None = None) -> ConfigError:
    """The ConfigError that says what Hydra's error means for the person who typed `overrides`."""
    text, cause = str(error), str(error.__cause__ or "")
    if match := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        return _unknown_option(match[1], match[2], config_dir)
    if "You must specify 'recipe'" in text:
        return ConfigError(f"recipe is not given; choose one: {_listing(options('recipe', config_dir))}")
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1], overrides)
    if match := re.search(r"Error merging override (\S+)", text):
        return ConfigError(f"{match[1]}: {_first_line(cause)}; give a value of that type")
    if "OverrideParse" in type(error).__name__:
        return ConfigError(
            f"an override does not parse: {_first_line(text)}; write key=value, and quote values that hold "
            "spaces, commas, brackets or equals signs: 'key=\"a,b\"'"
        )
    if match := re.search(r"In '([^']+)': .*raised while composing config:\n(.*)", text):
        return ConfigError(
            f"{match[1]}: {match[2]}; it sets a field that the chosen options of its groups "
            "do not have; choose those it was written for, or copy it into a folder of your own (--config-dir DIR)"
        )
    return ConfigError(f"{_first_line(text)} {_first_line(cause)}".strip() + "; see python -m lctrain --help")


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0] if lines else ""


def _listing(found: dict[str, str]) -> str:
    return ", ".join(found)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _unknown_option(group: str, name: str, config_dir: str | None) -> ConfigError:
    known = options(group, config_dir)
    hint = _nearest(name, list(known))
    return ConfigError(f"{group}={name} does not exist; {hint} {group} is one of: {_listing(known)}".replace("  ", " "))


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    leaf = key.rsplit(".", 1)[-1]
    if leaf in _ELSEWHERE:
        return ConfigError(f"{key} is not a field; {_ELSEWHERE[leaf]}")
    known = _known_keys([o for o in overrides if o.split("=")[0] in (*GROUPS, "recipe")])
    same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    hint = f"did you mean {' or '.join(same_leaf)}?" if same_leaf else _nearest(key, known)
    if f"{key}.".startswith(_OPEN):
        return ConfigError(f"{key} is not set yet; add keys to that mapping with ++{key}=VALUE")
    section = key.split(".")[0]
    fields = [k for k in known if k.startswith(f"{section}.")]
    tail = f"{section} has: {', '.join(sorted(f.split('.', 1)[1] for f in fields))}" if fields else ""
    return ConfigError(f"{key} is not a field of this configuration; {hint} {tail}".replace("  ", " ").strip())


def _known_keys(group_choices: list[str]) -> list[str]:
    from hydra.errors import HydraException

    try:
        raw = compose_raw(
            group_choices if any(c.startswith("recipe=") for c in group_choices) else ["~recipe", *group_choices]
        )
        plain = to_plain(to_config(raw))
    except (ConfigError, HydraException):
        return []
    return [*_flatten(plain), *GROUPS, "recipe"]


def _flatten(value: dict[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, item in value.items():
        if isinstance(item, dict) and f"{prefix}{key}." not in _OPEN:
            keys += _flatten(item, f"{prefix}{key}.")
        elif key != "kind":
            keys.append(prefix + key)
    return keys
