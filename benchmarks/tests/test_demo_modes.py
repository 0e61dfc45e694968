"""The demo's own training, network and loader, in every way of coordinating: the same weights."""

from __future__ import annotations

import argparse
import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sync_ranks import run_ranks

from nostall_bench.demo.dataset import DatasetSpec, make_dataset
from nostall_bench.demo.experiment import draw, summary
from nostall_bench.harness import figure

TRAIN = """
import argparse, hashlib, torch, torch.distributed as dist
import nostall.torch as nt
from nostall_bench.demo.train import NostallEpochs, make_model
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
arguments = argparse.Namespace(data={data!r}, batch_size=4, epochs=2, seed=7, size=48, tiers=[])

def train(options):
    model = make_model(5, arguments.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    forward = model
    if options is None:
        forward = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    else:
        optimizer = nt.DistributedOptimizer(
            optimizer, model.named_parameters(), nt.SyncOptions(**options))
    run = NostallEpochs(arguments)
    steps = 0
    for epoch in run:
        for images, labels in epoch:
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
            loss.backward()
            optimizer.step()
            steps += 1
    run.loader.close()
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return [digest, steps, float(loss)]

core = sorted(os.sched_getaffinity(0))[0]
agree = {{"mode": "negotiated", "cycle": 0.001}}
ways = {{
    "planned": {{}},
    "planned, small groups": {{"threshold": 4096}},
    "planned, gradients apart": {{"views": False}},
    "planned, own core": {{"cores": (core,)}},
    "negotiated": agree,
    "negotiated, own core": {{**agree, "cores": (core,)}},
    "global sleep": {{**agree, "global_sleep_every": 1}},
    "global sleep, own core": {{**agree, "global_sleep_every": 2, "cores": (core,)}},
    "nonblocking": {{**agree, "nonblocking": True}},
    "nonblocking, global sleep": {{**agree, "nonblocking": True, "global_sleep_every": 3}},
    "nonblocking, own core": {{**agree, "nonblocking": True, "cores": (core,)}},
    "DDP over Gloo": None,
}}
result = {{name: train(options) for name, options in ways.items()}}
result["start"] = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in make_model(5, 7).parameters())).hexdigest()
dist.destroy_process_group()
"""


def test_the_plot_has_whole_epochs_and_its_legend_beside_the_bars(tmp_path: Path) -> None:
    def epochs(seconds: float) -> dict[str, object]:
        rows = [
            {"epoch": e, "seconds": seconds, "stall_seconds": 3.0, "loss": 1.0} for e in range(2)
        ]
        return {"epochs": rows}

    with figure(tmp_path / "demo.png", 1, 2, (9, 3.4)) as (drawn, ((left, right),)):
        draw({"torch": epochs(9.0), "nostall": epochs(4.0)}, left, right)
        drawn.canvas.draw()
        for axes in (left, right):
            assert list(axes.get_xticks()) == [0, 1]
            legend = axes.get_legend().get_window_extent()
            assert legend.y0 >= axes.bbox.y1 and drawn.bbox.x1 >= legend.x1
            assert not axes.spines["top"].get_visible()
        assert max(p.get_y() + p.get_height() for p in left.patches) == 9.0


@pytest.mark.parametrize(
    ("kept", "words"),
    [(False, "no page cache, as of data larger than"), (True, "the kernel keeps what was read")],
)
def test_the_table_says_what_memory_torch_had(kept: bool, words: str) -> None:
    epoch = {"seconds": 1.0, "stall_seconds": 0.5, "samples": 8, "loss": 1.0, "accuracy": 0.5}
    run = {"seconds": 1.0, "storage_bytes": 1, "lower_bound_bytes": 1, "epochs": [epoch]}
    settings = {"tiers": ["ram:9MiB"], "keep_cache": kept}
    caption = summary({"torch": run, "nostall": run, "settings": settings}).caption
    assert words in str(caption) and "nostall's tiers: ram:9MiB" in str(caption)


def test_what_a_training_imports_takes_no_part_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock runs when a training makes its loader."""
    from nostall_bench.demo import train  # with torchvision: some seconds, for this test alone

    data = make_dataset(tmp_path / "data", DatasetSpec(4, classes=2, scale=0.25), processes=1)
    settings = {"data": str(data), "batch_size": 2, "epochs": 1, "seed": 7, "size": 48}
    arguments = argparse.Namespace(**settings, workers=0, tiers=[])
    imported: list[str] = []
    import_any = builtins.__import__

    def watched(name: str, scope: Mapping[str, object] | None = None, *more: Any) -> object:
        if scope is not None and scope.get("__name__") == train.__name__:
            imported.append(name)
        return import_any(name, scope, *more)

    for name, value in {"get_world_size": 1, "get_rank": 0}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    monkeypatch.setattr(builtins, "__import__", watched)
    ours = train.NostallEpochs(arguments)
    ours.loader.close()
    next(train.torch_epochs(arguments))
    assert imported == []


@pytest.mark.multi
def test_the_demo_ends_with_the_same_weights_in_every_mode(tmp_path: Path) -> None:
    """Two ranks, float32: a + b has the same bits in any order, so DDP's must be ours."""
    data = make_dataset(tmp_path / "data", DatasetSpec(24, classes=5, scale=0.25), processes=1)
    results = run_ranks(2, TRAIN.format(data=str(data), store=tmp_path / "store"))
    start = [r.pop("start") for r in results]
    expected = results[0]["DDP over Gloo"][0]
    assert start == [start[0]] * 2
    assert expected != start[0]
    for result in results:
        assert len(result) == 12
        assert {name: digest for name, (digest, _, _) in result.items()} == dict.fromkeys(
            result, expected
        )
        # The ranks had data of their own: the losses differ though the weights do not.
        assert {steps for _, steps, _ in result.values()} == {6}
    assert results[0]["planned"][2] != results[1]["planned"][2]
