"""``nostall demo tokens``: a small GPT on real text on slow storage, with torch's loader and this one.

The text is what lies on every machine: the sources of Python's own library and the licences of the
system, as bytes. Both trainings have the same model, the same number of steps, and cold storage.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.slowfs import SlowFS

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

END = 256  # the id after each document; below it are bytes
LENGTH = 256
BATCH = 8


def text() -> list[Path]:
    """The files of the text, sorted."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    licences = Path("/usr/share/common-licenses")
    if licences.is_dir():
        found += [p for p in licences.iterdir() if p.is_file()]
    return sorted(found)


def make(path: Path, most: int = 32 << 20) -> int:
    """Writes at most so many bytes of text as ids of 16 bits; how many."""
    parts: list[np.ndarray[Any, Any]] = []
    size = 0
    for file in text():
        ids = np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16)
        if size + len(ids) + 1 > most:
            break
        parts += [ids, np.array([END], np.uint16)]
        size += len(ids) + 1
    if size < 1 << 20:
        raise UsageError(f"there is not enough text in {sysconfig.get_paths()['stdlib']}")
    np.concatenate(parts).tofile(path)
    return size


def run(arguments: argparse.Namespace) -> int:
    """Runs both trainings; prints the table, writes JSON."""
    console = harness.console()
    home = Path(arguments.dir).absolute() / "tokens"
    home.mkdir(parents=True, exist_ok=True)
    ids = make(home / "text.bin")
    rate = arguments.bandwidth * 1e6
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="nostall-demo-") as mount,
        SlowFS(home, mount, rate, rate, arguments.latency_ms / 1e3) as storage,
    ):
        console.print(
            f"{ids / 1e6:.1f} M ids of {len(text())} files; storage of {arguments.bandwidth:g} MB/s, "
            f"{arguments.latency_ms:g} ms per operation"
        )
        for loader in ("torch", "nostall"):
            storage.drop_caches()
            before = storage.served_bytes
            settings = {
                "loader": loader,
                "data": str(Path(mount, "text.bin")),
                "steps": arguments.steps,
                "seed": arguments.seed,
                "workers": arguments.workers or len(os.sched_getaffinity(0)),
            }
            with console.status(f"training with {loader}"):
                found = harness.child("nostall_bench.demo.tokens", settings, name=loader)
            results[loader] = {**found, "storage_bytes": storage.served_bytes - before}
    console.print(summary(results))
    harness.write(home / "demo.json", **results)
    console.print(f"numbers {home / 'demo.json'}")
    return 0


def summary(results: dict[str, Any]) -> Table:
    """Both trainings, and what was gained."""
    ours, theirs = results["nostall"], results["torch"]
    out = harness.table(
        "a small GPT on slow storage",
        *("loader", "seconds", "waited", "of the time", "read from storage", "last loss"),
        caption=f"nostall: {theirs['seconds'] / ours['seconds']:.2f} times as fast, "
        f"{theirs['stalled'] - ours['stalled']:.1f} s less waiting",
    )
    for name, found in results.items():
        out.add_row(
            name,
            f"{found['seconds']:.1f}",
            f"{found['stalled']:.1f} s",
            f"{found['stalled'] / found['seconds']:.1%}",
            f"{found['storage_bytes'] / 1e6:.1f} MB",
            f"{found['loss']:.6f}",
        )
    return out


def _model(seed: int) -> nn.Module:
    import torch
    from torch import nn

    class GPT(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
            super().__init__()
            self.ids = nn.Embedding(END + 1, width)
            self.places = nn.Embedding(LENGTH, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, 0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
            self.head = nn.Linear(width, END + 1)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.ids(ids) + self.places(torch.arange(ids.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            logits: Tensor = self.head(x)
            return logits

    torch.manual_seed(seed)
    return GPT()


class _Windows:
    """What a training without this project has: windows of a memory map, one token longer."""

    def __init__(self, path: str) -> None:
        self._ids = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self._ids) - 1) // LENGTH

    def __getitem__(self, i: int) -> np.ndarray[Any, Any]:
        return self._ids[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64)


def _batches(settings: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    if settings["loader"] == "torch":
        import torch

        source: Any = _Windows(settings["data"])
        # As on a rank of a job: the order is then this project's too, and so is the loss.
        sampler: Any = torch.utils.data.distributed.DistributedSampler(
            source, 1, 0, seed=settings["seed"]
        )
        loader = torch.utils.data.DataLoader(
            source, BATCH, sampler=sampler, num_workers=settings["workers"]
        )
        for batch in loader:
            yield batch[:, :-1], batch[:, 1:]
        raise UsageError(f"the text has no more than {len(loader)} batches: pass a smaller --steps")
    import nostall

    source = nostall.Windows(nostall.Tokens(settings["data"], dtype="uint16", index=False), LENGTH)
    with nostall.DataLoader(
        source, BATCH, steps=settings["steps"], seed=settings["seed"], output="torch"
    ) as ours:
        for found in ours:
            yield found["ids"], found["labels"]


def _train(settings: dict[str, Any]) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)  # the steps stand for an accelerator's: the rest of the machine loads
    model = _model(settings["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    began, stalled, loss = time.perf_counter(), 0.0, torch.zeros(())
    batches = _batches(settings)
    for _ in range(settings["steps"]):
        asked = time.perf_counter()
        ids, labels = next(batches)
        stalled += time.perf_counter() - asked
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return {
        "seconds": time.perf_counter() - began,
        "stalled": stalled,
        "loss": float(loss),
    }


if __name__ == "__main__":
    harness.answer(_train)
    os._exit(0)
