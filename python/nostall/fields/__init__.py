"""What the fields of a sample are, and what a batch has of each.

A sample is a record of named fields; `Schema` says of which kind each is. Dense fields become one
array, fields whose sizes differ `Ragged` or `Padded` ones, texts lists. docs/guide/fields.md has the
model.
"""

from typing import TYPE_CHECKING

from nostall.base._lazy import lazy
from nostall.fields._batch import Padded, Ragged
from nostall.fields._kinds import (
    Array,
    Audio,
    Boxes,
    Bytes,
    Custom,
    Image,
    Json,
    Keypoints,
    Kind,
    Mask,
    Scalar,
    Sound,
    Text,
)
from nostall.fields._schema import Schema

if TYPE_CHECKING:
    from nostall.fields._sound import SoundFile
    from nostall.fields._video import Video

__all__ = [
    "Array",
    "Audio",
    "Boxes",
    "Bytes",
    "Custom",
    "Image",
    "Json",
    "Keypoints",
    "Kind",
    "Mask",
    "Padded",
    "Ragged",
    "Scalar",
    "Schema",
    "Sound",
    "SoundFile",
    "Text",
    "Video",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, {"._sound": "SoundFile", "._video": "Video"})
