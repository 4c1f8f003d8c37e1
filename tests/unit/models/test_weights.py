"""Pretrained folders in, exported folders out, and the damage that is found on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lctrain.errors import ModelError
from lctrain.models.causal_lm import CausalLM, build_meta
from lctrain.models.materialize import materialize_empty
from lctrain.models.pretrained_files import check_pretrained
from lctrain.models.weights import load_pretrained
from tests.unit.models.tiny_models import FAMILIES, config_of, export, packed_batch, random_model

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _empty(family: str = "llama", **changes) -> CausalLM:
    model = build_meta(config_of(family, **changes))
    materialize_empty(model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def _same(a: CausalLM, b: CausalLM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_round_trip_through_transformers(family: str, shard_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model(family)
    export(model, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).is_file() == (shard_bytes < 10**9)
    assert not list(tmp_path.glob("*.tmp"))
    written = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert ("lm_head.weight" in written) == (family != "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model.model).__name__]
    assert config["dtype"] == "float32"
    ids, positions, _, documents = packed_batch()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    logits = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(model.logits(ids, positions, documents), logits, rtol=1e-4, atol=1e-4)
    check_pretrained(tmp_path)
    loaded = _empty(family)
    load_pretrained(loaded, tmp_path)
    assert _same(model, loaded)


def test_a_folder_written_by_transformers_loads_and_bf16_is_cast(tmp_path: Path) -> None:
    model = random_model()
    model.model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = _empty()
    load_pretrained(loaded, tmp_path)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    assert all(torch.equal(a.float(), b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_export_in_bf16_says_so(tmp_path: Path) -> None:
    export(random_model(), tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / FILE).values()} == {torch.bfloat16}


def test_export_does_not_mix_with_weights_already_there(tmp_path: Path) -> None:
    export(random_model(), tmp_path)
    with pytest.raises(ModelError, match="already holds weights"):
        export(random_model(), tmp_path)


def test_tied_weights_load_under_either_name_and_without_the_prefix(tmp_path: Path) -> None:
    model = random_model("qwen2")
    tensors = {n: t.contiguous().clone() for n, t in model.model.state_dict().items() if n != "lm_head.weight"}
    folders = {
        "embedding": dict(tensors),
        "head": {("lm_head.weight" if "embed" in n else n): t for n, t in tensors.items()},
        "both": {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        "bare": {n.removeprefix("model."): t for n, t in tensors.items()},
        "old": {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    }
    for name, content in folders.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / FILE)
        loaded = _empty("qwen2")
        load_pretrained(loaded, tmp_path / name)
        assert _same(model, loaded), name


def _saved(tmp_path: Path, change) -> Path:
    tensors = {n: t.clone() for n, t in random_model().model.state_dict().items()}
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight, unexpected none"),
        (lambda t: t.update(extra=torch.ones(2)), "missing none, unexpected extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(96, 32)}),
            r"lm_head.weight has shape \[96, 32\].*\[97, 32\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "stored as I8.*unquantised"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], "missing model.layers.1.*and 5 more"),
    ],
)
def test_other_weights_are_refused_by_name(change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_pretrained(_empty(), _saved(tmp_path, change))


def _exported(tmp_path: Path) -> Path:
    export(random_model(), tmp_path, shard_bytes=20_000)
    return sorted(tmp_path.glob("*.safetensors"))[1]


def test_damaged_folders_are_found_from_headers(tmp_path: Path) -> None:
    file = _exported(tmp_path)
    whole = file.read_bytes()
    for content, message in (
        (whole[:-5], "is truncated"),
        (whole[:5], "is truncated"),
        (whole + b"x", "is damaged"),
        (whole[:8] + b"!" + whole[9:], "header is not JSON"),
    ):
        file.write_bytes(content)
        for check in (check_pretrained, lambda path: load_pretrained(_empty(), path)):
            with pytest.raises(ModelError, match=f"{file.name}.*{message}"):
                check(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=f"{file.name} is missing"):
        check_pretrained(tmp_path)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    file = _exported(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = file.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{file.name} does not hold ghost"):
        check_pretrained(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match=r"index.json cannot be read"):
        check_pretrained(tmp_path)


def test_pickles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model.safetensors nor.*model.init=random"):
        check_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle.*convert"):
        check_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        check_pretrained(tmp_path / "none")


def test_the_cheap_check_needs_no_torch(tmp_path: Path) -> None:
    _exported(tmp_path)
    code = (
        "import sys; from lctrain.models.pretrained_files import check_pretrained;"
        f"check_pretrained({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
