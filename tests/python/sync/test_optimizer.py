"""DistributedOptimizer against one process that sees all ranks' data."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync_ranks import run_ranks

MODEL = """
import torch, nostall.torch as nt
torch.manual_seed(0)
torch.set_num_threads(1)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(16, 32)
        self.left = torch.nn.Linear(32, 8)
        self.right = torch.nn.Linear(32, 8)
        self.b = torch.nn.Linear(8, 4)
    def forward(self, x, way="both"):
        h = torch.relu(self.a(x))
        out = 0
        if way in ("both", "left"):
            out = out + self.left(h)
        if way in ("both", "right"):
            out = out + self.right(h)
        return self.b(torch.relu(out))
def data(step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 16, generator=g, device="cpu")
    y = torch.randint(0, 4, (6,), generator=g, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())
loss_of = torch.nn.functional.cross_entropy
def weights(model):
    return [p.detach().double().sum().item() for p in model.parameters()]
"""

TRAIN = """
import hashlib
def digest(model):
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
def train(make):
    torch.manual_seed(0)
    model, optimizer = make(Net())
    for step in range(8):
        x, y = data(step, rank)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return digest(model)
def distributed(**options):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options.setdefault("fixed_order", True)
        return model, nt.DistributedOptimizer(
            optimizer, model.named_parameters(), nt.SyncOptions(**options))
    return train(make)
