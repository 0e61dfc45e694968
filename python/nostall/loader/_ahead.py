"""Batches that go to a device: a thread sends them there, ahead of the consumer.

`Place` is the interface of a device. The module of each framework (`nostall.torch._device`,
`nostall.loader._jax`) has a function `place` that makes one; it is imported for device=.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.loader._producer import Producer, Stopped
from nostall.loader._usual_steps import Decode, Normalize, ToTensor

if TYPE_CHECKING:
    from nostall.loader._mixing import Mixed
    from nostall.loader._steps import Transform

_log = logging.getLogger("nostall")

_PLACES = {"torch": "nostall.torch._device", "jax": "nostall.loader._jax"}
_ALIGNED = 64
_COPYING = 2  # batches whose copies may be under way while the next one is sent


@dataclass(frozen=True, eq=False)
class Finish:
    """What a device does to images that reach it as uint8 (n, height, width, 3).

    Each value becomes value * scale + offset in float32, rounded after each of the two operations as
    on the host, and is then converted to `dtype` and laid out as `layout`.
    """

    scale: tuple[float, ...]
    offset: tuple[float, ...]
    dtype: str
    layout: str


def finished_there(
    steps: Sequence[Transform], dtype: str | None, layout: str | None
) -> tuple[Sequence[Transform], Finish | None]:
    """The steps that the host does, and what is left for the device: a quarter of the bytes travels.

    That is ToTensor and what follows it, if those are Normalize alone.
    """
    tensor = next((i for i, step in enumerate(steps) if isinstance(step, ToTensor)), None)
    if tensor is None or dtype == "uint8":
        return steps, None
    scale, offset = np.full(3, 1.0 / 255), np.zeros(3)
    for step in steps[tensor + 1 :]:
        if not isinstance(step, Normalize):
            return steps, None
        # As the pipeline folds them (native/image/compile.cc): given in float32, folded in float64.
        mean, std = (
            np.asarray(values, np.float32).astype(np.float64) for values in (step.mean, step.std)
        )
        scale, offset = scale / std, (offset - mean) / std
    factors, terms = (tuple(values.astype(np.float32).tolist()) for values in (scale, offset))
    host = steps[:tensor] or [Decode()]  # of samples that are pixels nothing else may be left
    return host, Finish(factors, terms, dtype or "float32", layout or "chw")


class Hand(Protocol):
    """What makes of the arrays of a batch what the user is handed."""

    def array(self, array: NDArray[Any]) -> Any:
        """One array of the batch, which may lie in its memory."""

    def output(self, batch: _native.Batch, number: int) -> Any:
        """An output of its program that is one array."""

    def outputs(self, batch: _native.Batch, names: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Several of them, by their names."""

    def labels(self, batch: _native.Batch) -> Any:
        """Its labels, as whole numbers."""

    def images(
        self, batch: _native.Batch, number: int, finish: Finish | None, mixed: Mixed | None
    ) -> Any:
        """An output that is images, and what is left to do to them: nothing on the host."""

    def both(self, array: NDArray[Any], shift: int) -> tuple[Any, Any]:
        """An array, and what lies `shift` places before each of its rows, around the end."""

    def tree(self, value: Any) -> Any:
        """What a callable made: arrays and tensors in dicts, lists and tuples."""


class OfArrays:
    """A hand that makes everything of arrays, each time anew."""

    array: Callable[[NDArray[Any]], Any]

    def output(self, batch: _native.Batch, number: int) -> Any:
        return self.array(batch.output(number))

    def outputs(self, batch: _native.Batch, names: Sequence[tuple[int, str]]) -> dict[str, Any]:
        array, output = self.array, batch.output
        return {name: array(output(number)) for number, name in names}

    def labels(self, batch: _native.Batch) -> Any:
        return self.array(batch.labels)


class Here(OfArrays):
    """Nothing is done but to make the kind of array that batches have."""

    def __init__(self, array: Callable[[NDArray[Any]], Any]) -> None:
        self.array = array

    def images(
        self, batch: _native.Batch, number: int, finish: Finish | None, mixed: Mixed | None
    ) -> Any:
        return self.array(batch.output(number))

    def both(self, array: NDArray[Any], shift: int) -> tuple[Any, Any]:
        return self.array(array), self.array(np.roll(array, shift, axis=0))

    def tree(self, value: Any) -> Any:
        return value


class Sending(Hand, Protocol):
    """One batch on its way to a device."""

    @property
    def bytes(self) -> int:
        """Of the device's memory."""

    def sent(self) -> None:
        """All of the batch was given."""

    def is_copied(self, wait: bool) -> bool:
        """Whether the host's memory is free again; `wait` waits until it is."""

    def hand_over(self) -> None:
        """From now on the batch belongs to the caller's current stream, which waits for it."""


