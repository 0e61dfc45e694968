"""What goes wrong around the gradient engine: hooks that raise, forks, engines side by side."""

from __future__ import annotations

import pytest
from sync_ranks import run_ranks

SETUP = """
import torch, nostall.torch as nt
from nostall.sync import SyncOptions
torch.set_num_threads(1)
def make(width=8, seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, nt.DistributedOptimizer(
        optimizer, model.named_parameters(), SyncOptions(threshold=64, timeout=60, **options))
def backward(model, value=1.0):
    model.zero_grad()
    model(torch.full((3, 4), float(value))).square().sum().backward()
def weights(model):
    return [p.detach().double().sum().item() for p in model.parameters()]
"""


@pytest.mark.multi
def test_a_hook_that_raises_ends_the_rank_and_the_others_are_told() -> None:
    code = """
model, optimizer = make()
def hook(gradient):
    if rank == 1 and step == 3:
        raise ValueError("the user's hook failed")
model[0].weight.register_hook(hook)
for step in range(6):
    backward(model)
    optimizer.step()
"""
    first, second = run_ranks(2, SETUP + code, check=False)
    assert "ValueError: the user's hook failed" in second
    assert "PeerError" in first


TURNS = """
# An exception inside a hook that the training survives: the rest of the step counts as absent.
model, optimizer = make()
def hook(gradient):
    if rank == 1 and step == 2:
        raise ValueError("no")
model[0].weight.register_hook(hook)
contributors = []
for step in range(5):
    try:
        backward(model)
    except ValueError:
        pass
    optimizer.step()
    contributors.append(optimizer.gradient_sync.engine.contributors()[:4].tolist())
result = {"contributors": contributors, "survived": weights(model)}

step = -1  # the hook is quiet from here on

# Two engines in one process, in both modes.
for mode in ("planned", "negotiated"):
    one, optimize_one = make(8, 1, mode=mode)
    two, optimize_two = make(5, 2, mode=mode)
    for turn in range(4):
        backward(one, turn + rank)
        backward(two, turn - rank)
        optimize_one.step()
        optimize_two.step()
    result[mode] = [weights(one), weights(two)]

# A forked child is refused, ends as any other process does, and the job goes on.
child = os.fork()
if child == 0:
    try:
        backward(model)
    except Exception as error:
        sys.exit(7 if "forked" in str(error) else 8)
    sys.exit(9)
_, status = os.waitpid(child, 0)
result["child"] = os.waitstatus_to_exitcode(status)
for turn in range(3):
    backward(model, rank)
    optimizer.step()
result["after fork"] = weights(model)

# The processes end with gradients on their way, in both modes.
for m in (model, one):
    backward(m)
"""


@pytest.mark.multi
def test_exceptions_forks_and_engines_side_by_side() -> None:
    first, second = run_ranks(2, SETUP + TURNS, whole=True)
    assert first == second
    # The last gradient of the backward pass is the first layer's weight, parameter 0.
    assert [c[0] for c in first["contributors"]] == [2, 2, 1, 2, 2]
    assert all(c[2:] == [2, 2] for c in first["contributors"])
    assert first["child"] == 7
    assert first["planned"] == first["negotiated"]
