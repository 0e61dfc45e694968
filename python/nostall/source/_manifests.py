"""Data sets that a file describes: tables (CSV, JSON Lines), COCO, Pascal VOC."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Never
from xml.etree import ElementTree

import numpy as np

from nostall.base._paths import path_of
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.fields import Array, Boxes, Json, Keypoints, Kind, Mask, Scalar, Text
from nostall.fields._kinds import exact
from nostall.source._files import Files, PathLike
from nostall.source._source import refuse_more

_THREADS = 16
_log = logging.getLogger("nostall")


def _text(path: PathLike) -> str:
    try:
        return Path(path_of(path)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from None


class Manifest(Files):
    """One sample for each row of a table: a CSV or TSV file with a line of names, or JSON Lines.

    Args:
        path: the table; its ending (.csv, .tsv, .jsonl, .ndjson) says what it is.
        files: the field of each column that names a file, ``{"image": "path"}``; or the columns, if the
            fields are to have their names. An empty cell, or null, is a missing file.
        columns: likewise, of the columns that are values themselves; if None, all others that have a
            name (the index that pandas writes has none).
        schema: the kinds of fields. Cells of a CSV file are decimal numbers if all of a column are and
            int64, uint64 or, with fractions, float64 holds them, and texts otherwise; where the schema
            says array or JSON they are read as JSON. An empty cell among numbers is a missing value,
            among texts an empty text. Values of JSON Lines have the types they have; integers beside
            fractions become float64, and booleans beside numbers become numbers.
        root: where relative paths start; the folder of the table if None.

    Raises:
        IoError: a file cannot be examined, with its path and the line of the table.
        CorruptionError: the table cannot be read, with its line.
        UsageError: a column is not there, the kind of a field is not known, or a path is of a folder
            or a URL.
    """

    def __init__(
        self,
        path: PathLike,
        files: Mapping[str, str] | Sequence[str] = (),
        columns: Mapping[str, str] | Sequence[str] | None = None,
        *,
        schema: Mapping[str, Kind] | None = None,
        root: PathLike | None = None,
    ) -> None:
        named = _by_field(files)
        table = _table(path)
        if columns is None:
            columns = [name for name in table if name and name not in named.values()]
        valued = _by_field(columns)
        for name in (*named.values(), *valued.values()):
            if name not in table:
                raise UsageError(f"{path} has no column {name!r}; it has: {', '.join(table)}")
        paths = {field: _paths(path, name, table[name]) for field, name in named.items()}
        values = {
            field: _typed(path, name, table[name], (schema or {}).get(field))
            for field, name in valued.items()
        }
        root = root if root is not None else Path(path_of(path)).absolute().parent
        try:
            super().__init__(paths, values, schema=schema, root=root)
        except (IoError, UsageError) as error:
            row = _row_told(str(error), os.fspath(root), paths.values())
            if row is None:
                raise
            raise type(error)(f"{_place(path, row)}: {error}") from error
        self._arguments = {
            "path": str(Path(path_of(path)).absolute()),
            "files": named,
            "columns": valued,
            "schema": schema,
            "root": self.root,
        }


def _by_field(names: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    if isinstance(names, str):
        raise UsageError(f"give the columns as a list or a mapping, not as the text {names!r}")
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def _is_json(path: PathLike) -> bool:
    return os.path.splitext(path_of(path))[1].lower() in (".jsonl", ".ndjson")


def _table(path: PathLike) -> dict[str, list[Any]]:
    """The columns of a table, by name."""
    if _is_json(path):
        rows = [row for _, row in _json_lines(path)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = {name: [row.get(name) for row in rows] for name in names}
    else:
        (_, names), *found = _csv_lines(path)
        table = {name: [row[i] for _, row in found] for i, name in enumerate(names)}
    if not table or not next(iter(table.values())):
        raise UsageError(f"{path} has no rows")
    return table


def _json_lines(path: PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows, each with the number of its line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise CorruptionError(f"{path}, line {number}: not an object, but {line[:40]!r}")
        yield number, row


# csv's limit of a cell's characters is one of the whole process: it is another while a table is read.
_cells = threading.Lock()


def _csv_lines(path: PathLike) -> list[tuple[int, list[str]]]:
    """The names of the columns, then the rows, each with the number of its last line."""
    ending = os.path.splitext(path_of(path))[1].lower()
    if ending not in (".csv", ".tsv"):
        raise UsageError(f"{path} ends neither with .csv, .tsv, .jsonl nor .ndjson")
    delimiter = "," if ending == ".csv" else "\t"
    text = _text(path)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    with _cells:
        limit = csv.field_size_limit()
        csv.field_size_limit(max(limit, len(text)))
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise CorruptionError(f"{path} names a column twice: {', '.join(names)}")
            lines = [(reader.line_num, names)]
            for row in reader:
                if row and len(row) != len(names):
                    raise CorruptionError(
                        f"{path}, line {reader.line_num}: {len(row)} cells for {len(names)} columns"
                    )
                if row:
                    lines.append((reader.line_num, row))
        except csv.Error as error:
            raise CorruptionError(f"{path}, line {reader.line_num}: {error}") from None
        finally:
            csv.field_size_limit(limit)
    return lines


def _place(path: PathLike, row: int) -> str:
    """A row of a table, from 0, as messages name it."""
    lines: Iterable[tuple[int, Any]] = _json_lines(path)
    if not _is_json(path):
        lines = _csv_lines(path)[1:]
    line, _ = next(itertools.islice(lines, row, None))
    return f"{path}, line {line}"


def _cell(path: PathLike, row: int, column: str) -> str:
    return f"{_place(path, row)}, column {column}"


def _row_told(message: str, root: str, columns: Iterable[Sequence[str | None]]) -> int | None:
    """The row whose path a message names; if several are in it, that of the longest."""
    told = [
        (len(path), row)
        for column in columns
        for row, path in enumerate(column)
        if path and (path if "://" in path else os.path.join(root, path)) in message
    ]
    return max(told)[1] if told else None


def _paths(table: PathLike, column: str, values: Sequence[Any]) -> list[str | None]:
    paths: list[str | None] = []
    for row, value in enumerate(values):
        if value is None or value == "":
            paths.append(None)
        elif isinstance(value, str):
            paths.append(_encodable(value, functools.partial(_cell, table, row, column)))
        else:
            raise CorruptionError(f"{_cell(table, row, column)}: {value!r} is no path")
    return paths


def _encodable(path: str, where: Callable[[], str]) -> str:
    try:
        path.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise CorruptionError(f"{where()}: {path!r} is no path ({error})") from None
    return path


def _typed(path: PathLike, column: str, cells: list[Any], kind: Kind | None) -> Any:
    """The values of a column; cells of a CSV file are texts, those of JSON have types."""
    if type(kind) is Text:
        return cells
    if _is_json(path):
        if kind is None and all(type(cell) is int for cell in cells):
            return _integers(cells)
        return cells
    if kind is None:
        return _numbers(cells)
    values: list[Any] = []
    for row, cell in enumerate(cells):
        try:
            value = None if cell == "" else _parsed(cell, kind)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"{_cell(path, row, column)}: {error}") from None
        values.append(value)
    if isinstance(kind, Scalar) and all(type(value) is int for value in values):
        return _integers(values)
    return values


_INTEGER = re.compile(r"[ \t]*[+-]?[0-9]+[ \t]*")
_DECIMAL = re.compile(r"[ \t]*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*")
_NO_NUMBER = re.compile(r"[ \t]*[+-]?(nan|inf|infinity)[ \t]*", re.IGNORECASE)


def _parsed(cell: str, kind: Kind) -> Any:
    if isinstance(kind, Scalar):
        if _INTEGER.fullmatch(cell):
            return int(cell)
        if _DECIMAL.fullmatch(cell) or _NO_NUMBER.fullmatch(cell):
            return float(cell)
    return json.loads(cell)


def _numbers(cells: list[str]) -> Any:
    """The numbers, if all cells are and a type holds them as they are; else the texts.

    An empty cell among numbers is None; among texts it is the empty text.
    """
    if "" in cells:
        numbers = _numbers([cell for cell in cells if cell])
        if not isinstance(numbers, np.ndarray) or not numbers.size:
            return cells
        given = iter(numbers.tolist())
        return [next(given) if cell else None for cell in cells]
    if all(_INTEGER.fullmatch(cell) for cell in cells):
        try:
            found = _integers([int(cell) for cell in cells])
        except ValueError:  # more digits than Python reads
            return cells
        return found if isinstance(found, np.ndarray) else cells
    if all(_DECIMAL.fullmatch(cell) for cell in cells):
        return np.array([float(cell) for cell in cells])
    return cells


def _integers(values: list[int]) -> Any:
    """An array of the first type that holds them all; the list if there is none."""
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(values, dtype)
        except OverflowError:
            continue
    return values


class COCO(Files):
    """Images with COCO's annotations, in the order of the images' numbers, as torchvision has them.

    Fields: `image`; `image_id`; and, as far as all annotations have them, for the k annotations of an
    image: `boxes` (float32, (k, 4), left, top, width, height), `labels` (int64, (k,), the numbers of
    categories as they are), `area` (float64), `iscrowd` (uint8), `ids` (int64), `keypoints` (float32,
    (k, points, 3)), `captions` (a list of texts), `segmentation` (a list of polygons or of run
    lengths, only if asked for).

    Args:
        images: the folder of the images.
        annotations: the JSON file.
        segmentation: keep the outlines, in memory, for the field `segmentation`.

    Attributes:
        categories: the names of the categories by their numbers.

    Raises:
        IoError: a file cannot be examined, with its path.
        CorruptionError: the annotations are not COCO's, with the place.
    """

    def __init__(
        self,
        images: PathLike,
        annotations: PathLike,
        *more: Never,
        segmentation: bool = False,
        **of_torch: Never,
    ) -> None:
        refuse_more(COCO, more, of_torch)
        text = _text(annotations)
        try:
            data = json.loads(text)
            listed = sorted(
                (
                    (_whole(i["id"]), _encodable(str(i["file_name"]), lambda: str(annotations)))
                    for i in data["images"]
                ),
                key=lambda i: i[0],
            )
            found = data.get("annotations", [])
            self.categories = {_whole(c["id"]): str(c["name"]) for c in data.get("categories", [])}
            of_image: dict[int, list[Any]] = defaultdict(list)
            for annotation in found:
                of_image[_whole(annotation["image_id"])].append(annotation)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptionError(
                f"{annotations} is not a file of COCO's annotations: {type(error).__name__} {error}"
            ) from None
        numbers = [number for number, _ in listed]
        if len(set(numbers)) < len(numbers):
            raise CorruptionError(f"{annotations} has two images of one number")
        if strange := of_image.keys() - set(numbers):
            raise CorruptionError(
                f"{annotations} has annotations of image {min(strange)}, and no such image"
            )
        columns: dict[str, Any] = {"image_id": np.array(numbers, np.int64)}
        schema: dict[str, Kind] = {}
        for field, (key, kind, take) in _COCO.items():
            if field == "segmentation":  # what was asked for is not left out
                there = segmentation and any(key in annotation for annotation in found)
            else:
                there = _of_all(annotations, found, key, field)
            if not there:
                continue
            columns[field] = [
                _taken(annotations, number, field, take, of_image[number]) for number in numbers
            ]
            schema[field] = kind
        if _of_all(annotations, found, "keypoints", "keypoints"):
            columns["keypoints"], schema["keypoints"] = _keypoints(
                annotations, [of_image[number] for number in numbers]
            )
        if "boxes" in schema:
            schema = {name: _beside_boxes(kind) for name, kind in schema.items()}
        super().__init__(
            {"image": [name for _, name in listed]}, columns, schema=schema, root=images
        )
        self._arguments = {
            "images": self.root,
            "annotations": str(Path(path_of(annotations)).absolute()),
            "segmentation": segmentation,
        }


def _whole(number: Any) -> int:
    if not isinstance(number, str) and int(number) != number:
        raise ValueError(f"{number!r} is no whole number")
    return int(number)


def _of_all(path: PathLike, annotations: list[Any], key: str, field: str) -> bool:
    """Whether a field can be made of a key that annotations may have. It would have no value for those
    that lack it, or have an empty list."""
    without = [a for a in annotations if a.get(key) in (None, [])]
    if without and len(without) < len(annotations):
        _log.warning(
            "%s: %d of %d annotations, the first of image %s, have no %s: field %s is left out",
            path,
            len(without),
            len(annotations),
            without[0]["image_id"],
            key,
            field,
        )
    return bool(annotations) and not without


Take = Callable[[list[Any]], Any]


def _taken(path: PathLike, image: int, field: str, take: Take, annotations: list[Any]) -> Any:
    try:
        return take(annotations)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptionError(
            f"{path}, annotations of image {image}: no {field} ({type(error).__name__}: {error})"
        ) from None


def _each(key: str, dtype: Any, width: tuple[int, ...] = ()) -> Take:
    """The values of a key, of all annotations of an image, shape (k, *width)."""

    def take(annotations: list[Any]) -> Any:
        values = exact([a[key] for a in annotations], dtype)
        return values.reshape(len(annotations), *width)

    return take


def _keypoints(path: PathLike, of_images: Sequence[list[Any]]) -> tuple[list[Any], Kind]:
    """The points of all annotations, shape (k, points, 3)."""
    try:
        points = {len(a["keypoints"]) for annotations in of_images for a in annotations}
        if len(points) != 1 or (wide := points.pop()) % 3:
            raise ValueError(f"lists of {sorted(points)} numbers")
        take = _each("keypoints", np.float32, (wide // 3, 3))
        return [take(annotations) for annotations in of_images], Keypoints(
            points=wide // 3, values=3, codec="raw"
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptionError(
            f"{path}: the annotations have no equal keypoints ({type(error).__name__}: {error})"
        ) from None


def _beside_boxes(kind: Kind) -> Kind:
    """The kind of a field that has one row, or one item, for each box."""
    if isinstance(kind, Array | Json | Keypoints):
        return dataclasses.replace(kind, rows_of="boxes")
    return kind


def _ragged(dtype: str) -> Array:
    return Array(dtype=dtype, shape=(None,), codec="raw")


_COCO: dict[str, tuple[str, Kind, Take]] = {
    "boxes": ("bbox", Boxes(format="xywh", codec="raw"), _each("bbox", np.float32, (4,))),
    "labels": ("category_id", _ragged("int64"), _each("category_id", np.int64)),
    "area": ("area", _ragged("float64"), _each("area", np.float64)),
    "iscrowd": ("iscrowd", _ragged("uint8"), _each("iscrowd", np.uint8)),
    "ids": ("id", _ragged("int64"), _each("id", np.int64)),
    "captions": ("caption", Json(), lambda annotations: [str(a["caption"]) for a in annotations]),
    "segmentation": (
        "segmentation",
        Json(),
        lambda annotations: [a["segmentation"] for a in annotations],
    ),
}

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)


class VOC(Files):
    """A year of Pascal VOC, in the order of its list of images.

    Fields of the task "detection": `image`; `boxes` (float32, (k, 4), left, top, right, bottom, as they
    are in the file); `labels` (int64, (k,), places in `classes`); `difficult` and `truncated` (uint8,
    (k,)). Of "segmentation": `image` and `mask` (the classes; 0 is the background, 255 the border).

    Args:
        root: the folder of the year, ``VOCdevkit/VOC2012``.
        split: the list of images: "train", "val", "trainval", "test".
        task: "detection" or "segmentation".
        classes: their names, in the order of their labels.

    Raises:
        IoError: a file cannot be read, with its path.
        CorruptionError: an annotation is not one, or names another class.
    """

    def __init__(
        self,
        root: PathLike,
        split: str = "train",
        *more: Never,
        task: Literal["detection", "segmentation"] = "detection",
        classes: Sequence[str] = VOC_CLASSES,
        **of_torch: Never,
    ) -> None:
        refuse_more(VOC, more, of_torch)
        if task not in ("detection", "segmentation"):
            raise UsageError(f'task must be "detection" or "segmentation", not {task!r}')
        folder = Path(path_of(root, "root")).absolute()
        self.classes = list(classes)
        detection = task == "detection"
        listing = folder / "ImageSets" / ("Main" if detection else "Segmentation") / f"{split}.txt"
        names = [line.split()[0] for line in _text(listing).splitlines() if line.strip()]
        if not names:
            raise UsageError(f"{listing} names no image")
        files = {"image": [f"JPEGImages/{name}.jpg" for name in names]}
        columns: dict[str, Any] = {}
        schema: dict[str, Kind] = {}
        if detection:
            of_class = {name: i for i, name in enumerate(self.classes)}
            with ThreadPoolExecutor(_THREADS) as threads:
                objects = list(
                    threads.map(
                        lambda name: _objects(folder / "Annotations" / f"{name}.xml", of_class),
                        names,
                    )
                )
            for place, (field, kind) in enumerate(_VOC.items()):
                columns[field] = [found[place] for found in objects]
                schema[field] = _beside_boxes(kind)
        else:
            files["mask"] = [f"SegmentationClass/{name}.png" for name in names]
            schema["mask"] = Mask()
        super().__init__(files, columns, schema=schema, root=folder)
        self.names = names
        self._arguments = {
            "root": str(folder),
            "split": split,
            "task": task,
            "classes": tuple(classes),
        }


_VOC: dict[str, Kind] = {
    "boxes": Boxes(codec="raw"),
    "labels": _ragged("int64"),
    "difficult": _ragged("uint8"),
    "truncated": _ragged("uint8"),
}


def _objects(path: Path, of_class: Mapping[str, int]) -> tuple[Any, ...]:
    """The values of `_VOC` in one file."""
    try:
        found = ElementTree.fromstring(_text(path)).findall("object")
        names = [str(o.findtext("name")) for o in found]
        if strange := set(names) - of_class.keys():
            raise CorruptionError(f"{path} names the class {min(strange)!r}: give classes=")
        sides = ("xmin", "ymin", "xmax", "ymax")
        boxes = [[float(o.findtext(f"bndbox/{side}") or "") for side in sides] for o in found]
        flags = [
            np.array([int(o.findtext(flag) or 0) for o in found], np.uint8)
            for flag in ("difficult", "truncated")
        ]
    except (ElementTree.ParseError, ValueError, OverflowError) as error:
        raise CorruptionError(f"{path} is no annotation of Pascal VOC: {error}") from None
    labels = np.array([of_class[name] for name in names], np.int64)
    return np.array(boxes, np.float32).reshape(-1, 4), labels, *flags
