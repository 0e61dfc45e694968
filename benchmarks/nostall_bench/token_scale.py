"""``nostall bench tokens --scale``: many files and documents: their index, packing, and resuming.

Each step is a process of its own. Files are cold where they are read as a whole: the index is compared
with plain reads of the same files. Resuming is measured on 1 to 64 ranks, as one rank after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nostall_bench import harness
from nostall_bench.token_peers import END

_PIECE = 4 << 20
_THREADS = 8
_LENGTH = 4096
_GLOBAL_BATCH = 64
_NAMES = {
    "documents": ("documents", "{:.3g}"),
    "read_mb_s": ("plain reads, MB/s", "{:.0f}"),
    "index_mb_s": ("index built, MB/s", "{:.0f}"),
    "index_share": ("index built, of plain reads", "{:.2f}"),
    "index_bytes": ("stored index, bytes a document", "{:.2f}"),
    "first_batch_s": ("first batch with a stored index, s", "{:.2f}"),
    "pack_s": ("packing planned, s", "{:.1f}"),
    "pack_mb": ("most memory while planning, MB", "{:.0f}"),
    "waste": ("packing, wasted", "{:.4%}"),
    "state_bytes": ("state, bytes", "{}"),
}


def make(folder: Path, files: int, documents: int, mean: int) -> None:
    """Files of documents of 1 to twice `mean` ids; each has the same documents in another order."""
    done = folder / "made"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 2 * mean + 1, documents // files)
    for file in range(files):
        ends = np.cumsum(np.roll(lengths, file) + 1)
        ids = draw.integers(1, 50_000, int(ends[-1]), np.uint16)
        ids[ends - 1] = END
        with (folder / f"part-{file:05d}.bin").open("wb") as out:
            ids.tofile(out)
            out.flush()
            os.fsync(out.fileno())
    done.touch()


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints one table."""
    files, documents, mean = arguments.files, arguments.documents, arguments.document_tokens
    home = Path(arguments.dir).absolute() / f"scale-{files}-{documents}-{mean}"
    make(home, files, documents, mean)
    index = home / "stored.index"
    index.unlink(missing_ok=True)
    found: dict[str, Any] = {}
    for step in ("read", "index", "batch", "pack", "resume"):
        settings: dict[str, Any] = {"step": step, "folder": str(home), "index": str(index)}
        settings["worlds"] = arguments.ranks
        found |= harness.child(
            "nostall_bench.token_scale", settings, name=step, timeout=arguments.timeout
        )
    found["index_share"] = found["index_mb_s"] / found["read_mb_s"]
    table = harness.table(
        f"{files} files of tokens, {found['bytes'] / 1e9:.2f} GB", "what", "found"
    )
    for key, (name, form) in _NAMES.items():
        table.add_row(name, form.format(found[key]))
    for world in arguments.ranks:
        table.add_row(f"resume on {world} ranks, ms", f"{found[f'resume_{world}_ms']:.0f}")
    harness.console().print(table)
    harness.write(arguments.json, scale=found)
    return 0


def _cold(folder: Path) -> list[Path]:
    files = sorted(folder.glob("part-*.bin"))
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return files


def _read(file: Path) -> int:
    into, size = bytearray(_PIECE), 0
    with file.open("rb", buffering=0) as data:
        while count := data.readinto(into):
            size += count
    return size


def _plain(folder: Path) -> dict[str, float]:
    files = _cold(folder)
    began = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as threads:
        size = sum(threads.map(_read, files))
    return {"bytes": size, "read_mb_s": size / 1e6 / (time.perf_counter() - began)}


def _open(settings: dict[str, Any]) -> Any:
    import nostall

    folder, index = Path(settings["folder"]), settings["index"]
    return nostall.Tokens(folder / "part-*.bin", dtype="uint16", end=END, index=index)


def _index(settings: dict[str, Any]) -> dict[str, float]:
    size = sum(f.stat().st_size for f in _cold(Path(settings["folder"])))
    began = time.perf_counter()
    tokens = _open(settings)
    seconds = time.perf_counter() - began
    stored = Path(settings["index"]).stat().st_size
    return {
        "documents": tokens.documents,
        "index_mb_s": size / 1e6 / seconds,
        "index_bytes": stored / tokens.documents,
    }


def _first_batch(settings: dict[str, Any]) -> dict[str, float]:
    import nostall

    began = time.perf_counter()
    windows = nostall.Windows(_open(settings), _LENGTH)
    with nostall.DataLoader(windows, 8, order="keyed", tiers=[], output="numpy") as loader:
        next(iter(loader))
        return {"first_batch_s": time.perf_counter() - began}


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pack(settings: dict[str, Any]) -> dict[str, float]:
    import nostall

    tokens = _open(settings)
    before, began = _peak(), time.perf_counter()
    packed = nostall.Packed(tokens, _LENGTH, longer="cut")
    seconds = time.perf_counter() - began
    return {"pack_s": seconds, "pack_mb": (_peak() - before) / 1e6, "waste": packed.waste}


def _resume(settings: dict[str, Any]) -> dict[str, float]:
    """The same global batch on every number of ranks, packing and mixing on."""
    import nostall

    stream = _open(settings)
    packed, windows = (
        nostall.Packed(stream, _LENGTH, longer="cut"),
        nostall.Windows(stream, _LENGTH),
    )
    mixture = nostall.Mixture({packed: 0.7, windows: 0.3}, per="tokens")

    def rank_of(world: int, rank: int) -> Any:
        place: dict[str, Any] = {"rank": rank, "world_size": world}
        place |= {"local_rank": 0, "local_world_size": 1, "job": f"scale-{world}-{rank}"}
        options: dict[str, Any] = {"tiers": [], "output": "numpy", "peers": "off"}
        return nostall.DataLoader(mixture, _GLOBAL_BATCH // world, **place, **options)

    with rank_of(1, 0) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    found: dict[str, float] = {"state_bytes": len(json.dumps(state, separators=(",", ":")))}
    seen = set()
    for world in settings["worlds"]:
        seconds, rows = [], []
        for rank in range(world):
            began = time.perf_counter()
            with rank_of(world, rank) as loader:
                loader.load_state_dict(state)
                batch = next(iter(loader))
                seconds.append(time.perf_counter() - began)
                rows += [row.tobytes() for row in batch["ids"]]
        seen.add(hashlib.sha256(b"".join(sorted(rows))).hexdigest())
        found[f"resume_{world}_ms"] = 1e3 * float(np.median(seconds))
    if len(seen) != 1:
        raise RuntimeError("other numbers of ranks gave other global batches")
    return found


def _measure(settings: dict[str, Any]) -> dict[str, float]:
    step = settings["step"]
    if step == "read":
        return _plain(Path(settings["folder"]))
    importlib.import_module("nostall")  # outside of the time
    steps = {"index": _index, "batch": _first_batch, "pack": _pack, "resume": _resume}
    return steps[step](settings)


if __name__ == "__main__":
    harness.answer(_measure)
    os._exit(0)