class Place(Protocol):
    """A device."""

    @property
    def mixes(self) -> bool:
        """Whether it mixes batches that it finishes."""

    def memory(self, size: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from while the host goes on, aligned to 64 bytes."""

    def enter(self) -> None:
        """The calling thread sends batches from now on, and does nothing else."""

    def begin(self) -> Sending: ...

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """The consumer waits inside for a batch; so does the device, once it has done the rest."""

    def pause(self) -> None:
        """The consumer takes no batch for a while."""

    def waits(self) -> dict[str, float]:
        """What the device waited for (`Stats.device`)."""

    def is_full(self, error: BaseException) -> bool:
        """Whether the error says that the device has no memory left."""


def place_of(device: Any, output: str) -> Place | None:
    """The device, or None where batches stay on the host.

    Raises:
        UsageError: it does not exist, or `output` has no devices.
    """
    if output == "numpy":
        raise UsageError(
            f'device={str(device)!r} gives tensors of torch, or arrays of JAX: pass output="torch" or '
            '"jax"'
        )
    if output == "jax" and importlib.util.find_spec("jax") is None:
        raise UsageError('output="jax" needs JAX: pip install jax')
    module = importlib.import_module(_PLACES[output])
    place: Place | None = module.place(device)
    return place


def aligned(size: int) -> NDArray[np.uint8]:
    """Ordinary memory, aligned as a place gives it."""
    whole = np.empty(size + _ALIGNED, np.uint8)
    begin = -whole.ctypes.data % _ALIGNED
    return whole[begin : begin + size]


@dataclass(slots=True)
class Made:
    """A batch that the host has finished; `hand_out` makes of it what the user is handed."""

    batch: _native.Batch
    substituted: Sequence[Any]
    hand_out: Callable[[_native.Batch, Hand], Any]

    def release(self) -> None:
        """Gives the memory back, once nothing else refers to it."""
        del self.hand_out  # its arrays lie there
        self.batch.release()


class Ahead(Producer[tuple[Made, Any, Sending]]):
    """A thread that sends batches, at most `limit` bytes of them before the consumer takes them.

    `limit` falls to what the device has had room for.

    One batch may always be ahead. Where the device has no memory for more, fewer are: that is said
    once. Memory of a batch goes back to the stage when its copy is done.

    `made` gives the batches; its argument is a function that it calls now and then while it waits for
    one, and that raises `Stopped`.
    """

    def __init__(
        self,
        place: Place,
        made: Callable[[Callable[[], None]], Generator[Made, None, None]],
        limit: int,
    ) -> None:
        super().__init__("nostall-device")
        self._place = place
        self._made = made
        self.limit = limit
        # Bytes of all batches so far; each is written by one thread alone.
        self._sent = self._taken = 0
        self._copying: collections.deque[tuple[Made, Sending]] = collections.deque()
        self._begin()

    def take_sent(self) -> tuple[Made, Any]:
        """The next batch and what the user is handed; waits for it to be sent, not for its copy."""
        if _native.trace_on():
            with self._place.waiting():
                made, value, sending = self.take()
        else:
            made, value, sending = self.take()
        self._taken += sending.bytes
        sending.hand_over()
        self._make_room()  # last, because a thread that wakes up requests the GIL
        return made, value

    # ------------------------------------------------------------------ in the thread

    def _make(self) -> None:
        batches = self._made(self._waited)
        try:
            self._place.enter()
            for batch in batches:
                sending, value = self._send(batch)
                self._copying.append((batch, sending))
                self._sent += sending.bytes
                self._put((batch, value, sending))
                self._give_back(_COPYING)
                self._wait_for_room(sending.bytes)
        except BaseException:
            with contextlib.suppress(BaseException):
                batches.close()
                self._give_back(0)
            raise
        batches.close()
        self._give_back(0)

    def _waited(self) -> None:
        if self._stop:
            raise Stopped
        while self._copying and self._copying[0][1].is_copied(False):
            self._copying.popleft()[0].release()

    def _give_back(self, most: int) -> None:
        """Waits until at most so many copies are under way, and gives the memory of others back."""
        while len(self._copying) > most:
            batch, sending = self._copying.popleft()
            sending.is_copied(True)
            batch.release()

    def _wait_for_room(self, size: int) -> None:
        """`size` is what the next batch may take."""
        if self._has_room(size):
            return
        self._give_back(0)  # none waits for the consumer
        self._wait_until(lambda: self._has_room(size))

    def _has_room(self, size: int) -> bool:
        ahead = self._sent - self._taken
        return ahead + size <= self.limit or not self._ready or self._stop

    def _send(self, made: Made) -> tuple[Sending, Any]:
        last = False
        while True:
            sending = self._place.begin()
            try:
                value = made.hand_out(made.batch, sending)
                sending.sent()
            except Exception as error:
                with contextlib.suppress(Exception):
                    # Copies under way read the batch's memory; what they wrote is dropped.
                    sending.sent()
                    sending.is_copied(True)
                if last or not self._place.is_full(error):
                    raise
                last = self._wait_for_memory(error)
                continue
            return sending, value

    def _wait_for_memory(self, error: Exception) -> bool:
        """Waits until the device may have room; True if nothing but the consumer can make any."""
        ready = list(self._ready)
        count, ahead = len(ready), sum(sending.bytes for _, _, sending in ready)
        if count == 0:
            self._wait_until(lambda: self._wanted or self._stop)
            return True
        if self.limit > ahead:
            self.limit = ahead
            _log.warning(
                "the device has no memory for more than %s ahead of the consumer (%s): fewer are sent "
                "ahead",
                counted(count, "batch"),
                str(error).partition("\n")[0],
            )
        self._wait_until(lambda: len(self._ready) < count or self._stop)
        if self._stop:
            raise Stopped
        return False
