"""What the fields of a sample are, and what a batch has of each.

A sample is a record of named fields; `Schema` says of which kind each is. Dense fields become one
array, fields whose sizes differ `Ragged` or `Padded` ones, texts lists. docs/guide/fields.md has the
model.
"""

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
