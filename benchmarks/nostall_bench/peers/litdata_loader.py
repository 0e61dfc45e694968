"""litdata: chunks on a local path, its own shuffle, worker processes of its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import Job, listing
from nostall_bench.peers.torch_loader import decoder, raw_collate

REQUIRES = ("litdata", "torch", "torchvision")


def _item(file: tuple[str, int]) -> dict[str, Any]:
    path, label = file
    return {"jpg": Path(path).read_bytes(), "cls": label}


def prepare(data: Path, work: Path) -> Path:
    """Writes chunks of 64 MB, the size of its documentation."""
    import litdata

    out = work / "litdata"
    if not (out / "index.json").exists():
        files = [(str(path), int(label)) for path, label in listing(data)]
        litdata.optimize(_item, files, str(out), chunk_bytes="64MB", num_workers=1)
    return out


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Worker processes that stay."""
    import litdata
    import torch

    torch.set_num_threads(1)
    if job.remote:  # its client of S3 has no option for an endpoint without TLS
        from litdata.streaming import downloader

        getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = True
    decode = decoder("tv")
    mode = job.mode

    class Images(litdata.StreamingDataset):  # type: ignore[misc]
        """Samples as (bytes or image, label)."""

        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return (decode(sample["jpg"]) if mode == "transform" else sample["jpg"]), sample["cls"]

    loader = litdata.StreamingDataLoader(
        Images(
            job.remote or str(job.prepared),
            **({"cache_dir": job.cache} if job.remote else {}),
            shuffle=True,
            seed=job.seed,
            drop_last=False,
        ),
        batch_size=job.batch_size,
        num_workers=job.threads,
        persistent_workers=True,
        collate_fn=raw_collate if mode == "read" else None,
    )
    for _ in range(job.epochs):
        yield (len(labels) for _, labels in loader)
