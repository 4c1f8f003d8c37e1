"""Images a second from JPEG files to uint8 batches, against torchvision's and timm's loaders.

    python tools/bench/image_loader.py [--peers DIR]

All sides read the same 1,280 files of about 100 KB (500 x 400), make batches of 64 random-resized crops to 224
with flips, and have 2 processes; nothing is trained. Ours reads the shards that `python -m lctrain stage` makes of
the files. Sides take turns; a turn starts a loader, throws its first batches away and times the ones after them, so
that neither starting nor batches made before the clock ran count. torchvision and timm live in a virtual environment
of their own in --peers, which is made when it is missing (several GB).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Generator
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from common import Side, finish, give, take_turns, wait_for_turn, wall_seconds

FILES, CLASSES, HEIGHT, WIDTH, QUALITY = 1280, 10, 400, 500, 95
BATCH, SIZE, WORKERS = 64, 224, 2
WARM, TIMED, ROUNDS = 6, 40, 5
TARGETS = {"torchvision": 2.0, "timm": 1.7}
PACKAGES = ("torch==2.14.1", "torchvision==0.29.1", "timm==1.0.31")
_ENDLESS = 10**6


def main() -> None:
    """Measure."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--peers", type=Path, default=Path("~/.cache/lctrain-bench/peers").expanduser())
    peers = peer_python(options.parse_args().peers)
    with tempfile.TemporaryDirectory() as folder:
        size = write_files(Path(folder, "files"))
        stage(Path(folder))
        pythons = {"exact": sys.executable, "fast": sys.executable, "torchvision": peers, "timm": peers}
        sides = [Side(__file__, name, python=python, arguments=[folder]) for name, python in pythons.items()]
        blocks = take_turns(sides, ROUNDS)
    rates = {name: [TIMED * BATCH / sum(block) for block in found] for name, found in blocks.items()}
    # Round by round, so that drifting load cancels.
    ratios = {
        peer: median(ours / theirs for ours, theirs in zip(rates["exact"], rates[peer], strict=True))
        for peer in TARGETS
    }
    finish(
        {
            "name": "image_loader",
            "ours": median(rates["exact"]),
            "peer": median(rates["torchvision"]),
            "ratio": ratios["torchvision"],
            "target": TARGETS["torchvision"],
            "ok": all(ratios[peer] >= target for peer, target in TARGETS.items()),
            "unit": "images/s",
            "timm": median(rates["timm"]),
            "timm_ratio": ratios["timm"],
            "timm_target": TARGETS["timm"],
            "fast": median(rates["fast"]),
            "file_bytes": size,
        }
    )


def peer_python(folder: Path) -> str:
    """The interpreter of the peers' environment, which is made when it does not work."""
    python = folder / "bin" / "python"
    probe = [str(python), "-c", "import torchvision, timm"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        print(f"installing {', '.join(PACKAGES)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True, stdout=sys.stderr)
    return str(python)


def write_files(folder: Path) -> int:
    """FILES pictures under `folder`, one folder a class; their mean size in bytes."""
    sizes = []
    for number in range(FILES):
        path = folder / "train" / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
        sizes.append(path.stat().st_size)
    return sum(sizes) // len(sizes)


def picture(seed: int) -> bytes:
    """A JPEG with the spectrum of a photograph (weaker noise on finer grids) and a few sharp edges."""
    import numpy as np
    from PIL import Image, ImageDraw

    random = np.random.default_rng(seed)
    total = np.full((HEIGHT, WIDTH, 3), 128, np.float32)
    for cells, strength in ((4, 45.0), (16, 25.0), (64, 14.0), (400, 7.0)):
        grid = strength * random.standard_normal((HEIGHT * cells // 400, WIDTH * cells // 400, 3), np.float32)
        for channel in range(3):
            layer = Image.fromarray(grid[..., channel]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer)
    image = Image.fromarray(total.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(5):
        left, top = (int(random.integers(0, side)) for side in (WIDTH, HEIGHT))
        box = (left, top, left + int(random.integers(20, 150)), top + int(random.integers(20, 150)))
        colour = tuple(random.integers(0, 256, 3).tolist())
        (draw.ellipse if random.random() < 0.5 else draw.rectangle)(box, outline=colour, width=4)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def config(folder: Path, decode: str) -> Any:
    """Our data configuration."""
    from lctrain.config.images import Decode, ImagesConfig

    return ImagesConfig(
        source=str(folder / "files"), cache=str(folder / "cache"), image_size=SIZE, decode=Decode[decode]
    )


def stage(folder: Path) -> None:
    """Copy the files into shards, as `python -m lctrain stage` does."""
    from lctrain.data.images.prepare import prepare_images

    prepare_images(config(folder, "exact"), split="train", report=lambda line: print(line, file=sys.stderr))


def ours(folder: Path, decode: str) -> Callable[[], Generator[Any, None, None]]:
    """Batches of lctrain."""
    from lctrain.data.images.loader import ImageLoader
    from lctrain.data.images.prepare import prepare_images
    from lctrain.data.order import SampleOrder

    cfg = config(folder, decode)
    store = prepare_images(cfg, split="train", report=lambda _: None)
    assert store is not None
    loader = ImageLoader(
        store,
        cfg=cfg,
        order=SampleOrder(size=len(store), seed=0, global_batch_size=BATCH),
        seed=0,
        micro_batch_size=BATCH,
        workers=WORKERS,
        prefetch=cfg.prefetch,
    )
    return lambda: (batches[0].images for _, batches in loader.iterate(0, _ENDLESS))


class Repeated:
    """A data set many times over, so that a loader does not end in a turn."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) * 100

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def torchvision(folder: Path) -> Callable[[], Generator[Any, None, None]]:
    """Batches of ImageFolder, transforms and DataLoader."""
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    data = ImageFolder(str(folder / "files" / "train"), transforms.Compose(steps))
    loader = DataLoader(Repeated(data), batch_size=BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)
    return lambda: (images for images, _ in loader)


def timm(folder: Path) -> Callable[[], Generator[Any, None, None]]:
    """Batches of timm: its loader as it is for training, but uint8 batches are kept on the CPU as they are."""
    from timm.data import create_dataset, create_loader, create_transform
    from timm.data.loader import fast_collate

    data = create_dataset("", root=str(folder / "files" / "train"))
    loader = create_loader(
        Repeated(data),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        no_aug=False,
        num_workers=WORKERS,
        use_prefetcher=False,
        collate_fn=fast_collate,
        persistent_workers=False,
    )
    # The transform of its prefetcher: NumPy arrays of uint8, which fast_collate puts together.
    data.transform = create_transform(
        SIZE, is_training=True, use_prefetcher=True, interpolation="bilinear", color_jitter=None, hflip=0.5
    )
    return lambda: (images for images, _ in loader)


def side(name: str, folder: Path) -> NoReturn:
    """In a side: a new loader each turn."""
    makers = {"torchvision": torchvision, "timm": timm}
    start = makers[name](folder) if name in makers else ours(folder, name)
    while True:
        wait_for_turn()
        batches = start()
        for _ in range(WARM):
            images = next(batches)
            assert images.numel() == BATCH * SIZE * SIZE * 3
            assert images.element_size() == 1
        seconds = wall_seconds(lambda it=batches: [next(it).shape for _ in range(TIMED)])
        batches.close()
        give([seconds])


if __name__ == "__main__":
    side(sys.argv[2], Path(sys.argv[3])) if sys.argv[1:2] == ["--side"] else main()
