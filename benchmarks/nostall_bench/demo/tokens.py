"""``nostall demo tokens``: a small GPT on real text on slow storage, with three loaders.

The text is what lies on every machine: the sources of Python's own library and the licences of the
system, as bytes. All trainings have the same model, the same batches, the same number of steps, and
cold storage. Unless a bandwidth is given, the storage brings four times the bytes that the training
consumes: a step is measured first, with batches that cost nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nostall.loader
import nostall.source
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.slowfs import SlowFS, memory_words

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

END = 256  # the id after each document; below it are bytes
LENGTH = 256
BATCH = 8
_PAGE = 4096
_MEASURED = 10  # steps that tell what the training consumes


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
    """Runs the trainings; prints the table, writes JSON."""
    console = harness.console()
    home = Path(arguments.dir).absolute() / "tokens"
    home.mkdir(parents=True, exist_ok=True)
    console.print(f"making a text of {len(text())} files in {home} ...")
    ids = make(home / "text.bin")
    fixed = {
        "data": str(home / "text.bin"),
        "seed": arguments.seed,
        "workers": arguments.workers or len(os.sched_getaffinity(0)),
    }
    rate, chosen = (arguments.bandwidth or 0) * 1e6, ""
    if not rate:
        given = {**fixed, "loader": "none", "steps": _MEASURED}
        with console.status("measuring a step"):
            found = harness.child("nostall_bench.demo.tokens", given, name="a step")
        # Windows lie on one page or two.
        consumed = BATCH * (_PAGE + 2 * (LENGTH + 1))
        rate = 4 * consumed * _MEASURED / (found["seconds"] - found["stalled"])
        chosen = (
            " (four times what the training needs if only the pages of "
            f"{_PAGE >> 10} KB are read that hold a window)"
        )
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="nostall-demo-") as mount,
        SlowFS(
            home,
            mount,
            rate,
            rate,
            arguments.latency_ms / 1e3,
            keep_cache=arguments.keep_cache,
        ) as storage,
    ):
        console.print(
            f"{ids / 1e6:.1f} M ids of {len(text())} files; storage of {rate / 1e6:.3g} MB/s{chosen}, "
            f"{arguments.latency_ms:g} ms per operation; a memory map of it reads "
            f"{read_ahead(Path(mount))} for a window; {memory_words(arguments.keep_cache)}"
        )
        for loader in loaders():
            storage.drop_caches()
            before = storage.served_bytes
            given = {**fixed, "loader": loader, "steps": arguments.steps}
            given["data"] = str(Path(mount, "text.bin"))
            with console.status(f"training with {loader}"):
                found = harness.child("nostall_bench.demo.tokens", given, name=loader)
            results[loader] = {**found, "storage_bytes": storage.served_bytes - before}
    console.print(summary(results))
    harness.write(home / "demo.json", **results)
    console.print(f"numbers {home / 'demo.json'}")
    return 0


def read_ahead(mount: Path) -> str:
    """What the kernel reads of a file there when one page of a memory map is asked for."""
    device = mount.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return f"{setting.read_text().strip()} KB" if setting.exists() else "ahead"


def loaders() -> list[str]:
    """Those that are installed."""
    return ["torch", *(["Grain"] if importlib.util.find_spec("grain") else []), "nostall"]


def summary(results: dict[str, Any]) -> Table:
    """All trainings, and what was gained."""
    ours, theirs = results["nostall"], results["torch"]
    out = harness.table(
        "a small GPT on slow storage",
        *("loader", "seconds", "waited", "of the time", "read from storage", "last loss"),
        caption=f"nostall: {theirs['seconds'] / ours['seconds']:.2f} times as fast as torch, "
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


def _order(settings: dict[str, Any], windows: _Windows) -> list[int]:
    """As on a rank of a job of torch: it is this project's order too, and so the loss is the same."""
    import torch

    sampler: Any = torch.utils.data.distributed.DistributedSampler(
        windows, 1, 0, seed=settings["seed"]
    )
    return list(sampler)


def _batches_of_torch(settings: dict[str, Any]) -> Iterator[Tensor]:
    import torch

    windows = _Windows(settings["data"])
    yield from torch.utils.data.DataLoader(
        windows, BATCH, sampler=_order(settings, windows), num_workers=settings["workers"]
    )


def _batches_of_grain(settings: dict[str, Any]) -> Iterator[Tensor]:
    import grain
    import torch

    windows = _Windows(settings["data"])
    samples = grain.MapDataset.source(_order(settings, windows)).map(windows.__getitem__)
    for batch in samples.batch(BATCH).to_iter_dataset():
        yield torch.from_numpy(np.asarray(batch))


def _batches(settings: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    if settings["loader"] in ("torch", "Grain"):
        batches = _batches_of_torch if settings["loader"] == "torch" else _batches_of_grain
        for batch in batches(settings):
            yield batch[:, :-1], batch[:, 1:]
        raise UsageError(
            f"the text has no {settings['steps']} batches: pass a smaller --steps than that"
        )
    if settings["loader"] == "none":
        import torch

        while True:
            batch = torch.randint(END, (BATCH, LENGTH + 1))
            yield batch[:, :-1], batch[:, 1:]
    source = nostall.Windows(nostall.Tokens(settings["data"], dtype="uint16", index=False), LENGTH)
    with nostall.DataLoader(
        source, BATCH, steps=settings["steps"], seed=settings["seed"], output="torch"
    ) as ours:
        for found in ours:
            yield found["ids"], found["labels"]


def _train(settings: dict[str, Any]) -> dict[str, float]:
    import torch

    if settings["loader"] == "Grain":
        importlib.import_module("grain")  # takes no part of the time, as of the other loaders
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
