"""Gradients that lie in the buffers they travel in: what a training does to `.grad` must not show."""

from __future__ import annotations

import pytest
from sync_ranks import run_ranks

SETUP = """
import contextlib, gc, hashlib, torch, nostall.torch as nt
from nostall.errors import UsageError
torch.set_num_threads(1)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(16, 48)
        self.left = torch.nn.Linear(48, 48)
        self.right = torch.nn.Linear(48, 48)
        self.b = torch.nn.Linear(48, 4)
    def forward(self, x, way="both"):
        h = torch.relu(self.a(x))
        parts = [part(h) for name, part in (("left", self.left), ("right", self.right))
                 if way in (name, "both")]
        return self.b(torch.relu(sum(parts)))
def make(views, **more):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = nt.SyncOptions(threshold=5000, fixed_order=True, views=views, timeout=60)
    return model, nt.DistributedOptimizer(optimizer, model.named_parameters(), options, **more)
def backward(model, step, way="both"):
    g = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(5, 16, generator=g), way).square().sum().backward()
def digest(model):
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
def in_buffers(optimizer):
    # How many gradients lie in memory that the ranks share.
    ranges = []
    for line in open("/proc/self/maps"):
        if "/dev/shm/" in line:
            ranges.append([int(x, 16) for x in line.split()[0].split("-")])
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    return sum(any(a <= g.data_ptr() < b for a, b in ranges) for g in grads)
"""

WAYS = """
def plain(model, optimizer, step):
    optimizer.zero_grad(set_to_none=True)
    backward(model, step)
    optimizer.step()
def zeroed(model, optimizer, step):
    optimizer.zero_grad(set_to_none=False)
    backward(model, step)
    optimizer.step()
def never_zeroed(model, optimizer, step):
    backward(model, step)
    optimizer.step()
def accumulated(model, optimizer, step):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    with optimizer.no_sync():
        backward(model, 2 * step)
    backward(model, 2 * step + 1)
    optimizer.step()
def clipped(model, optimizer, step):
    optimizer.zero_grad()
    backward(model, step)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
def changing(model, optimizer, step):
    optimizer.zero_grad(set_to_none=step % 3 > 0)
    way = ["both", "left", "right"][(step // 4 + rank * (step % 2)) % 3]
    backward(model, step, way)
    optimizer.step()
def replaced(model, optimizer, step):
    optimizer.zero_grad()
    backward(model, step)
    optimizer.synchronize()
    model.a.weight.grad = model.a.weight.grad * 2
    model.b.bias.grad = None
    with optimizer.skip_synchronize():
        optimizer.step()
def prepared(model, optimizer, step):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    backward(model, step)
    optimizer.step()
kept = []
def keeping(model, optimizer, step):
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()
    kept.append(([p.grad for p in model.parameters()][step % 3 :: 2], step))
    kept[-1] += ([g.clone() for g in kept[-1][0]],)
result = {}
for way in (plain, zeroed, never_zeroed, accumulated, clipped, changing, replaced, prepared, keeping):
    got = []
    for views in (True, False):
        model, optimizer = make(views)
        digests, shared = [], []
        for step in range(9):
            way(model, optimizer, step)
            digests.append(digest(model))
            shared.append(in_buffers(optimizer))
        got.append([digests, shared])
    result[way.__name__] = got
# Nothing that was kept has changed since.
result["kept"] = [all(map(torch.equal, grads, copies)) for grads, _, copies in kept]
# The last of these optimizers is gone, its gradients are not.
# However the program computes at that moment, backward goes on with them.
result["outlived"] = []
for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
    model, optimizer = make(True)
    for step in range(2):
        plain(model, optimizer, step)
    values, shared = digest(model), in_buffers(optimizer)
    with mode():
        del optimizer
        gc.collect()
    result["outlived"].append([shared, values == digest(model)])
    before = model.a.weight.grad.clone()
    backward(model, 2)
    result["outlived"][-1].append(not torch.equal(before, model.a.weight.grad))
for passes in (True, False):
    model, optimizer = make(passes, backward_passes_per_step=2, overlap_update=True)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, 2 * step)
        backward(model, 2 * step + 1)
        optimizer.step()
    result.setdefault("passes", []).append(digest(model))
"""


WAY_NAMES = (
    "plain", "zeroed", "never_zeroed", "accumulated", "clipped", "changing", "replaced", "prepared",
    "keeping",
)  # fmt: skip


@pytest.mark.multi
def test_what_is_done_to_gradients_gives_the_same_bits() -> None:
    first, second = run_ranks(2, SETUP + WAYS)
    for result in (first, second):
        for way in WAY_NAMES:
            (views, shared), (apart, own) = result[way]
            assert views == apart, way
            assert len(set(views)) == 9, way
            # The test can tell them apart. A step that changes the plan, as the first one does, gives
            # them memory of their own; "replaced" does so with two of the eight.
            if way == "changing":
                assert max(shared) >= 6
            else:
                assert shared[1:] == [6 if way == "replaced" else 8] * 8, way
            assert own == [0] * 9, way
        assert result["kept"] == [True] * 18
        assert result["outlived"] == [[8, True, True]] * 3
        assert result["passes"][0] == result["passes"][1]
    assert first["plain"] == second["plain"]
    assert first["changing"] == second["changing"]


