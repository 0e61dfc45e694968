"""Small data for the other examples: images, masks, COCO's annotations, captions, sounds, videos, rows.

python examples/make-data.py /tmp/data
"""

import csv
import json
import sys
import wave
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

SAMPLES, RATE = 14, 8000
COLOURS = ["red", "green", "blue"]


def make_picture(root, i, rng):
    """A JPEG image of some rectangles, and their masks; its entry and its annotations in COCO."""
    width, height = int(rng.integers(40, 60)), int(rng.integers(36, 50))
    image = Image.new("RGB", (width, height), (200, 190, 180))
    mask = Image.new("L", image.size)
    found = []
    for number in range(i % 3):
        kind = int(rng.integers(len(COLOURS)))
        x, y = int(rng.integers(0, width - 12)), int(rng.integers(0, height - 12))
        w, h = (int(n) for n in rng.integers(4, 12, 2))
        corners = [x, y, x + w - 1, y + h - 1]
        ImageDraw.Draw(image).rectangle(corners, fill=COLOURS[kind])
        ImageDraw.Draw(mask).rectangle(corners, fill=kind + 1)
        box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0, "category_id": kind + 1}
        found.append({"id": 10 * i + number, "image_id": i, **box})
    name = f"{i:03}.jpg"
    image.save(root / "images" / name, quality=90)
    mask.save(root / "masks" / f"{i:03}.png")
    return {"id": i, "file_name": name, "width": width, "height": height}, found


def make_sound(path, tone, frames):
    values = 8000 * np.sin(2 * np.pi * 200 * (tone + 1) * np.arange(frames) / RATE)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, frames, "NONE", "not compressed"))
        file.writeframes(values.astype("<i2").tobytes())


def make_video(path, kind, frames):
    """A square of one colour that moves to the right."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(frames):
            picture = Image.new("RGB", (64, 48), (200, 190, 180))
            ImageDraw.Draw(picture).rectangle([i, 12, i + 20, 32], fill=COLOURS[kind])
            file.mux(stream.encode(av.VideoFrame.from_image(picture)))
        file.mux(stream.encode(None))


def write_table(path, names, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def main(root):
    for folder in ("images", "masks", "sounds", "videos"):
        (root / folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, annotations, captions, sounds, videos, houses = [], [], [], [], [], []
    for i in range(SAMPLES):
        image, found = make_picture(root, i, rng)
        images.append(image)
        annotations += found
        words = [COLOURS[one["category_id"] - 1] for one in found]
        captions.append([f"images/{image['file_name']}", f"a picture, {' and '.join(words)}"])
        make_sound(root / "sounds" / f"{i:03}.wav", i % 3, int(rng.integers(3000, 5000)))
        sounds.append([f"sounds/{i:03}.wav", i % 3])
        make_video(root / "videos" / f"{i:03}.mp4", i % 3, int(rng.integers(20, 30)))
        videos.append([f"videos/{i:03}.mp4", i % 3])
        rooms, age = int(rng.integers(1, 7)), int(rng.integers(0, 90))
        houses.append([rooms, 22.5 * rooms, age, 1.5 * rooms - age / 64])
    kinds = [{"id": n + 1, "name": colour} for n, colour in enumerate(COLOURS)]
    described = {"images": images, "annotations": annotations, "categories": kinds}
    (root / "instances.json").write_text(json.dumps(described))
    write_table(root / "captions.csv", ["path", "caption"], captions)
    write_table(root / "sounds.csv", ["path", "label"], sounds)
    write_table(root / "videos.csv", ["path", "label"], videos)
    write_table(root / "houses.csv", ["rooms", "area", "age", "price"], houses)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