# The same sums in the same order: each gradient times 1/n, added up by rank.
def reference(n):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        parts = []
        for r in range(n):
            model.zero_grad()
            x, y = data(step, r)
            loss_of(model(x), y).backward()
            parts.append([p.grad.clone() * torch.tensor(1.0 / n) for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            total = parts[0][i].clone()
            for r in range(1, n):
                total += parts[r][i]
            p.grad = total
        optimizer.step()
    return digest(model)
"""

MODES = """
quick = {"mode": "negotiated", "cycle": 0.001}
got = {
    "planned": distributed(threshold=2000),
    "negotiated": distributed(**quick),
    "global sleep": distributed(**quick, global_sleep_every=1),
    "nonblocking": distributed(**quick, nonblocking=True),
}
"""

DDP = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{path}", rank=rank, world_size=2)
def ddp(model):
    model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# Two ranks: a + b has the same bits in any order.
got["ddp"] = train(ddp)
dist.destroy_process_group()
"""


@pytest.mark.multi
def test_every_mode_ends_with_the_bits_of_one_process_and_of_ddp(tmp_path: Path) -> None:
    code = (
        MODEL + TRAIN + MODES + DDP.format(path=tmp_path / "store") + "result=[reference(2), got]"
    )
    for expected, got in run_ranks(2, code):
        assert len(got) == 5
        assert got == dict.fromkeys(got, expected)


HOOK = """
import torch.distributed as dist
from nostall.errors import UsageError
dist.init_process_group("gloo", init_method="file://{path}", rank=rank, world_size={ranks})
def hooked(**options):
    def make(model):
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        model.register_comm_hook(nt.BucketReducer(**options), nt.reduce_bucket)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make
"""


@pytest.mark.multi
def test_the_hook_of_ddp_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    code = (
        MODEL
        + TRAIN
        + HOOK.format(path=tmp_path / "store", ranks=3)
        + """
exact = train(hooked(order="fixed"))
near = []
def watched(model):
    near.append(model)
    return hooked(compression="bf16")(model)
train(watched)
values = weights(near[0])
torch.manual_seed(0)
start = weights(Net())
try:
    nt.BucketReducer(compression="int4")
except UsageError as error:
    refused = str(error)
dist.destroy_process_group()
result = [reference(3), exact, values, start, refused]
"""
    )
    exact_results = run_ranks(3, code)
    for expected, got, near, start, refused in exact_results:
        assert got == expected
        # All ranks hold the same; what bf16 rounds is far less than what training changed.
        assert near == exact_results[0][2]
        assert near != start
        assert refused == 'compression must be "fp16", "bf16" or None, not \'int4\''


@pytest.mark.multi
def test_hooks_of_two_groups_do_not_mix(tmp_path: Path) -> None:
    code = (
        "import torch, nostall.torch as nt\n"
        + HOOK.format(path=tmp_path / "store", ranks=4)
        + """
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
class Bucket:
    def __init__(self):
        self.gradients = torch.full((1000,), float(rank))
    def buffer(self):
        return self.gradients
reducer = nt.BucketReducer(halves[rank // 2])
result = set()
for _ in range(20):
    bucket = Bucket()
    result |= set(nt.reduce_bucket(reducer, bucket).wait().tolist())
result = sorted(result)
dist.barrier()  # one half may end before the other has connected to it
dist.destroy_process_group()
"""
    )
    assert run_ranks(4, code) == [[0.5], [0.5], [2.5], [2.5]]


@pytest.mark.multi
def test_three_ranks_divide_as_one_process_does() -> None:
    code = "result = [reference(3), distributed(threshold=2000)]"
    for expected, got in run_ranks(3, MODEL + TRAIN + code):
        assert got == expected


DYNAMIC = """
import random
import numpy as np
STEPS = int(os.environ.get("NOSTALL_DYNAMIC_STEPS", "300"))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), nt.SyncOptions(threshold=600))
named = list(model.named_parameters())
own = {}  # before the reduction, which begins during the backward pass
for name, p in named:
    p.register_hook(lambda g, name=name: own.__setitem__(name, g.clone()))
bad = 0
for step in range(STEPS):
    ways = [random.Random(step * 10 + r).choice(["both", "left", "right"]) for r in range(3)]
    if step > 0.8 * STEPS:
        ways = ["left"] * 3  # steady again: the plan follows
    optimizer.zero_grad(set_to_none=True)
    x, y = data(step % 5, rank)
    loss_of(model(x, ways[rank]), y).backward()
    mine = [own.pop(name, torch.zeros_like(p)).reshape(-1) for name, p in named]
    mine = torch.cat(mine).numpy().tobytes()
    optimizer.step()
    # What every rank had before the reduction, by another way than the gradients take.
    all_ranks = [np.frombuffer(b, np.float32) for b in optimizer.gradient_sync.engine.all_gather(mine)]
    mean = torch.from_numpy(np.mean(all_ranks, axis=0)).to(torch.get_default_device())
    at = 0
    for name, p in named:
        used = not name.startswith(("left", "right")) or any(
            w in ("both", name.split(".")[0]) for w in ways)
        expected = mean[at : at + p.numel()].view(p.shape)
        at += p.numel()
        if (p.grad is not None) != used or used and not torch.allclose(p.grad, expected, atol=1e-6):
            bad += 1
result = [bad, optimizer.gradient_sync.replans, optimizer.gradient_sync.plan[-1]]
"""


@pytest.mark.multi
def test_graphs_that_change_on_each_rank_alone() -> None:
    # NOSTALL_DYNAMIC_STEPS=10000 is the long form.
    results = run_ranks(3, MODEL + DYNAMIC)
    assert [r[0] for r in results] == [0, 0, 0]
    assert results[0][1] >= 1
    assert results[0] == results[1] == results[2]


DETAILS = """
result = {}

# The graph gives the order before the first pass.
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), nt.SyncOptions(threshold=1))
seen = []
for n, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(lambda p, n=n: seen.append(n))
x, y = data(0, rank)
loss = loss_of(model(x), y)
optimizer.plan_from(loss)
names = [n for n, _ in model.named_parameters()]
planned = [names[g[0]] for g in optimizer.gradient_sync.plan if g[0] < len(names)]
loss.backward()
optimizer.step()
result["order"] = [planned, seen, optimizer.gradient_sync.analysis[0] > 10]

# Accumulation by passes and by no_sync, and clipping in between.
def accumulate(passes, by_context):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(),
        nt.SyncOptions(fixed_order=True), backward_passes_per_step=passes)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if by_context else contextlib.nullcontext():
            x, y = data(10 * step, rank)
            loss_of(model(x), y).backward()
        x, y = data(10 * step + 1, rank)
        loss_of(model(x), y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights(model)
result["accumulated"] = [accumulate(2, False), accumulate(1, True)]

# Sparse gradients.
table = torch.nn.Embedding(50, 4, sparse=True)
optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
optimizer = nt.DistributedOptimizer(optimizer, table.named_parameters())
before = table.weight.detach().clone()
table(torch.tensor([rank, 7])).sum().backward()
optimizer.step()
moved = (before - table.weight.detach())[:, 0]
result["sparse"] = [round(moved[i].item(), 4) for i in (0, 1, 7, 9)]
table = torch.nn.Embedding(50, 4, sparse=True)
optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
from nostall.errors import UsageError
options = nt.SyncOptions(check_finite=True)
optimizer = nt.DistributedOptimizer(optimizer, table.named_parameters(), options)
for scale in (float("nan") if rank == 0 else 1.0, 1.0):
    optimizer.zero_grad()
    (scale * table(torch.tensor([rank, 7]))).sum().backward()
    try:
        optimizer.step()
    except UsageError as error:
        result["not finite"] = str(error)
result["finite"] = bool(torch.isfinite(table.weight).all())

# Updates by group, and 16 bits on the wire.
def adam(options, **more):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), options, **more)
    for step in range(4):
        x, y = data(step, rank)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return weights(model)
plain = adam(nt.SyncOptions(fixed_order=True, threshold=800))
by_group = adam(nt.SyncOptions(fixed_order=True, threshold=800), overlap_update=True)
narrow = adam(nt.SyncOptions(compression="bf16"))
result["by group"] = plain == by_group
result["narrow"] = max(abs(a - b) for a, b in zip(plain, narrow))

# Ranks with more data than others.
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(3 + 4 * rank):
    x, y = data(step, rank)
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
result["joined"] = optimizer.join()

# Rank 0 is where all start.
torch.manual_seed(rank + 1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
result["start"] = weights(model)
torch.set_default_dtype(torch.float16)
half = nt.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
torch.set_default_dtype(torch.float32)
# What the engine reads as float32 beside the gradients.
result["bytes"] = half.gradient_sync._signs.nbytes // len(half.gradient_sync._signs)

# Another step without another backward is another step.
plain = Net()
plain.load_state_dict(model.state_dict())
ordinary = torch.optim.SGD(plain.parameters(), lr=0.1)
for net, opt in ((model, optimizer), (plain, ordinary)):
    loss_of(net(data(0, 0)[0]), data(0, 0)[1]).backward()
    opt.step()
    opt.step()
    opt.zero_grad()
result["steps"] = max(
    (a - b).abs().max().item()
    for a, b in zip(model.state_dict().values(), plain.state_dict().values())
)
result["wrong"] = []
for wrong in (lambda: nt.DistributedOptimizer(ordinary, plain.parameters()),
              lambda: nt.DistributedOptimizer(plain),
              lambda: copy.deepcopy(optimizer),
              lambda: torch.save(optimizer, io.BytesIO())):
    try:
        wrong()
    except Exception as error:
        result["wrong"].append(f"{type(error).__name__}: {error}")

# A second backward pass that was not announced.
x, y = data(0, rank)
loss_of(model(x), y).backward()
try:
    loss_of(model(x), y).backward()
except Exception as error:
    result["misuse"] = str(error)
"""


@pytest.mark.multi
def test_what_an_optimizer_offers() -> None:
    first, second = run_ranks(2, "import contextlib, copy, io\n" + MODEL + DETAILS)
    for result in (first, second):
        planned, seen, analysed = result["order"]
        assert planned == seen
        assert analysed
        assert result["sparse"] == [0.5, 0.5, 1.0, 0.0]
        assert result["finite"]
        assert result["by group"]
        assert result["narrow"] < 0.1
        assert result["joined"] == 1
        assert result["bytes"] == 4
        assert "backward_passes_per_step" in result["misuse"]
        assert result["steps"] < 1e-6
        assert (
            "UsageError" in result["wrong"][0] and "model.named_parameters()" in result["wrong"][0]
        )
        assert "UsageError" in result["wrong"][1] and "not a Net" in result["wrong"][1]
        for told in result["wrong"][2:]:
            assert told.startswith("UsageError: ") and "take its state_dict()" in told
    assert first["not finite"] == "gradient weight of rank 0 is not finite"
    assert second["not finite"].startswith("a gradient of another rank is not finite")
    (by_passes, by_context), other = first["accumulated"], second["accumulated"]
    assert by_passes == by_context == other[0] == other[1]
    assert first["start"] == second["start"]


PAUSED = """
import contextlib
from nostall.errors import UsageError
def train(ways, paused, ranks, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = nt.DistributedOptimizer(
            optimizer, model.named_parameters(), nt.SyncOptions(**options))
    for step in range(6):
        optimizer.zero_grad()
        for number, way in enumerate(ways):
            alone = options and paused[number]
            with optimizer.no_sync() if alone else contextlib.nullcontext():
                for r in ranks:
                    x, y = data(10 * step + number, r)
                    (loss_of(model(x, way), y) / len(ranks)).backward()
        optimizer.step()
    return weights(model)
result = {}
for name, options in (
    ("views", {"views": True}), ("memory of its own", {"views": False}),
    ("negotiated", {"mode": "negotiated", "cycle": 0.001}),
):
    for case, ways, paused in (
        ("of two heads one in the last pass", ["left", "right"], [True, False]),
        ("no pass is reduced", ["left", "both"], [True, True]),
        ("on one rank", ["both"], [rank == 1]),
    ):
        result[f"{name}: {case}"] = [
            train(ways, paused, [rank], **options), train(ways, paused, [0, 1])]
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
x, y = data(0, rank)
loss_of(model(x), y).backward()
try:
    with optimizer.no_sync():
        loss_of(model(x), y).backward()
except UsageError as error:
    result["after"] = str(error)
optimizer.step()
with optimizer.no_sync():
    loss_of(model(x), y).backward()
optimizer.join()
result["gone"] = [p.grad is None for p in model.parameters()]
"""


@pytest.mark.multi
def test_passes_that_only_accumulate_count_as_in_one_process() -> None:
    first, second = run_ranks(2, MODEL + PAUSED)
    for result in (first, second):
        assert "use no_sync() for all passes but the last" in result.pop("after")
        assert all(result.pop("gone"))
    assert len(first) == 9
    for case, (got, expected) in first.items():
        assert got == second[case][0], case
        assert got == pytest.approx(expected, rel=1e-4), case


UNFROZEN = """
from nostall.errors import UsageError
def train(distributed, ranks, **more):
    torch.manual_seed(0)
    model = Net()
    model.a.requires_grad_(False)
    made = (lambda o: nt.DistributedOptimizer(o, model.named_parameters(), **more)) \
        if distributed else lambda o: o
    first = [p for name, p in model.named_parameters() if not name.startswith("b.")]
    optimizer = made(torch.optim.SGD(first, lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    refused = []
    def step(number):
        optimizer.zero_grad()
        for r in ranks:
            x, y = data(number, r)
            (loss_of(model(x), y) / len(ranks)).backward()
        optimizer.step()
        scheduler.step()
    model.b.requires_grad_(False)
    step(0)
    for number, change in enumerate((
        lambda: model.a.requires_grad_(True),
        lambda: optimizer.add_param_group({"params": model.b.requires_grad_(True).parameters()}),
    ), 1):
        change()
        if distributed:
            try:
                step(number)
            except UsageError as error:
                refused.append(str(error))
            assert made(optimizer) is optimizer
        for turn in range(3):
            step(10 * number + turn)
    assert isinstance(optimizer, torch.optim.SGD)
    return weights(model), refused
result = [train(True, [rank]), train(False, [0, 1]), train(True, [rank], overlap_update=True)]
"""


@pytest.mark.multi
def test_parameters_that_are_trained_later() -> None:
    for (got, refused), (expected, _), (by_group, again) in run_ranks(2, MODEL + UNFROZEN):
        assert got == pytest.approx(expected, rel=1e-4)
        assert by_group == pytest.approx(expected, rel=1e-4)
        assert refused == again
        assert [text.partition(" is not reduced")[0] for text in refused] == [
            "a gradient of shape [32, 16]",
            "a gradient of shape [4, 8]",
        ]


FROZEN = """
from nostall.errors import UsageError
model = Net()
x, y = data(0, rank)
loss_of(model(x), y).backward()
model.a.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
loss_of(model(x), y).backward()
refused = ""
try:
    optimizer.step()
except UsageError as error:
    refused = str(error)
for parameter in model.a.parameters():
    parameter.grad.zero_()
before = weights(model)
optimizer.step()
after = weights(model)
def zeros_of_one_rank(**options):
    torch.manual_seed(0)
    model = Net()
    start = weights(model)
    if rank == 0:
        loss_of(model(x), y).backward()
    model.a.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.zero_grad(set_to_none=False)
    optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for step in range(3):  # the first one makes the plan
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(x), y).backward()
        optimizer.step()
    return start, weights(model)
result = [
    refused, (before, after), zeros_of_one_rank(), zeros_of_one_rank(overlap_update=True),
]
"""


@pytest.mark.multi
def test_a_gradient_from_before_the_freezing_moves_no_rank_from_the_others() -> None:
    first, second = run_ranks(2, MODEL + FROZEN)
    assert first == second
    refused, *trained = first
    assert refused.endswith("is frozen, and has it from before: set the parameter's grad to None")
    for before, after in trained:
        assert before[:2] == after[:2] and before[2:] != after[2:]


JOINED = """
def job(batches, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = nt.DistributedOptimizer(
        optimizer, model.named_parameters(), nt.SyncOptions(fixed_order=True, **options))
    def state():
        tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        return [t.detach().double().sum().item() for t in tensors]
    def train(batches):
        for step in range(batches):
            x, y = data(step, rank)
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    train(batches[rank])
    before = state()
    last = optimizer.join()
    joined = state()
    train(2)
    return last, before, joined, state(), optimizer.join()
quick = {"mode": "negotiated", "cycle": 0.001}
result = [job([0, 5, 2]), job([3, 1, 3]), job([2, 2, 2]), job([1, 1, 4], views=False),
          job([1, 4, 0], **quick)]
"""


@pytest.mark.multi
def test_all_ranks_go_on_from_the_one_whose_data_ended_last() -> None:
    results = run_ranks(3, MODEL + JOINED)
    for number, last in enumerate((1, 0, 0, 2, 1)):
        jobs = [of_rank[number] for of_rank in results]
        counted = jobs[last][1]
        assert any(weight != 0 for weight in counted)
        for told, _, joined, after, again in jobs:
            assert (told, again) == (last, 0)
            assert joined == counted
            assert after == jobs[0][3] != joined


HALF = """
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(
    optimizer, model.named_parameters(), backward_passes_per_step=2
)
def train(passes):
    for number in range(passes):
        loss_of(model(data(number, rank)[0]), data(number, rank)[1]).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
train(3 + 2 * rank)
last = optimizer.join()
gone = [parameter.grad is None for parameter in model.parameters()]
assert all(gone), gone
train(2)
result = [last, weights(model)]
"""


@pytest.mark.multi
def test_passes_that_make_no_step_end_with_the_data() -> None:
    first, second = run_ranks(2, MODEL + HALF)
    assert first == second
    assert first[0] == 1


APART = """
result = None
if rank:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), process_set=[1, 2])
    for step in range(rank):
        optimizer.zero_grad()
        loss_of(model(data(step, rank)[0]), data(step, rank)[1]).backward()
        optimizer.step()
    result = [optimizer.join(), weights(model)]
    options = nt.SyncOptions(check_finite=True)
    optimizer = nt.DistributedOptimizer(optimizer, None, options, process_set=[1, 2])
    (model(data(0, rank)[0]).sum() * (float("inf") if rank == 2 else 1)).backward()
    try:
        optimizer.step()
    except nostall.errors.UsageError as error:
        result.append(str(error))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    if rank == 2:
        loss_of(model(data(0, rank)[0]), data(0, rank)[1]).backward()
        optimizer.step()
    try:
        nt.DistributedOptimizer(optimizer, process_set=[1, 2])
    except nostall.errors.PeerError as error:
        result.append(str(error))
"""


@pytest.mark.multi
def test_the_ranks_of_a_process_set_have_their_numbers_in_the_job() -> None:
    _, first, second = run_ranks(3, "import nostall\n" + MODEL + APART)
    assert first[:2] == second[:2]
    assert first[0] == 2
    assert second[2].startswith("gradient ") and second[2].endswith("of rank 2 is not finite")
    assert first[3].startswith(
        "the optimizer of rank 1 has a state of 0 tensors, and that of rank 2"
    )


EMPTY = """
class Padded(Net):
    def __init__(self):
        super().__init__()
        self.none = torch.nn.Parameter(torch.empty(0, 3))
torch.manual_seed(rank)
model = Padded()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(1 + rank):
    optimizer.zero_grad()
    x, y = data(step, rank)
    (loss_of(model(x), y) + model.none.sum()).backward()
    optimizer.step()
result = [optimizer.join(), weights(model)]
"""


@pytest.mark.multi
def test_a_model_may_have_a_parameter_without_elements() -> None:
    first, second = run_ranks(2, MODEL + EMPTY)
    assert first == second
    assert first[0] == 1


SPARSE = """
table = torch.nn.Embedding(10, 4, sparse=True, dtype=kind)
torch.nn.init.ones_(table.weight)
optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
optimizer = nt.DistributedOptimizer(optimizer, table.named_parameters())
before = table.weight.detach().clone()
for step in range(1 + 2 * rank):
    optimizer.zero_grad()
    table(torch.tensor([rank, 7])).sum().backward()
    optimizer.step()
optimizer.join()
result = [round(x, 4) for x in (before - table.weight.detach())[[0, 1, 7, 9], 0].tolist()]
"""


@pytest.mark.multi
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_rank_without_data_gives_no_rows(kind: str) -> None:
    assert run_ranks(2, f"{MODEL}kind = torch.{kind}\n{SPARSE}") == [[0.5, 1.5, 2.0, 0.0]] * 2


ROWS = """
class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 8, sparse=True)
        self.net = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.net(self.table(x).mean(1))
def train(**more):
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = nt.DistributedOptimizer(
        optimizer, model.named_parameters(), nt.SyncOptions(fixed_order=True, threshold=100), **more)
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or rank:  # rows of one rank alone, too
            x = torch.arange(6).view(2, 3) * (rank + 1) + step
            model(x).square().sum().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]
result = [train(), train(overlap_update=True)]
"""


@pytest.mark.multi
def test_updates_by_group_have_the_rows_of_all_ranks() -> None:
    first, second = run_ranks(2, MODEL + ROWS)
    assert first == second
    plain, by_group = first
    assert by_group == plain


START = """
from nostall.errors import PeerError
def made(seed, lately=False):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if lately:
        loss_of(model(data(0, rank)[0]), data(0, rank)[1]).backward()
        optimizer.step()
    options = nt.SyncOptions(mode="negotiated", cycle=0.001)
    nt.DistributedOptimizer(optimizer, model.named_parameters(), options)
    return weights(model)
result = [made(0), made(rank), made(rank, lately=True)]
try:
    made(0, lately=rank == 0)
except PeerError as error:
    result.append(str(error))
"""


@pytest.mark.multi
def test_ranks_that_negotiate_start_alike() -> None:
    first, second = run_ranks(2, MODEL + START)
    for start in first[:3], second[:3]:
        assert start == [first[0], first[0], first[2]]
    assert first[2] != first[0]
    assert "has a state of 8 tensors, and that of rank 1 one of 0" in first[3]
    assert "has a state of 0 tensors, and that of rank 0 one of 8" in second[3]


SCHEDULED = """
import warnings
from nostall.errors import UsageError
warnings.filterwarnings("error", message=".*optimizer.step")
def train(first):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def schedule():
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scheduler = schedule() if first else None
    nt.DistributedOptimizer(optimizer, model.named_parameters(), nt.SyncOptions(fixed_order=True))
    scheduler = scheduler or schedule()
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(3):
        x, y = data(step, rank)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        other.step()
    return weights(model), optimizer.param_groups[0]["lr"]
def refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def counted(step=optimizer.step):
        return step()
    optimizer.step = counted
    try:
        nt.DistributedOptimizer(optimizer, model.named_parameters())
    except UsageError as error:
        return str(error)
result = [train(first=False), train(first=True), refused()]
"""


@pytest.mark.multi
def test_schedulers_may_be_made_before_and_after() -> None:
    first, second = run_ranks(2, MODEL + SCHEDULED)
    assert first == second
    after, before, refused = first
    assert before == after
    assert "counted has taken the place of this optimizer's step" in refused


SCALED = """
def train(scaled, clip, **more):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **more)
    optimizer = nt.DistributedOptimizer(
        optimizer, model.named_parameters(), nt.SyncOptions(fixed_order=True, threshold=600))
    # Powers of two: scaling rounds nothing.
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024, enabled=scaled)
    for step in range(5):
        if step == 2 and not scaled:
            continue
        x, y = data(step, rank)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale() if scaled else 512.0
result = {}
for name, clip, more in ("plain", False, {}), ("clipped", True, {}), ("fused", False, {"fused": True}):
    result[name] = train(False, clip, **more), train(True, clip, **more)

from nostall.errors import UsageError
model = Net()
optimizer = nt.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
scaler = torch.amp.GradScaler(torch.get_default_device().type)
scaler.scale(loss_of(model(data(0, rank)[0]), data(0, rank)[1])).backward()
try:
    scaler.step(optimizer)
except UsageError as error:
    result["refused"] = str(error)
"""


@pytest.mark.multi
def test_a_scaler_leaves_out_the_same_steps_on_all_ranks() -> None:
    first, second = run_ranks(2, MODEL + SCALED)
    assert first == second
    refused = first.pop("refused")
    assert "call optimizer.synchronize() after the backward pass" in refused
    for name, (unscaled, scaled) in first.items():
        assert scaled == unscaled, name


HOOKED = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
result = []
def seen(*_):
    result.append([p.grad.sum().item() for p in model.parameters()])
optimizer.register_step_pre_hook(seen)
for step in range(2):
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model(data(step, rank)[0]), data(step, rank)[1]).backward()
    optimizer.step()
"""


@pytest.mark.multi
def test_hooks_of_a_step_see_reduced_gradients_once() -> None:
    first, second = run_ranks(2, MODEL + HOOKED)
    assert first == second
    assert len(first) == 2


@pytest.mark.multi
def test_a_rank_that_dies_ends_the_others() -> None:
    code = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), nt.SyncOptions(timeout=60))
for step in range(100):
    x, y = data(step, rank)
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    if step == 5 and rank == 1:
        os.kill(os.getpid(), 9)
    optimizer.step()
"""
    first, second = run_ranks(2, MODEL + code, check=False)
    assert "PeerError" in first and "rank 1" in first
    assert second == ""


OWN = """
def make(module, threshold=8 << 20, momentum=0.0, **more):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=momentum)
    options = nt.SyncOptions(threshold=threshold)
    return nt.DistributedOptimizer(optimizer, module.named_parameters(), options, **more)
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2))
        self.b = torch.nn.Parameter(torch.ones(2))
result = {}

# The program's own gradient.
two = Two()
optimizer = make(two)
for p in two.parameters():
    p.grad, = torch.autograd.grad((p * (rank + 1)).sum(), [p])
optimizer.step()
result["own"] = two.a.tolist()

# Zeros, of a parameter that no rank uses any more.
def unused(distributed, **more):
    two = Two()
    optimizer = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    if distributed:
        optimizer = nt.DistributedOptimizer(optimizer, two.named_parameters(), **more)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        (two.a.sum() + (two.b.sum() if step == 0 else 0)).backward()
        optimizer.step()
    return two.b.tolist()
result["unused"] = [unused(False), unused(True), unused(True, overlap_update=True)]

# Passes that are each reduced and add up; b is in the second on rank 0 alone, in the third nowhere.
two = Two()
optimizer = make(two)
kept = []
for ways in ("ab", "ab" if rank == 0 else "a", "a"):
    sum(getattr(two, way).sum() for way in ways).backward()
    optimizer.synchronize()
    kept.append(two.b.grad.tolist())
result["passes"] = kept

# A step without backward, by group too.
def again(**more):
    two = Two()
    optimizer = make(two, threshold=1, **more)
    for step in range(2):
        optimizer.zero_grad()
        ((rank + 1) * (two.a + two.b)).sum().backward()
        optimizer.step()
    optimizer.step()
    return two.a.tolist()
result["again"] = [again(), again(overlap_update=True)]

# A hook that was registered later.
def clamp(p):
    p.grad.clamp_(-1, 1)
two = Two()
optimizer = make(two, threshold=1)
for step in range(2):
    optimizer.zero_grad()
    if step == 1:
        two.a.register_post_accumulate_grad_hook(clamp)
    ((10 if rank == 0 else 0.5) * (two.a + two.b)).sum().backward()
    optimizer.synchronize()
result["hook"] = [two.a.grad.tolist(), two.b.grad.tolist()]
"""


@pytest.mark.multi
def test_gradients_count_that_the_optimizer_would_use() -> None:
    for result in run_ranks(2, MODEL + OWN):
        assert result["own"] == [-0.5] * 2
        alone, *together = result["unused"]
        for b in together:
            assert b == pytest.approx(alone)
        assert result["passes"] == [[1.0] * 2, [1.5] * 2, [1.5] * 2]
        assert result["again"] == [[1 - 3 * 1.5] * 2] * 2
        assert result["hook"] == [[0.75] * 2, [5.25] * 2]


OTHER_KIND = """
from nostall.errors import UsageError
def told(step):
    try:
        step()
    except UsageError as error:
        return str(error)
def changed(change, **options):
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = nt.DistributedOptimizer(
        optimizer, net.named_parameters(), nt.SyncOptions(**options))
    change(net)
    def step():
        kind = net.weight.dtype
        net(torch.ones(3, 4, dtype=kind)).sum().backward()
        optimizer.step()
    return told(step)
result = [
    changed(change, **options)
    for options in ({}, {"views": False}, {"compression": "bf16"}, {"mode": "negotiated"})
    for change in (torch.nn.Module.double, torch.nn.Module.bfloat16)
]
"""


@pytest.mark.multi
def test_a_gradient_of_another_type_than_at_the_start_is_refused() -> None:
    told, _ = run_ranks(2, MODEL + OTHER_KIND)
    assert len(told) == 8
    for words, kind in zip(told, ["float64", "bfloat16"] * 4, strict=True):
        assert f"x torch.{kind} on " in words and " x torch.float32 on " in words
        assert words.endswith("make it again, with the same arguments")


MIXED = """
from nostall.errors import UsageError
table = torch.nn.Embedding(10, 4, sparse=True)
optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
optimizer = nt.DistributedOptimizer(optimizer, table.named_parameters())
before = table.weight.detach().clone()
if rank == 0:
    table(torch.tensor([1])).sum().backward()
else:
    (table(torch.tensor([1])) @ table.weight.T).sum().backward()
try:
    optimizer.step()
except UsageError as error:
    result = [str(error), bool((table.weight == before).all())]
"""


@pytest.mark.multi
def test_rows_on_one_rank_and_a_dense_gradient_on_another_are_refused() -> None:
    told = (
        "the gradient of weight is sparse on some ranks and dense on others: give its module "
        "sparse=False"
    )
    assert run_ranks(2, MODEL + MIXED) == [[told, True]] * 2


CHANGED = """
import torch
import nostall.torch
from nostall.errors import UsageError
from nostall.sync import SyncOptions
result = []
def clip(p): torch.nn.utils.clip_grad_norm_([p], 0.01)
def zero(p): p.grad.zero_()
def scale(p): torch._foreach_mul_([p.grad], 0.5)
def drop(p): p.grad = None
def replace(p): p.grad = torch.zeros(8)
for views in True, False:
    for change in clip, zero, scale, drop, replace:
        p = torch.nn.Parameter(torch.zeros(8))
        optimizer = nostall.torch.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], SyncOptions(views=views, timeout=60))
        for _ in range(2):  # of which the second one has a plan
            p.grad = None
            (p * (rank + 1.0)).sum().backward()
            optimizer.step()
        before = p.detach().clone()
        p.grad = None
        (p * (rank + 1.0)).sum().backward()
        change(p)
        try:
            optimizer.step()
            result.append("taken")
        except UsageError as error:
            result.append("synchronize() first" in str(error))
        result.append(bool((p.detach() == before).all()))
        p.grad = None  # and the next step is as any
        (p * (rank + 1.0)).sum().backward()
        optimizer.step()
        result.append(p.tolist() == (before - 1.5).tolist())
        optimizer.gradient_sync.close()
p = torch.nn.Parameter(torch.zeros(8))
optimizer = nostall.torch.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
(p * (rank + 1.0)).sum().backward()
optimizer.synchronize()
clip(p)
with optimizer.skip_synchronize():
    optimizer.step()
result.append(round(float(p.detach().norm()), 4))
"""


@pytest.mark.multi
def test_gradients_that_are_changed_while_they_are_reduced_are_refused() -> None:
    for told in run_ranks(2, CHANGED):
        assert told == [True] * 30 + [0.01]


CHANGED_ON_ONE = """
import torch
import nostall.torch
from nostall.errors import PeerError, UsageError
from nostall.sync import SyncOptions
p = torch.nn.Parameter(torch.zeros(8))
result = []
for overlap in False, True:
    optimizer = nostall.torch.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), [("p", p)], SyncOptions(timeout=60), overlap_update=overlap)
    for step in range(3):
        p.grad = None
        (p * 1.0).sum().backward()
        if rank == 1 and step == 2:
            p.grad.zero_()
        try:
            optimizer.step()
        except (PeerError, UsageError) as error:
            result.append(type(error).__name__)
with torch.inference_mode():
    q = torch.nn.Parameter(torch.zeros(3))
    optimizer = nostall.torch.DistributedOptimizer(torch.optim.SGD([q], lr=1.0), [("q", q)])
    q.grad = torch.ones(3)
    optimizer.step()
    result.append(q.tolist())
"""


@pytest.mark.multi
def test_a_gradient_that_one_rank_changes_is_refused_on_all() -> None:
    first, second = run_ranks(2, CHANGED_ON_ONE)
    assert first == second == ["UsageError", "UsageError", [-1.0] * 3]
