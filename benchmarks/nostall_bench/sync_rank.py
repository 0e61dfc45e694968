"""One rank, for ``nostall bench sync``: trains run after run, and prints what it measured as JSON.

RANK=0 WORLD_SIZE=2 ... python -m nostall_bench.sync_rank RUNS.json, a list of settings
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision

from nostall.sync import SyncOptions
from nostall_bench import sync_horovod


def _images(side: int) -> tuple[int, ...]:
    return (3, side, side)


#: network: (its maker, shape of a sample)
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=100), _images(64)),
    "resnet34": (lambda: torchvision.models.resnet34(num_classes=100), _images(64)),
    "resnet50": (lambda: torchvision.models.resnet50(num_classes=100), _images(64)),
    "resnet101": (lambda: torchvision.models.resnet101(num_classes=100), _images(64)),
    "resnet152": (lambda: torchvision.models.resnet152(num_classes=100), _images(64)),
    "inception": (
        lambda: torchvision.models.inception_v3(
            num_classes=100, aux_logits=False, init_weights=False
        ),
        _images(96),
    ),
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=100, aux_logits=False, init_weights=False),
        _images(64),
    ),
    "alexnet": (lambda: torchvision.models.alexnet(num_classes=100), _images(96)),
    "vgg11": (lambda: torchvision.models.vgg11(num_classes=100), _images(64)),
    "vgg16": (lambda: torchvision.models.vgg16(num_classes=100), _images(64)),
    "transformer": (lambda: _Transformer(), _images(32)),
    "mlp": (
        lambda: torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(3072, 64), torch.nn.Linear(64, 100)
        ),
        _images(32),
    ),
    # As VGG-16, with classifier layers of 1024 units where it has 4096; as it is it has 138 million
    # parameters.
    "vgg16 narrow": (lambda: _narrow_vgg16(), _images(32)),
    "resnet50 small images": (lambda: torchvision.models.resnet50(num_classes=100), _images(32)),
    "densenet121": (lambda: torchvision.models.densenet121(num_classes=100), _images(32)),
    # As CANDLE's NT3, on a tenth of its 60,483 features: one tensor has nearly all of its weights.
    "nt3": (lambda: _nt3(6048), (1, 6048)),
}

WAYS: dict[str, dict[str, Any]] = {
    "planned": {},
    "planned, own core": {"cores": True},
    "negotiated": {"mode": "negotiated"},
    "negotiated GS": {"mode": "negotiated", "global_sleep_every": 1},
    "negotiated NBCS": {"mode": "negotiated", "nonblocking": True},
    "negotiated, own core": {"mode": "negotiated", "cores": True},
    "negotiated 1 ms": {
        "mode": "negotiated",
        "cycle": sync_horovod.CYCLE_MS / 1000,
        "threshold": sync_horovod.FUSION_BYTES,
    },
}
PEERS = ("DDP gloo", "DDP nostall")
ALONE = "no reduction"


class _Transformer(torch.nn.Module):  # type: ignore[misc]
    """Patches of 4 x 4 as words, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 128, 4, 4)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(128, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.body(self.patch(images).flatten(2).transpose(1, 2))
        out: torch.Tensor = self.head(words.mean(1))
        return out


def _narrow_vgg16() -> torch.nn.Module:
    model = torchvision.models.vgg16(num_classes=100, init_weights=False)
    model.classifier = torch.nn.Sequential(
        torch.nn.Linear(512 * 7 * 7, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 100),
    )
    out: torch.nn.Module = model
    return out


def _nt3(features: int) -> torch.nn.Module:
    left = ((features - 19) - 9) // 10
    return torch.nn.Sequential(
        torch.nn.Conv1d(1, 128, 20), torch.nn.ReLU(),
        torch.nn.Conv1d(128, 128, 10), torch.nn.ReLU(), torch.nn.MaxPool1d(10), torch.nn.Flatten(),
        torch.nn.Linear(128 * left, 200), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(200, 20), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(20, 100),
    )  # fmt: skip


def batches(
    settings: dict[str, Any], shape: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end: made once, or decoded by nostall.DataLoader while training goes on."""
    size = settings["batch"]
    if not settings["data"]:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        images = torch.randn(size, *shape, generator=generator)
        labels = torch.randint(0, 100, (size,), generator=generator)
        while True:
            yield images, labels
    import nostall
    from nostall import transforms

    steps = [transforms.RandomResizedCrop(shape[-1]), transforms.ToTensor()]
    with nostall.DataLoader(
        nostall.ImageFolder(settings["data"]), size, epochs=100_000, transforms=steps, tiers=[]
    ) as loader:
        for epoch in loader.epochs():
            yield from epoch


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains `warm` steps unmeasured, then `steps`."""
    import nostall.torch

    torch.set_num_threads(settings.get("threads", 1))
    torch.manual_seed(0)
    make, shape = NETWORKS[settings["network"]]
    model, way = make(), settings["way"]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step_model: Any = model
    foreign: list[int] = []
    if way in PEERS:
        torch.distributed.init_process_group(
            way.split()[1],
            init_method=f"file://{settings['store']}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        step_model = torch.nn.parallel.DistributedDataParallel(model)
    elif way == sync_horovod.WAY:
        optimizer, foreign = sync_horovod.start(model, optimizer)
    elif way != ALONE:
        options = dict(WAYS[way])
        if options.pop("cores", False):
            options["cores"] = (0,)
        if "timeline" in settings:
            options["timeline"] = settings["timeline"]
        optimizer = nostall.torch.DistributedOptimizer(
            optimizer, model.named_parameters(), SyncOptions(**options)
        )
    late = settings["delay"] if os.environ["RANK"] == "0" else 0.0
    source = batches(settings, shape)
    begin, use, engine = 0.0, resource.getrusage(resource.RUSAGE_SELF), {}
    threads, woke_late = _threads(foreign), _oversleeps(optimizer)
    for step in range(settings["warm"] + settings["steps"]):
        if step == settings["warm"]:
            begin, use = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            engine, threads, woke_late = (
                _stats(optimizer),
                _threads(foreign),
                _oversleeps(optimizer),
            )
        images, labels = next(source)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(step_model(images), labels)
        if step == 0 and way.startswith("planned"):
            optimizer.plan_from(loss)
        if late:
            time.sleep(late)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    after, engine_after = resource.getrusage(resource.RUSAGE_SELF), _stats(optimizer)
    out: dict[str, Any] = {
        "samples_per_second": settings["steps"] * settings["batch"] / seconds,
        "seconds": seconds,
        "cpu": after.ru_utime + after.ru_stime - use.ru_utime - use.ru_stime,
        "involuntary": after.ru_nivcsw - use.ru_nivcsw,
        "voluntary": after.ru_nvcsw - use.ru_nvcsw,
    }
    for key, value in engine_after.items():
        out[f"engine_{key}"] = value - engine[key]
    for component, counts in _since(threads, foreign).items():
        out |= {f"{component}_{kind}": value for kind, value in counts.items()}
    late_counts = zip(_oversleeps(optimizer), woke_late, strict=True)
    out["oversleeps"] = [after - before for after, before in late_counts]
    sync = getattr(optimizer, "gradient_sync", None)
    if sync is not None and sync.analysis is not None:
        nodes, edges, took = sync.analysis
        out |= {"nodes": nodes, "edges": edges, "analysis": took}
    out |= _weights(model)
    source.close()  # type: ignore[attr-defined]
    if way in PEERS:
        torch.distributed.destroy_process_group()
    elif way == sync_horovod.WAY:
        sync_horovod.stop()
    return out


def _stats(optimizer: Any) -> dict[str, int]:
    sync = getattr(optimizer, "gradient_sync", None)
    return dict(sync.engine.stats()) if sync is not None else {}


def _oversleeps(optimizer: Any) -> list[int]:
    sync = getattr(optimizer, "gradient_sync", None)
    return [int(n) for n in sync.engine.oversleeps()] if sync is not None else []


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    """What ranks and ways must agree on: the parameters' bits, and their mean magnitude."""
    digest, total, count = hashlib.sha256(), 0.0, 0
    for parameter in model.parameters():
        values = parameter.detach()
        digest.update(values.numpy().tobytes())
        total, count = total + float(values.abs().double().sum()), count + values.numel()
    return {"weights": digest.hexdigest(), "weights_size": total / count}


def _threads(foreign: Collection[int]) -> dict[int, tuple[str, dict[str, int]]]:
    """The component, the context switches and the processor time so far of each thread, by its number.

    Components are told apart by the names of threads: ours begin with nostall-; Gloo's are an engine
    too, as are the `foreign` ones, which have no names. All else is the training.
    """
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, status = (task / "comm").read_text(), (task / "status").read_text()
            # The clock of another thread's processor time, as pthread_getcpuclockid makes it.
            nanoseconds = time.clock_gettime_ns((~int(task.name) << 3) | 6)
        except OSError:
            continue  # ended meanwhile
        component = "input" if name.startswith("nostall-") else "training"
        if name.startswith("nostall-sync") or "gloo" in name or int(task.name) in foreign:
            component = "engine"
        voluntary, involuntary = (
            int(status.split(f"\n{key}:")[1].split()[0])
            for key in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        )
        counts = {"voluntary": voluntary, "involuntary": involuntary, "cpu_ns": nanoseconds}
        threads[int(task.name)] = (component, counts)
    return threads


def _since(
    before: dict[int, tuple[str, dict[str, int]]], foreign: Collection[int]
) -> dict[str, dict[str, int]]:
    """What the threads of now have used since `before`, by component.

    A thread of an earlier run may end between the two, so the difference is taken of each thread: of
    sums it could be negative. The first of the `foreign` threads counts by itself as well, as
    "background".
    """
    kinds = ("voluntary", "involuntary", "cpu_ns")
    components = ("training", "engine", "input", "background")
    totals = {name: dict.fromkeys(kinds, 0) for name in components}
    for thread, (component, counts) in _threads(foreign).items():
        earlier = before[thread][1] if thread in before else dict.fromkeys(kinds, 0)
        first = [*foreign][:1] == [thread]
        for own in (component, "background") if first else (component,):
            for kind in kinds:
                totals[own][kind] += counts[kind] - earlier[kind]
    return totals


if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text()):
        print("RESULT " + json.dumps(main(run)), flush=True)
        gc.collect()  # the next run starts without this one's threads and memory