REFUSED = """
def train(refused, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = nt.SyncOptions(threshold=5000, fixed_order=True, timeout=60, **options)
    optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters(), options)
    told = 0
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        if refused and rank == 0:
            with contextlib.nullcontext() if step % 2 else optimizer.no_sync():
                try:
                    backward(model, step + 10)
                except UsageError as error:
                    told += "computed again" in str(error)
            loss = sum(p.square().sum() for p in model.parameters())
            torch.autograd.grad(loss, list(model.parameters()))  # adds to no gradient
            weight = next(model.parameters())
            loss = weight.square().sum()
            weight.requires_grad_(False)  # nor does a pass to a frozen one
            loss.backward()
            weight.requires_grad_(True)
        optimizer.step()
    return told, digest(model)
result = [
    [train(True, **options), train(False, **options)]
    for options in ({"views": True}, {"views": False}, {"mode": "negotiated", "cycle": 0.001})
]
"""


@pytest.mark.multi
def test_a_pass_that_is_refused_on_one_rank_changes_no_gradient() -> None:
    first, second = run_ranks(2, SETUP + REFUSED)
    for one, other in zip(first, second, strict=True):
        (told, refused), (_, expected) = one
        assert told == 4 and refused == expected
        assert other == [[0, expected]] * 2


DIRECT = """
model = Net()
optimizer = nt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                    model.named_parameters(), nt.SyncOptions(timeout=60))
backward(model, 0)
try:
    model.a.weight.backward(torch.ones_like(model.a.weight))
    result = "taken"
except UsageError as error:
    result = str(error)
"""


def test_a_gradient_that_is_given_to_a_parameter_itself_is_refused_too() -> None:
    (told,) = run_ranks(1, SETUP + DIRECT)
    assert told.startswith("the gradient of a.weight was computed again before optimizer.step()")


OTHERS = """
import copy, pickle
model, optimizer = make(True)
for step in range(2):  # the first one makes the plan
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()
result = {"dtype": [], "layout": []}

# Copies are the user's.
twin, saved = copy.deepcopy(model), pickle.dumps([p.grad for p in model.parameters()])
result["copied"] = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), pickle.loads(saved))]
result["twin"] = all(map(torch.equal, twin.parameters(), model.parameters()))

# A forked child has no gradients, and what was kept is zeros of its own, which its children get too.
kept = [p.grad for p in model.parameters()]
values = [g.clone() for g in kept]
result["kept in buffers"] = in_buffers(optimizer)
def in_child(does):
    child = os.fork()
    if child == 0:
        try:
            os._exit(does())
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def grandchild():
    return 6 if all(bool((g == 3).all()) for g in kept) else 4
def child():
    if any(g.count_nonzero() for g in kept):
        return 5
    for g in kept:
        g.fill_(3)
    if in_child(grandchild) != 6:
        return 3
    optimizer.zero_grad(set_to_none=False)
    return 7 if all(p.grad is None for p in model.parameters()) else 8
result["child"] = in_child(child)
result["kept"] = all(map(torch.equal, kept, values))
del kept
before = digest(model)
optimizer.zero_grad()
backward(model, 0)
optimizer.step()
result["goes on"] = digest(model) != before

# 16 and 64 bits, and gradients of other strides.
for dtype in (torch.bfloat16, torch.float16, torch.float64):
    weight = torch.nn.Parameter(torch.ones(300, dtype=dtype))
    one = nt.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    for _ in range(2):  # the first step makes the plan
        one.zero_grad()
        (weight * (rank + 1)).sum().backward()
        one.step()
    right = weight.grad.dtype == dtype and weight.tolist() == [-2.0] * 300
    result["dtype"].append([right, in_buffers(one)])
conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
two = nt.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters())
conv(torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last) * (rank + 1)).sum().backward()
strides = conv.weight.grad.stride()
two.step()
result["layout"] = [conv.weight.grad.stride() == strides, (conv.weight.grad == 54.0).all().item()]
"""


@pytest.mark.multi
def test_copies_forks_types_and_layouts() -> None:
    first, second = run_ranks(2, SETUP + OTHERS)
    assert first == second
    assert first["copied"] == [True] * 8
    assert first["twin"]
    assert first["kept in buffers"] == 8
    assert first["child"] == 7
    assert first["kept"]
    assert first["goes on"]
    assert first["dtype"] == [[True, 1]] * 3
    assert first["layout"] == [True, True]
