"""torch's DataLoader with PIL or torchvision's decode_jpeg; the variant is "<workers> <how>".

Samples of several fields are made as in torchvision's own examples: `tv_tensors`, which the transforms
of v2 move together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import ALPHA, CLASSES, MEAN, SIDE, STD, Job, listing
from nostall_bench.records import FIELDS, FRAMES, paths

REQUIRES = ("torch", "torchvision")


def decoder(how: str, mode: str = "transform") -> Callable[[bytes], Any]:
    """A function from JPEG bytes to a float32 tensor of shape (3, 224, 224)."""
    import io

    import torch
    from PIL import Image
    from torchvision.transforms import v2

    bicubic = v2.InterpolationMode.BICUBIC
    recipe = mode == "recipe"
    steps: list[Any] = [
        v2.RandomResizedCrop(SIDE, **({"interpolation": bicubic} if recipe else {})),
        v2.RandomHorizontalFlip(),
        *([v2.RandAugment()] if recipe else []),
        *([v2.PILToTensor()] if how == "pil" else []),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
        *([v2.RandomErasing()] if recipe else []),
    ]
    apply = v2.Compose(steps)
    if how == "pil":
        return lambda data: apply(Image.open(io.BytesIO(data)).convert("RGB"))
    return lambda data: apply(_tensor_of(data))


def _tensor_of(data: bytes) -> Any:
    import numpy as np
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    array = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return decode_jpeg(array, ImageReadMode.RGB)


def prepared(how: str) -> Callable[[bytes], Any]:
    """A function from JPEG bytes to a uint8 tensor of shape (3, 224, 224), the same at every call."""
    import io

    from PIL import Image
    from torchvision.transforms import v2

    cut = v2.Compose([v2.Resize(SIDE + 32), v2.CenterCrop(SIDE)])
    if how == "pil":
        return lambda data: v2.functional.pil_to_tensor(
            cut(Image.open(io.BytesIO(data)).convert("RGB"))
        )
    return lambda data: cut(_tensor_of(data))


def record(mode: str, how: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function from a sample's files by field, paths or file objects, to its part of a batch."""
    import wave

    import numpy as np
    import torch
    from PIL import Image
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    if mode == "array":
        return lambda files: (torch.from_numpy(np.load(files["array"])),)
    if mode == "wav":

        def sound(files: dict[str, Any]) -> tuple[Any, ...]:
            with wave.open(files["sound"]) as file:
                values = np.frombuffer(file.readframes(FRAMES), np.int16)
            whole = torch.zeros(FRAMES)
            whole[: len(values)] = torch.from_numpy(values.astype(np.float32) / 32768)
            return (whole,)

        return sound
    apply = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(
                {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None},
                scale=True,
            ),
            v2.Normalize(MEAN, STD),
        ]
    )

    def pictures(files: dict[str, Any]) -> tuple[Any, ...]:
        image: Any
        if how == "pil":
            image = Image.open(files["image"]).convert("RGB")
            size = image.size[::-1]
        else:
            at = files["image"]
            image = tv_tensors.Image(
                _tensor_of(Path(at).read_bytes() if isinstance(at, str) else at.read())
            )
            size = image.shape[-2:]
        if mode == "image + text":
            at = files["text"]
            text = Path(at).read_text() if isinstance(at, str) else at.read().decode()
            return apply(image), text
        if mode == "image + mask":
            mask = tv_tensors.Mask(torch.from_numpy(np.array(Image.open(files["mask"]))))
            return tuple(apply(image, mask))
        boxes = tv_tensors.BoundingBoxes(np.load(files["boxes"]), format="XYXY", canvas_size=size)
        return tuple(apply(image, boxes))

    return pictures


def collate_records(samples: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Fields of one shape are stacked; boxes and texts stay lists."""
    import torch

    columns = zip(*samples, strict=True)
    return tuple(
        list(values)
        if isinstance(values[0], str) or values[0].shape[1:] == (4,)
        else torch.stack(values)
        for values in columns
    )


class Records:
    """A map-style dataset over samples of several files."""

    def __init__(self, job: Job, how: str) -> None:
        self.samples = paths(job.prepared, [p for p, _ in listing(job.data)], job.mode)
        self.mode = job.mode
        self.how = how
        self.make: Callable[[dict[str, Any]], tuple[Any, ...]] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if self.make is None:
            self.make = record(self.mode, self.how)
        return self.make(self.samples[index])


class Files:
    """A map-style dataset over the files; a sample is (bytes or image, label)."""

    def __init__(self, job: Job, how: str) -> None:
        self.items = listing(job.data)
        self.mode = job.mode
        self.how = how
        self.decode: Callable[[bytes], Any] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.items[index]
        data = Path(path).read_bytes()
        if self.mode == "read":
            return data, label
        if self.decode is None:
            self.decode = (
                prepared(self.how) if self.mode == "cached" else decoder(self.how, self.mode)
            )
        return self.decode(data), label


def raw_collate(samples: list[tuple[Any, int]]) -> tuple[list[Any], list[int]]:
    """Keeps the bytes of the samples as they are."""
    return [s[0] for s in samples], [s[1] for s in samples]


def collate_mixed(samples: list[tuple[Any, int]]) -> Any:
    """Torchvision's MixUp of the samples: images and probabilities of classes."""
    from torch.utils.data import default_collate
    from torchvision.transforms import v2

    return v2.MixUp(alpha=ALPHA, num_classes=CLASSES)(*default_collate(samples))


_COLLATE = {"read": raw_collate, "recipe": collate_mixed}


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Shuffled globally, worker processes that stay."""
    import torch
    from torch.utils.data import DataLoader

    word, how = job.variant.split()
    workers = job.threads if word == "all" else int(word)
    records = job.mode in FIELDS
    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        Records(job, how) if records else Files(job, how),  # type: ignore[arg-type]
        batch_size=job.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(job.seed),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate_records if records else _COLLATE.get(job.mode),
    )
    for _ in range(job.epochs):
        yield (len(batch[-1]) for batch in loader)
