"""How the samples of a loader become its batches: the native program, callables, collate=."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from nostall import _native
from nostall.base._garbage import close_safely
from nostall.errors import StoppedError, UsageError
from nostall.fields import Custom
from nostall.loader._ahead import Finish, Hand, Here, Made, finished_there, place_of
from nostall.loader._in_turn import Arranged, Composed, arrange, name_of, recognised, steps_of
from nostall.loader._mixing import Mix, split
from nostall.loader._options import LoaderArguments, LoaderOptions
from nostall.loader._records import ByField, OneImage, RawBatch, Records, Steps
from nostall.loader._steps import Transform
from nostall.observe import trace
from nostall.source._source import Source

if TYPE_CHECKING:
    from nostall.loader._codecs import Codecs
    from nostall.loader._feeder import Feeder
    from nostall.loader._python_transforms import PythonStage

Transforms = Steps | ByField | Callable[[Any], Any] | None

_log = logging.getLogger("nostall")
_SECONDS = 0.1


def _as_it_is(array: NDArray[Any]) -> Any:
    return array


def _pinned(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array).pin_memory()


def _maker(output: str) -> Callable[[NDArray[Any]], Any]:
    """What makes of an array the kind of array that batches have."""
    if output != "torch":
        return _as_it_is  # a place makes arrays of JAX
    import torch

    return _pinned if torch.cuda.is_available() else torch.from_numpy


class Recipe:
    """What is done to the samples of a data set, and to batches of them.

    Attributes:
        program: what the native stage unpacks samples with; None if their bytes are left as they are.
        stage: calls callables; None if there are none.
        place: the device of the batches; None if they stay on the host.
        array: makes of an array of the host the kind of array that batches have.
        here: hands batches out on the host.
    """

    def __init__(
        self,
        dataset: Source,
        transforms: Transforms,
        options: LoaderOptions,
        *,
        shift: int,
        on_error: str,
        threads: int,
    ) -> None:
        self._dataset = dataset
        self._options = options
        self._shift = shift  # from a sample of a batch to the one before it that is another
        self._on_error = on_error
        self._threads = threads
        self._output = options.output or ("torch" if importlib.util.find_spec("torch") else "numpy")
        if self._output == "torch":
            # Here, so that the first batch does not wait for it.
            importlib.import_module("torch")
        placed = options.device is not None or self._output == "jax"
        self.place = place_of(options.device, self._output) if placed else None
        self._finish: Finish | None = None  # what the device does to images that it gets
        self.array = _maker(self._output)
        self.here = Here(self.array)
        self.program: _native.Program | None = None
        self.stage: PythonStage | None = None
        self._records: Records | None = None
        self._codecs: Codecs | None = None
        self._arranged: list[Arranged] = []
        self._of_device: list[str] = []  # names of steps
        self._mix: Mix | None = None
        self._transform_by(transforms)
        self._collate = None if self.stage else options.collate

    def follow(self, job: _native.JobSpec) -> None:
        """Takes the job, before anything is drawn."""
        self._job = job
        if self.stage is not None:
            self.stage.follow(job)

    # ------------------------------------------------------------------ what is done

    def _transform_by(self, transforms: Transforms) -> None:
        options = self._options
        if self._dataset.item_maker is not None:
            self._take_items(transforms)
        elif (
            options.fields
            or options.batch
            or isinstance(transforms, Mapping)
            or not self._dataset._pairs
        ):
            self._take_fields(transforms)
        elif transforms is not None:
            self._take_images(transforms)

    def _staging(self) -> dict[str, Any]:
        """The arguments of every stage of callables."""
        return {
            "workers": self._options.workers,
            "count": self._threads,
            "collate": self._options.collate,
            # A place makes arrays of JAX of NumPy's.
            "output": "numpy" if self._output == "jax" else self._output,
            "on_error": self._on_error,
        }

    def _take_items(self, transforms: Transforms) -> None:
        """Batches of the items of a Cached data set."""
        maker = self._dataset.item_maker
        assert maker is not None
        if transforms is not None:
            raise UsageError(
                "transforms= is for samples as they are stored: pass what is to be done with each "
                "item of a Cached data set as its then="
            )
        if self._options.fields or self._options.batch:
            raise UsageError("fields= and batch= are not for items of a Cached data set")
        from nostall.loader._cached_items import ItemStage

        self.stage = ItemStage(maker, **self._staging())

    def _take_fields(self, transforms: Transforms) -> None:
        """Batches of several fields: a program for all of them."""
        options, schema = self._options, self._dataset.schema
        if options.fields is not None:
            schema = schema.select(options.fields)
        if options.workers == "processes" and any(isinstance(k, Custom) for k in schema.values()):
            from nostall.loader._codecs import Codecs

            self._codecs = Codecs(schema, self._threads)
        self._records = Records(
            self._dataset,
            schema,
            transforms,
            dtype=options.dtype,
            layout=options.layout,
            form=options.batch or "dict",
            shift=self._shift,
            decode=options.decode is not False,
            array=self.array,
            tensors=self._output == "torch",
            finishes=self._finishes,
            codecs=self._codecs,
        )
        self.program = self._records.program
        self._arranged, self._of_device = self._records.arranged, self._records.of_device
        if self._records.function is not None:
            from nostall.loader._python_transforms import RecordStage

            self.stage = RecordStage(self._records, self._records.function, **self._staging())

    def _take_images(self, transforms: Transforms) -> None:
        """Batches of one image or callable's result a sample, and of its label."""
        options, pixels = self._options, self._dataset.pixels
        steps: Sequence[Any] = steps_of(transforms)
        dtype, layout = options.dtype, options.layout
        if options.decode is not False:
            steps, own = recognised(steps, pixels)
            layout = layout or own
        steps = self._take_mix(steps)
        native = all(isinstance(step, Transform) for step in steps)
        if native and self._finishes(self._mix is not None):
            every = steps
            steps, self._finish = finished_there(steps, dtype, layout)
            self._of_device = [name_of(step) for step in every if step not in steps]
        if self._finish is not None:
            dtype, layout = "uint8", "hwc"
        if any(isinstance(step, Transform) for step in steps):
            self._expect_images()
        made = arrange(steps, dtype=dtype, layout=layout, pixels=pixels)
        self._arranged = [made]
        unpacked = None
        if made.pipeline is not None:
            mix = None if made.called else self._mix
            unpacked = OneImage(made.pipeline, mix, draws_only=self._finish is not None)
            self.program = unpacked.program
        if not made.called:
            return
        if self._mix is not None and options.collate is not None:
            raise UsageError(
                f"{type(self._mix.step).__name__} is done to arrays of images, and collate= makes "
                "the batches of callables: mix them in collate=, or leave it out"
            )
        from nostall.loader._python_transforms import PythonStage, takes_images

        decoded = takes_images(transforms) if options.decode is None else options.decode
        if decoded:
            self._expect_images()
        self.stage = PythonStage(
            Composed(made.called),
            decode=None if unpacked else pixels if decoded and pixels else decoded,
            unpacked=unpacked,
            tells_of_bytes=options.decode is None,
            **self._staging(),
        )

    def _expect_images(self) -> None:
        """Refuses arrays of numbers that can be neither pixels nor encoded images."""
        dtype = getattr(self._dataset, "dtype", None)
        if dtype is None or self._dataset.pixels is not None:
            return
        if dtype.kind in "fb" or (dtype.kind in "iu" and dtype.itemsize > 1):
            raise UsageError(
                f"the samples of {self._dataset!r} are arrays of {dtype}, and the transforms take "
                "images: open them with columns=, which gives batches of arrays, or pass a callable "
                "and decode=False, which gets their bytes"
            )

    def _finishes(self, mixed: bool) -> bool:
        """Whether the device may finish images, which are then `mixed`."""
        place = self.place
        return place is not None and self._options.collate is None and (place.mixes or not mixed)

    def _take_mix(self, transforms: Any) -> Any:
        """Takes the step for batches off the steps for samples."""
        steps, for_batches = split(transforms)
        if for_batches is not None:
            self._mix = Mix(for_batches, self._shift)
            if self._mix.native.classes and self._dataset._label_type.kind == "f":
                raise UsageError(
                    f"{type(self._mix.step).__name__}: num_classes= is for labels that are classes, "
                    f"and those of {self._dataset!r} are {self._dataset._label_type}: leave it out"
                )
        return steps

    def refuse_idle(self, given: LoaderArguments, transforms: Transforms) -> None:
        """Refuses arguments that would do nothing; nostall.toml may have them for other loaders.

        Raises:
            UsageError: there is one.
        """
        if self.place is not None and not (self.program or self.stage or self._collate):
            device = self._options.device
            said = "output='jax'" if device is None else f"device={str(device)!r}"
            raise UsageError(
                f"{said} takes batches of arrays, and those of this loader are bytes as they are "
                "stored: pass transforms=, fields= or collate="
            )
        typed = any(made.typed for made in self._arranged)
        behind = "native transforms that none of torchvision's is called behind"
        # What is recognised might have been called.
        called = any(made.called for made in self._arranged) or (
            transforms is not None
            and not isinstance(transforms, Mapping)
            and not all(isinstance(step, Transform) for step in steps_of(transforms))
        )
        decodes = self._records is not None or self.program is None
        used = {
            "dtype": (typed, behind),
            "layout": (typed, behind),
            "decode": (called and decodes, "a callable that no native step is before"),
            "workers": (
                called or self._codecs is not None,
                "a callable, or a kind of fields in Python",
            ),
        }
        if (maker := self._dataset.item_maker) is not None:
            used["workers"] = (maker.then is not None, "a callable, and of items with then=")
        for name, (does, goes) in used.items():
            chosen = given.get(name)
            if chosen is not None and not does and (name != "workers" or chosen == "processes"):
                raise UsageError(f"{name}={chosen!r} does nothing here: it goes with {goes}")

    def settings(self) -> dict[str, Any]:
        """Where the steps run, as plain data."""
        return {
            "transforms": "python" if self.stage else "native" if self.program else "none",
            "native_steps": [name for made in self._arranged for name in made.native],
            "called_steps": [name for made in self._arranged for name in made.python],
            "device_steps": self._of_device,
            "works_after_core": self.works_after_core,
        }

    def tell_steps(self) -> None:
        """Logs which steps run natively, and what they leave as it is although boxes are taken out."""
        if self._records is not None and self._records.staying:
            _log.warning(
                "SanitizeBoundingBoxes takes boxes out, and %s keeps all rows: if they are of the "
                "boxes, as classes are, give its kind rows_of=, the name of the boxes",
                ", ".join(self._records.staying),
            )
        if self._arranged:
            steps = self.settings()
            native, called, device = (
                ", ".join(steps[f"{where}_steps"]) for where in ("native", "called", "device")
            )
            there = f"; on the device {device}" if device else ""
            _log.info(
                "transforms: native %s; called %s%s", native or "none", called or "none", there
            )

    @property
    def gives_pairs(self) -> bool:
        """Whether batches are pairs, of samples and of labels: neither several fields nor items."""
        return self._records is None and self._dataset.item_maker is None

    @property
    def records(self) -> Records | None:
        """What unpacks samples of several fields."""
        return self._records

    @property
    def lists(self) -> Literal["samples", "columns"] | None:
        """What lists in a batch have a value for: each sample, or each value of an item, which is then
        that of all samples. None if collate= decides it."""
        if self._options.collate is not None:
            return None
        return "samples" if self._dataset.item_maker is None else "columns"

    @property
    def is_native(self) -> bool:
        """Whether the arrays of a batch lie in the stage's memory."""
        return self.program is not None and self.stage is None and self._collate is None

    @property
    def works_after_core(self) -> bool:
        """Whether anything works on a batch that the core has made: callables, or a device."""
        calls = self.stage is not None or self._collate is not None or self._mix is not None
        return calls or self.place is not None

    @property
    def is_light(self) -> bool:
        """Whether a batch costs little more than a copy of its bytes."""
        return self.is_native and self.program is not None and self.program.light

    def end_codecs(self) -> None:
        """The native stage ends with the values under way: it would decode what it has read ahead."""
        if self._codecs is not None:
            self._codecs.close()

    def pause(self) -> None:
        """The iteration before takes no further batches from the native stage."""
        if self.stage is not None:
            self.stage.drop()

    def close(self) -> None:
        """Ends what calls callables, once the native stage has ended."""
        if self.stage is not None:
            self.stage.close()

    # ------------------------------------------------------------------ batches

    def batches(
        self,
        loader: _native.Loader,
        count: int,
        waited: Callable[[], None] | None = None,
    ) -> Generator[Made, None, None]:
        """The next `count` batches; `waited` is called now and then while one is waited for."""
        if self.stage is not None:
            yield from self._called(self.stage, loader, count, waited)
            return

        def awaited() -> _native.Batch:
            assert waited is not None
            while True:
                waited()
                if (batch := loader.next_soon()) is not None:
                    return batch

        following = loader.next if waited is None else awaited
        hand_out = self._native_hand_out()
        for _ in range(count):
            batch = following()
            yield Made(batch, (), hand_out or self._finished(batch, None, {}))

    def _called(
        self,
        stage: PythonStage,
        loader: _native.Loader,
        count: int,
        waited: Callable[[], None] | None,
    ) -> Generator[Made, None, None]:
        """The same where callables make the batches."""
        feeder = stage.start(loader, count)
        try:
            for _ in range(count):
                yield self._made_by(stage, feeder, waited)
        finally:
            close_safely(feeder.close)

    def _made_by(
        self, stage: PythonStage, feeder: Feeder, waited: Callable[[], None] | None
    ) -> Made:
        try:
            if waited is not None:
                waited()
            work = feeder.take(waited)
            if waited is not None:
                with trace.span("wait for callables", "data"):
                    while not work.is_done(_SECONDS):
                        waited()
            data, substituted, places = stage.result(work, self._dataset, feeder)
            made = Made(work.batch, substituted, self._finished(work.batch, data, places))
            del work
            feeder.done()
        except Exception as error:
            if stage.is_of_an_end(error, feeder):
                raise StoppedError("the loader is closed") from None
            raise
        return made

    def _native_hand_out(self) -> Callable[[_native.Batch, Hand], Any] | None:
        """What hands batches out of which nothing is to be computed here; None for others."""
        if not self.is_native:
            return None
        if self._records is not None:
            return self._records.hand_out
        finish = self._finish
        if self._mix is not None or self._dataset._label_type.kind == "f":
            return None
        return lambda batch, to: (to.images(batch, 0, finish, None), to.labels(batch))

    def _finished(
        self, batch: _native.Batch, made: Any, places: dict[int, int]
    ) -> Callable[[_native.Batch, Hand], Any]:
        """What hands a batch out, of which `made` is what callables made.

        The host's own work is done here, once: a device that is full gets the same batch again.
        """
        native = self.is_native
        if self.stage is None and not native:
            made = self._collated(batch)
        if self._records is not None or self._dataset.item_maker is not None:  # with their labels
            return lambda _, to: to.tree(made)
        labels = batch.labels
        for place, replacement in places.items():
            labels[place] = self._dataset.native.labels[replacement]
        labelled = self._labelled(batch, made, self._dataset.as_labels(labels))
        if native:
            finish = self._finish
            mixed = None if self._mix is None or finish is None else self._mix.mixed(batch)
            return lambda batch, to: (to.images(batch, 0, finish, mixed), labelled(to))
        return lambda _, to: (to.tree(made), labelled(to))

    def _collated(self, batch: _native.Batch) -> Any:
        """What collate= makes of a batch without callables; its raw bytes where there is none."""
        if self._records is not None:
            data = self._records.hand_out(batch, self.here)
            return data if self._collate is None else self._collate(data)
        data = RawBatch(batch.data, batch.offsets, batch.lengths)
        if self.program is not None:
            data = self.array(batch.output(0))
        if self._collate is None:
            return data
        if len(data) == 0:
            return self._nothing(batch)
        return self._collate([data[i] for i in range(len(data))])

    def _nothing(self, batch: _native.Batch) -> Any:
        """The same of a batch without samples."""
        from nostall.loader._python_transforms import UncalledStage

        pipeline = self._arranged[0].pipeline if self._arranged else None
        stage = UncalledStage(
            lambda sample, _: sample if pipeline is None else self.array(sample),
            decode=False,
            unpacked=None if pipeline is None else OneImage(pipeline),
            **{**self._staging(), "workers": "threads"},
        )
        stage.follow(self._job)
        return stage.nothing(self._dataset, batch)

    def _labelled(
        self, batch: _native.Batch, data: Any, labels: NDArray[Any]
    ) -> Callable[[Hand], Any]:
        """What makes arrays of the labels; mixes the images that callables made, in place."""
        mix = self._mix
        if mix is None:
            return lambda to: to.array(labels)
        if self.stage is None:
            targets = batch.output(1) if mix.native.classes else None
            return lambda to: mix.labelled(batch.mixture[1], targets, labels, to)
        lam, mixed = mix.images_of(data, labels, self._job.seed, batch.epoch, batch.index)
        return lambda to: mix.labelled(lam, mixed, labels, to)
