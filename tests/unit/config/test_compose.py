"""From words on the command line to a typed config, and what a person is told when that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from lctrain.config.compose import compose_config, options, overlay
from lctrain.config.data import JsonlConfig, TextConfig
from lctrain.config.parallel import DdpConfig, FsdpSpConfig, HsdpConfig
from lctrain.config.plain import from_plain, to_plain
from lctrain.config.schedule import ConstantConfig, LinearConfig
from lctrain.errors import ConfigError

TINY = "recipe=llama_tiny_32k"


def message(*overrides: str, config_dir: Path | None = None) -> str:
    """What composing `overrides` says when it refuses them."""
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides, config_dir=None if config_dir is None else str(config_dir))
    return str(caught.value)


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_groups() -> None:
    config = compose_config([TINY, "parallel=hsdp", "parallel.dp_replicate_size=4", "optim.lr=0.5"])
    assert isinstance(config.parallel, HsdpConfig)
    assert config.parallel.dp_replicate_size == 4
    assert config.optim.lr == 0.5
    assert isinstance(config.schedule, ConstantConfig)  # the recipe's, not the root's cosine
    assert config.recipe == "llama_tiny_32k"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lrr=1", "did you mean optim.lr"),
        ("train.micro_batch=1", "did you mean train.micro_batch_size"),
        ("data.maxlength=1", "did you mean data.max_length"),
        ("max_length=1", "did you mean data.max_length or"),
        ("launch.nproc=1", "did you mean launch.nproc_per_node"),
        ("zzz=1", "zzz is not a field of this configuration"),
        ("parallel.sp_sizes=2", "did you mean parallel.sp_size"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, said: str) -> None:
    text = message(TINY, override)
    assert said in text
    assert override.split("=")[0] in text


def test_a_field_of_another_option_is_not_a_field_here() -> None:
    text = message(TINY, "parallel=ddp", "parallel.sp_size=2")
    assert "parallel.sp_size is not a field" in text
    assert "parallel has: bucket_mb" in text


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("gradient_accumulation_steps", "train.global_batch_size / (train.micro_batch_size x data ranks)"),
        ("train.gradient_accumulation_steps", "it is derived"),
        ("per_device_train_batch_size", "use train.micro_batch_size"),
        ("learning_rate", "use optim.lr"),
        ("num_train_epochs", "use train.max_epochs"),
        ("attn_implementation", "use model.attention"),
        ("model.attn_implementation", "use model.attention"),
        ("activation_checkpointing", "use memory=full"),
        ("gradient_checkpointing", "use memory=full"),
        ("resume_from_checkpoint", "use checkpoint.resume"),
        ("max_seq_length", "use data.max_length"),
        ("output_dir", "use run_dir"),
    ],
)
def test_names_of_other_tools_say_where_theirs_lives_here(name: str, where: str) -> None:
    text = message(TINY, f"{name}=1")
    assert text.startswith(f"{name} is not a field; ")
    assert where in text


def test_unknown_recipe_and_options_list_what_there_is() -> None:
    text = message("recipe=llama_tiny_32")
    assert "recipe=llama_tiny_32 does not exist; did you mean llama_tiny_32k" in text
    assert "llama7b_32k" in text
    text = message(TINY, "parallel=fdsp")
    assert "did you mean fsdp" in text
    assert "single" in text
    text = message()
    assert "recipe is not given; choose one:" in text
    assert "llama_tiny_32k" in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=fast", "Value 'fast'"),
        ("train.max_steps=1.5", "Value '1.5'"),
        ("memory.recompute=some", "Invalid value 'some'"),
        ("device=tpu", "Invalid value 'tpu'"),
        ("logging.tensorboard=7.5", "Value '7.5'"),
        ("model.rope_scaling.type=ntk", "Invalid value 'ntk'"),
    ],
)
def test_a_wrong_type_names_field_and_value(override: str, said: str) -> None:
    text = message(TINY, override)
    assert text.startswith(f"{override}: ")
    assert said in text
    assert "give a value of that type" in text


def test_an_override_that_does_not_parse_says_how_to_quote() -> None:
    assert "quote values" in message(TINY, "data.path=[a")


def test_an_interpolation_that_leads_nowhere() -> None:
    assert "correct the interpolation" in message(TINY, "run_dir=${nowhere}")


def test_one_field_checks_run_while_composing() -> None:
    assert "optim.lr=-1.0 must be positive" in message(TINY, "optim.lr=-1")


def test_architecture_keys_can_be_added() -> None:
    assert "++model.architecture.head_dim=VALUE" in message(TINY, "model.architecture.head_dim=16")
    config = compose_config([TINY, "++model.architecture.head_dim=16"])
    assert config.model.architecture["head_dim"] == 16


def test_the_standard_librarys_own_sources() -> None:
    config = compose_config([TINY])
    assert isinstance(config.data, TextConfig)
    assert (Path(str(config.data.path)) / "os.py").is_file()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of one's own recipe and group option."""
    for path, text in {
        "recipe/mine.yaml": (
            "# @package _global_\n# My own.\ndefaults:\n  - llama_tiny_32k\n  - override /optim: decayed\n"
            "recipe: mine\ntrain:\n  max_steps: 77\n"
        ),
        "optim/decayed.yaml": (
            "# AdamW that decays.\ndefaults:\n  - schema_adamw@_here_\n  - _self_\nweight_decay: 0.25\n"
        ),
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_private_recipes_and_options(private: Path) -> None:
    config = compose_config(["recipe=mine"], config_dir=str(private))
    assert (config.recipe, config.train.max_steps) == ("mine", 77)
    assert config.train.global_batch_size == 2  # from llama_tiny_32k below it
    assert compose_config([TINY, "optim=decayed"], config_dir=str(private)).optim.weight_decay == 0.25
    assert options("recipe", str(private))["mine"] == "My own."


def test_private_names_are_offered(private: Path) -> None:
    assert "did you mean mine" in message("recipe=mien", config_dir=private)
    assert "recipe=mine does not exist" in message("recipe=mine")
    assert "is not a folder" in message(TINY, config_dir=private / "nowhere")


def test_a_recipe_that_sets_a_field_its_groups_lack(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\nrecipe: odd\nparallel:\n  sp_size: 2\n"
    (tmp_path / "recipe" / "odd.yaml").write_text(text)
    said = message("recipe=odd", config_dir=tmp_path)
    assert "recipe/odd" in said
    assert "sp_size" in said


def test_overlay_keeps_what_was_saved_and_takes_what_is_given() -> None:
    saved = compose_config([TINY, "optim.lr=0.5", "data=jsonl", "data.path=a.jsonl", "data.max_length=64"])
    changed = overlay(saved, ["parallel=ddp", "data.path=b.jsonl", "eval.max_sequences=9"])
    assert isinstance(changed.parallel, DdpConfig)
    assert isinstance(changed.data, JsonlConfig)
    assert (changed.data.path, changed.data.max_length) == ("b.jsonl", 64)
    assert changed.eval.max_sequences == 9
    wanted = to_plain(saved)
    wanted["parallel"] = to_plain(DdpConfig())
    wanted["data"]["path"], wanted["eval"]["max_sequences"] = "b.jsonl", 9
    assert to_plain(changed) == wanted


def test_overlay_of_a_group_and_its_fields() -> None:
    saved = compose_config([TINY])
    changed = overlay(saved, ["schedule=linear", "schedule.min_lr_ratio=0.5", "parallel.sp_size=1"])
    assert isinstance(changed.schedule, LinearConfig)
    assert changed.schedule.min_lr_ratio == 0.5
    assert isinstance(changed.parallel, FsdpSpConfig)
    assert changed.parallel.sp_size == 1


def test_overlay_checks_as_composing_does() -> None:
    saved = compose_config([TINY, "parallel=ddp"])
    with pytest.raises(ConfigError, match=r"parallel\.sp_size is not a field"):
        overlay(saved, ["parallel.sp_size=2"])
    with pytest.raises(ConfigError, match="must be positive"):
        overlay(saved, ["optim.lr=-1"])
    with pytest.raises(ConfigError, match="parallel=nope does not exist"):
        overlay(saved, ["parallel=nope"])


def test_overlay_of_a_recipe_that_is_no_longer_there(private: Path) -> None:
    saved = compose_config(["recipe=mine", "data.max_length=99"], config_dir=str(private))
    changed = overlay(saved, ["train.max_steps=3"])
    assert (changed.train.max_steps, changed.data.max_length, changed.optim.weight_decay) == (3, 99, 0.25)
    assert changed.recipe == "mine"
    assert from_plain(to_plain(changed)) == changed
