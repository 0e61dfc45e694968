"""The simulated accelerator itself: it must be wrong where a GPU is, and say what a GPU hides."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import pytest
import torch


def side() -> torch.Stream:
    return torch.Stream(device="simdev")


def event() -> torch.Event:
    return torch.Event(device="simdev", enable_timing=True)


def recorded(stream: torch.Stream) -> torch.Event:
    mark = event()
    mark.record(stream)
    return mark


def pinned(value: float, count: int = 4096) -> torch.Tensor:
    return torch.full((count,), value).pin_memory()


def expect(*words: str) -> None:
    """One report with all these words, and no other."""
    import simdev

    found = simdev.reports()
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


# ---------------------------------------------------------------------------- memory and copies


def case_copies_are_asynchronous_only_from_pinned_memory() -> None:
    import simdev

    stream = side()
    source = pinned(1.0)
    with simdev.held(stream), stream:
        on_device = source.to("simdev", non_blocking=True)
        assert not stream.query()
    stream.synchronize()
    assert on_device.cpu().eq(1).all()
    with stream:
        pageable = torch.full((4096,), 2.0)
        on_device = pageable.to("simdev", non_blocking=True)
        assert stream.query()
        pageable.zero_()
        assert on_device.cpu().eq(2).all()


def case_a_copy_reads_its_source_late() -> None:
    import simdev

    stream = side()
    source = pinned(1.0)
    with simdev.held(stream), stream:
        on_device = source.to("simdev", non_blocking=True)
        source.fill_(5.0)
    stream.synchronize()
    assert on_device.cpu().eq(5).all()
    expect("reused")


def case_an_early_read_of_a_copy_to_the_host_is_poison_and_reported() -> None:
    import simdev

    stream = side()
    with stream:
        on_device = torch.ones(4096, device="simdev")
        target = torch.zeros(4096).pin_memory()
        with simdev.held(stream):
            target.copy_(on_device, non_blocking=True)
            assert target.isnan().all()
    expect("early")
    stream.synchronize()
    assert target.eq(1).all()


def case_reuse_is_reported_however_long_ago_the_copy_ran() -> None:
    stream = side()
    source = pinned(1.0)
    with stream:
        on_device = source.to("simdev", non_blocking=True)
    done = recorded(stream)
    # Only the device has waited; and then the copy is done, but no host thread asked.
    torch.accelerator.current_stream().wait_event(done)
    after = recorded(side())
    after.synchronize()
    source.add_(1)
    expect("reused")
    done.synchronize()
    source.add_(1)
    del on_device


def case_system_calls_refuse_guarded_pages() -> None:
    import simdev

    stream = side()
    source = pinned(1.0)
    with simdev.held(stream), stream, open("/dev/zero", "rb", buffering=0) as zero:
        on_device = source.to("simdev", non_blocking=True)
        with pytest.raises(OSError, match="Bad address"):
            zero.readinto(source.numpy())
    stream.synchronize()
    assert on_device.cpu().eq(1).all()


def case_pinned_memory_is_known_by_its_address() -> None:
    source = pinned(1.0)
    assert source.is_pinned() and source[7:].is_pinned() and source.view(64, 64).is_pinned()
    assert torch.from_numpy(source.numpy()).is_pinned()
    assert not torch.ones(3).is_pinned()


def case_a_pinned_block_is_not_handed_out_while_a_copy_reads_it() -> None:
    import simdev

    stream = side()
    source = pinned(1.0, 1 << 16)
    address = source.data_ptr()
    with simdev.held(stream), stream:
        # By address, not by the tensor: this one came through NumPy.
        on_device = torch.from_numpy(source.numpy()).to("simdev", non_blocking=True)
        del source
        other = pinned(9.0, 1 << 16)
        assert other.data_ptr() != address
    stream.synchronize()
    assert on_device.cpu().eq(1).all()
    assert pinned(3.0, 1 << 16).data_ptr() == address


def case_blocks_are_reused_in_their_stream_only() -> None:
    import simdev

    def block() -> torch.Tensor:
        return torch.empty(3 << 20, dtype=torch.uint8, device="simdev")

    first = block()
    address = first.data_ptr()
    del first
    assert block().data_ptr() == address
    other = side()
    with other:
        assert block().data_ptr() != address
    told = block()
    assert told.data_ptr() == address
    other.wait_stream(torch.accelerator.current_stream())
    with simdev.held(other):
        with other:
            told.add_(1)
        told.record_stream(other)
        del told
        assert block().data_ptr() != address
    other.synchronize()
    assert block().data_ptr() == address


# ---------------------------------------------------------------------------- streams and events


def case_events() -> None:
    import simdev

    stream, later = side(), side()
    simdev.speed(0.001, 1e9, stream)
    begin, end = event(), event()
    with stream:
        begin.record()
        with simdev.held(stream):
            source = pinned(2.0, 1 << 20)
            on_device = source.to("simdev", non_blocking=True)
            end.record()
            assert not end.query()
            later.wait_event(end)
            with later:
                doubled = on_device * 2
            assert not later.query()
        end.synchronize()
    assert begin.elapsed_time(end) >= 1 + 4 * (1 << 20) / 1e6
    later.synchronize()
    assert doubled.cpu().eq(4).all()
    with simdev.held(stream), stream:
        end.record()  # a new generation
        assert not end.query()


def case_each_thread_has_its_own_current_stream() -> None:
    default = torch.accelerator.current_stream()
    seen = []
    with side() as mine:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream() == mine
        with torch.Stream(device="simdev:1") as other:
            assert torch.accelerator.current_device_index() == 1
            assert torch.accelerator.current_stream() == other
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream() == mine
    assert seen == [default] and torch.accelerator.current_stream() == default


def case_the_gil_is_free_while_waiting() -> None:
    import simdev

    stream = side()
    waits: list[Callable[[], object]] = [stream.synchronize, lambda: recorded(stream).synchronize()]
    for wait in waits:
        simdev.hold(stream)
        with stream:
            source = pinned(1.0)
            on_device = source.to("simdev", non_blocking=True)
        # With the GIL held this thread could not run.
        thread = threading.Thread(target=simdev.release, args=(stream,))
        thread.start()
        wait()
        thread.join()
        del on_device


# ---------------------------------------------------------------------------- faults


def case_a_missing_event_is_reported_whatever_the_timing() -> None:
    stream = side()
    source = pinned(1.0)
    with stream:
        on_device = source.to("simdev", non_blocking=True)
    recorded(side()).synchronize()
    total = on_device.sum()
    expect("aten::sum", "copy to the device", "no event")
    stream.synchronize()
    del total


def case_a_missing_record_stream_is_reported() -> None:
    import simdev

    stream = side()
    mine = torch.ones(1 << 16, device="simdev")
    stream.wait_stream(torch.accelerator.current_stream())
    with simdev.held(stream):
        with stream:
            total = mine.sum()
        del mine
        again = torch.zeros(1 << 16, device="simdev")
        expect("zero", "aten::sum")
    stream.synchronize()
    del again, total


def case_the_right_order_is_not_reported() -> None:
    import simdev

    stream = side()
    consumer = torch.accelerator.current_stream()
    slab = torch.empty(1 << 14).pin_memory()
    for step in range(20):
        slab.fill_(step)
        with stream:
            on_device = slab.to("simdev", non_blocking=True)
            done = recorded(stream)
        consumer.wait_event(done)
        on_device.record_stream(consumer)
        total = on_device.sum()
        done.synchronize()
        assert total.item() == step * (1 << 14)
    assert simdev.reports() == []


def case_backward_on_a_side_stream_is_clean_and_its_control_is_not() -> None:
    import simdev

    stream = side()
    weight = torch.ones(64, 64, device="simdev", requires_grad=True)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        loss = (weight @ weight).sum()
    loss.backward()
    torch.accelerator.current_stream().wait_stream(stream)
    weight.grad.sum().item()
    assert simdev.reports() == []
    with stream:
        weight.grad.mul_(2)
    weight.grad.mul_(2)
    expect("aten::mul", "no event")


def case_each_fault_is_reported_every_time() -> None:
    """Once, and whatever came before: twenty times the same."""
    for _ in range(20):
        case_a_copy_reads_its_source_late()
        case_an_early_read_of_a_copy_to_the_host_is_poison_and_reported()
        case_reuse_is_reported_however_long_ago_the_copy_ran()
        case_system_calls_refuse_guarded_pages()
        case_a_missing_event_is_reported_whatever_the_timing()
        case_a_missing_record_stream_is_reported()


def case_memory_that_is_not_there() -> None:
    import simdev

    simdev.capacity(torch.accelerator.memory_allocated() + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(8 << 20, dtype=torch.uint8, device="simdev")
    simdev.refuse_pinning(True)
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(37 << 20, dtype=torch.uint8, pin_memory=True)


def case_a_lost_device() -> None:
    import simdev

    simdev.fail_after(1)
    with pytest.raises(RuntimeError, match="device lost"):
        torch.zeros(5, device="simdev")
    there = torch.zeros(5, device="simdev")  # one task was lost
    mark = recorded(side())
    simdev.lose()
    calls: list[Callable[[], object]] = [
        there.cpu, there.zero_, mark.query, mark.synchronize, torch.accelerator.synchronize,
        lambda: recorded(side()), lambda: side().wait_event(mark),
        lambda: torch.zeros(1 << 20).pin_memory().to("simdev", non_blocking=True),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="device lost"):
            call()
    simdev.release_all()
    assert there.tolist() == [0] * 5


# ---------------------------------------------------------------------------- results


def case_training_equals_the_cpu() -> None:
    import simdev
    from torch import nn

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        ).to(device)
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [value.cpu() for value in model.state_dict().values()]

    for mine, theirs in zip(train("simdev"), train("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert simdev.reports() == []


def case_random_numbers_and_mixed_precision_equal_the_cpu() -> None:
    import simdev

    found = []
    for device in ("cpu", "simdev"):
        torch.manual_seed(3)
        drawn = torch.nn.functional.dropout(torch.ones(50, 50, device=device), 0.3)
        noise = torch.randn(50, 50, device=device) * torch.rand((), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            product = drawn @ noise
        assert product.dtype == torch.bfloat16
        found.append([drawn.cpu(), noise.cpu(), product.cpu()])
    assert all(map(torch.equal, *found))
    assert simdev.reports() == []


def case_views_and_files() -> None:
    base = torch.arange(24.0).to("simdev")
    view = base.view(2, 3, 4).transpose(0, 2)[1, ::2].unsqueeze(0)
    view += 100
    host = torch.arange(24.0)
    host.view(2, 3, 4).transpose(0, 2)[1, ::2].unsqueeze(0).add_(100)
    assert base.cpu().equal(host)
    assert base.unfold(0, 4, 4).cpu().equal(host.unfold(0, 4, 4))
    assert base.masked_select(base > 50).cpu().equal(host[host > 50])  # without meta tensors
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        torch.save(base, file.name)
        assert torch.load(file.name).device.type == "simdev"
        assert torch.load(file.name, map_location="cpu").equal(host)


def case_two_devices() -> None:
    first = torch.ones(1000, device="simdev:0")
    second = first.to("simdev:1")
    assert second.device.index == 1 and (second * 3).sum().item() == 3000


# ---------------------------------------------------------------------------- processes of their own


def ends_host_touches_device_memory(writes: bool = False) -> None:
    import ctypes

    import simdev  # noqa: F401

    on_device = torch.ones(10, device="simdev")
    on_device.sum().item()
    print("alive", flush=True)
    if writes:
        ctypes.memset(on_device.data_ptr(), 0, 4)
    else:
        ctypes.string_at(on_device.data_ptr(), 4)
    print("touched", flush=True)


def ends_host_writes_device_memory() -> None:
    ends_host_touches_device_memory(writes=True)


def ends_forked_child() -> None:
    import simdev  # noqa: F401

    torch.ones(10, device="simdev").sum().item()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(10, device="simdev")
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def ends_with_pending_work() -> None:
    import simdev

    simdev.hold()
    print(torch.ones(10, device="simdev").shape, flush=True)


# ---------------------------------------------------------------------------- for pytest


def test_of_the_device() -> None:
    cases.check(__file__)


@pytest.mark.parametrize("does", ["touches", "writes"])
def test_a_host_that_touches_device_memory_dies(does: str) -> None:
    done = cases.run(__file__, f"ends_host_{does}_device_memory")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n")


def test_a_forked_child_is_refused() -> None:
    done = cases.run(__file__, "ends_forked_child")
    assert done.returncode == 0 and "forked child" in done.stdout, done.stderr


def test_a_process_ends_with_work_pending() -> None:
    done = cases.run(__file__, "ends_with_pending_work")
    assert done.returncode == 0 and "10" in done.stdout, done.stderr


if __name__ == "__main__":
    cases.main(globals())
