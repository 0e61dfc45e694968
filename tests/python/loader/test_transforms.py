"""The native pipeline against Pillow and torchvision, on real encoded images."""

from __future__ import annotations

import io
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

import nostall
from nostall import _native, errors
from nostall import transforms as t


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colour, edges and some noise: what photographs are made of."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    base = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.normal(0, 6, base.shape)
    out = np.clip(base + noise, 0, 255).astype(np.uint8)
    out[height // 3 : height // 2, width // 4 : width // 2] = (250, 30, 20)
    return Image.fromarray(out)


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pillow(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("size", [(450, 375), (17, 3), (1, 1), (333, 500), (64, 64)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_full_decode_of_jpeg_is_pillows(size: tuple[int, int], subsampling: int) -> None:
    data = encode(photo(*size), quality=90, subsampling=subsampling)
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "RGB"])
def test_full_decode_of_png_is_pillows(mode: str) -> None:
    data = encode(photo(53, 31).convert(mode), "PNG")
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_other_jpegs_decode_as_pillow_does(mode: str, progressive: bool) -> None:
    data = encode(photo(70, 51).convert(mode), quality=90, progressive=progressive)
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


def test_jpegs_with_odd_headers_are_whole() -> None:
    """As cameras and converters write them: what is odd changes no pixel."""
    data = encode(photo(70, 51), quality=90)
    scan = data.index(b"\xff\xda")
    bounds = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big") - 3
    assert data[bounds : bounds + 3] == bytes([0, 63, 0])
    version = data.index(b"JFIF\0") + 5
    for odd in (
        data[:bounds] + bytes(3) + data[bounds + 3 :],
        data[:version] + b"\2\1" + data[version + 2 :],
    ):
        assert odd != data
        np.testing.assert_array_equal(_native.decode_rgb(odd), np.asarray(pillow(data)))


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}])
def test_webp_decodes_as_pillow_does(options: dict[str, Any]) -> None:
    data = encode(photo(91, 47), "WEBP", **options)
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA"])
@pytest.mark.parametrize("size", [(53, 31), (1, 1), (8, 3)])
@pytest.mark.parametrize("format", ["BMP", "PPM", "TIFF"])
def test_uncompressed_images_decode_as_pillow_does(
    format: str, size: tuple[int, int], mode: str
) -> None:
    image = photo(*size).convert("L" if (format, mode) == ("PPM", "P") else mode)
    data = encode(image, format)
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize(
    "compression", ["tiff_lzw", "tiff_deflate", "packbits", "tiff_adobe_deflate"]
)
def test_compressed_tiffs_decode_as_pillow_does(compression: str) -> None:
    data = encode(photo(70, 51), "TIFF", compression=compression)
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiffs_are_turned_as_pillow_does(orientation: int) -> None:
    data = encode(photo(13, 6), "TIFF", tiffinfo={274: orientation})
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


@pytest.mark.parametrize(
    "data",
    [
        b"P2\n# two rows\n3 2 9\n0 1 2 # of three\n7 8 9\n",
        b"P3 2 1 255 0 1 2 253 254 255",
        b"P1\n4 2\n0110\n1 0 0 1\n",
        b"P6\n2 1\n1000\n" + bytes(np.array([0, 1, 499, 500, 999, 1000], ">u2").tobytes()),
        b"P5 4 1 3\n" + bytes([0, 1, 2, 3]),
    ],
)
def test_portable_maps_decode_as_pillow_does(data: bytes) -> None:
    np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))


def bmp(bits: int, rows: bytes, *, height: int = 1, masks: tuple[int, ...] = ()) -> bytes:
    """Two pixels wide; what Pillow cannot write."""
    table = b"".join(m.to_bytes(4, "little") for m in masks)
    info = struct.pack("<IiiHHIIiiII", 40, 2, height, 1, bits, 3 if masks else 0, 0, 0, 0, 0, 0)
    start = 14 + len(info) + len(table)
    return struct.pack("<2sIHHI", b"BM", start + len(rows), 0, 0, start) + info + table + rows


def test_other_bmps_decode_as_pillow_does() -> None:
    short, wide = struct.pack("<2H", 0x7FE0, 0x1234), struct.pack("<2I", 0x80FF40, 0x010203)
    for data in (
        bmp(16, short),
        bmp(16, short, masks=(0xF800, 0x7E0, 0x1F)),
        bmp(32, wide),
        bmp(32, wide, masks=(0xFF0000, 0xFF00, 0xFF)),
        bmp(24, bytes(range(1, 9)) + bytes(range(11, 19)), height=-2),
    ):
        np.testing.assert_array_equal(_native.decode_rgb(data), np.asarray(pillow(data)))
    # In an order that Pillow does not read.
    reversed_masks = _native.decode_rgb(bmp(32, wide, masks=(0xFF, 0xFF00, 0xFF0000)))
    np.testing.assert_array_equal(reversed_masks, [[[0x40, 0xFF, 0x80], [3, 2, 1]]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encode(photo(20, 20), "BMP")[:-1], "BMP: the file has 1253 of its 1254 bytes"),
        (encode(photo(9, 9).convert("P"), "BMP")[:70], "the palette is cut off"),
        (bmp(24, bytes(8))[:30] + b"\x01" + bmp(24, bytes(8))[31:], "compression 1"),
        (bmp(8, bytes(8))[:30] + b"\x03" + bmp(8, bytes(8))[31:], "compression 3"),
        (bmp(7, bytes(8)), "pixels of 7 bits"),
        (bmp(24, b"", height=2**31 - 1), "raise max_pixels"),
        (encode(photo(20, 20), "PPM")[:-1], "PNM: the file has"),
        (b"P5 2 2 65535\n" + bytes(8), "16-bit grey"),
        (b"P6 2 x 255\n" + bytes(12), "header is damaged"),
        (b"P3 2 1 255 0 1 2 253 254", "truncated|is missing"),
        (b"P2 2 2 10 1 2 3 11", "value 3 is 11, above the greatest, 10"),
        (b"P6 100000 100000 255\n", "raise max_pixels"),
        (encode(photo(20, 20), "TIFF")[:-200], "TIFF: "),
        (encode(Image.fromarray(np.zeros((4, 4), np.uint16)), "TIFF"), "16 bits a value"),
        (b"II*\0" + bytes(8), "TIFF: "),
        (b"GIF89a", "not a JPEG, PNG, WebP, BMP, PNM or TIFF image"),
    ],
)
def test_damaged_and_unknown_images_are_named(data: bytes, message: str) -> None:
    with pytest.raises(errors.CorruptionError, match=message):
        _native.decode_rgb(data)


def without_segments(jpeg: bytes, marker: int) -> bytes:
    """The JPEG without the segments of `marker` before its first scan."""
    kept, at = jpeg[:2], 2
    while jpeg[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] != marker:
            kept += jpeg[at:end]
        at = end
    return kept + jpeg[at:]


def test_an_image_is_not_read_with_the_tables_of_the_one_before() -> None:
    dqt, dht = 0xDB, 0xC4
    plain = encode(photo(64, 48), quality=30)
    standard = _native.decode_rgb(plain)
    optimised = encode(photo(64, 48, seed=1), quality=30, optimize=True)
    for _ in range(3):
        _native.decode_rgb(optimised)
        with pytest.raises(errors.CorruptionError, match="Quantization table"):
            _native.decode_rgb(without_segments(plain, dqt))
        _native.decode_rgb(optimised)
        # libjpeg-turbo takes the standard's tables in their place, as frames of Motion JPEG need.
        decoded = _native.decode_rgb(without_segments(plain, dht))
        np.testing.assert_array_equal(decoded, standard)


@pytest.mark.parametrize("source", [(450, 375), (100, 80), (31, 300), (224, 224), (301, 224)])
@pytest.mark.parametrize("target", [(224, 224), (64, 96), (7, 5), (300, 200)])
def test_resize_agrees_with_pillow(source: tuple[int, int], target: tuple[int, int]) -> None:
    data = encode(photo(*source), "PNG")
    got = t.compile([t.Resize(target)]).apply(data)
    expected = pillow(data).resize(target[::-1], Image.Resampling.BILINEAR)
    error = np.abs(got.astype(int) - np.asarray(expected).astype(int))
    assert error.max() <= 1
    assert error.mean() < 0.25  # exact halves may round the other way


@pytest.mark.parametrize(("interpolation", "most"), [("bilinear", 1), ("bicubic", 2)])
@pytest.mark.parametrize("target", [(20, 90), (20, 140), (110, 30), (60, 60), (150, 200)])
def test_resizes_of_sharp_edges_agree_with_tensors_and_pillow(
    interpolation: Literal["bilinear", "bicubic"], most: int, target: tuple[int, int]
) -> None:
    import torch
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    pixels = np.random.default_rng(3).integers(0, 2, (120, 90, 3), dtype=np.uint8) * 255
    tensor, data = torch.from_numpy(pixels).permute(2, 0, 1), encode(Image.fromarray(pixels), "PNG")
    by_rows, curve = pillow(data), Image.Resampling[interpolation.upper()]
    for size in ((target[1], 120), target[::-1]):  # rows first, in every version of Pillow
        by_rows = by_rows.resize(size, curve)
    for antialias in (True, False):
        got = t.compile([t.Resize(target, interpolation, antialias)]).apply(data)
        mode = InterpolationMode(interpolation)
        expected = F.resize(tensor, list(target), mode, antialias=antialias).permute(1, 2, 0)
        assert np.abs(got.astype(int) - expected.numpy().astype(int)).max() <= most
        if antialias:
            assert np.abs(got.astype(int) - np.asarray(by_rows).astype(int)).max() <= most


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_region_of_a_jpeg_is_the_same_as_of_the_full_decode(
    subsampling: int, progressive: bool
) -> None:
    image = photo(211, 157)
    data = encode(image, quality=92, subsampling=subsampling, progressive=progressive)
    full = encode(pillow(data), "PNG")
    steps = [t.RandomResizedCrop((56, 48), scale=(0.02, 1.0)), t.RandomHorizontalFlip()]
    pipeline = t.compile(steps)
    for sample in range(60):
        np.testing.assert_array_equal(
            pipeline.apply(data, sample=sample), pipeline.apply(full, sample=sample)
        )


@pytest.mark.parametrize("subsampling", [0, 2])
def test_dct_scaling_does_not_harm(subsampling: int) -> None:
    data = encode(photo(1600, 1200), quality=92, subsampling=subsampling)
    for target in (64, 100, 224, 290):
        got = t.compile([t.Resize((target, target))]).apply(data)
        expected = pillow(data).resize((target, target), Image.Resampling.BILINEAR)
        error = np.abs(got.astype(int) - np.asarray(expected).astype(int))
        assert error.mean() <= 2


@pytest.mark.parametrize("source", [(450, 375), (90, 301), (40, 30), (256, 256)])
def test_validation_transform_is_torchvisions(source: tuple[int, int]) -> None:
    from torchvision import transforms as tv

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = encode(photo(*source), "PNG")
    got = t.compile([t.Resize(64), t.CenterCrop(56), t.ToTensor(), t.Normalize(mean, std)])
    chain = tv.Compose(
        [tv.Resize(64), tv.CenterCrop(56), tv.ToTensor(), tv.Normalize(list(mean), list(std))]
    )
    error = np.abs(got.apply(data) - chain(pillow(data)).numpy()) * 255 * 0.225
    assert error.max() < 1.1
    assert error.mean() < 0.25


@pytest.mark.parametrize("source", [(30, 20), (31, 81), (80, 81)])
def test_centre_crop_pads_as_torchvision_does(source: tuple[int, int]) -> None:
    from torchvision import transforms as tv

    data = encode(photo(*source), "PNG")
    got = t.compile([t.CenterCrop((40, 50))]).apply(data)
    np.testing.assert_array_equal(got, np.asarray(tv.CenterCrop((40, 50))(pillow(data))))


def test_two_resizes_agree_with_torchvision() -> None:
    from torchvision import transforms as tv

    data = encode(photo(120, 77), "PNG")
    got = t.compile([t.Resize(50), t.CenterCrop((70, 60)), t.Resize((33, 44))]).apply(data)
    chain = tv.Compose([tv.Resize(50), tv.CenterCrop((70, 60)), tv.Resize((33, 44))])
    error = np.abs(got.astype(int) - np.asarray(chain(pillow(data))).astype(int))
    assert error.max() <= 2
    assert error.mean() < 0.25


def test_flips_and_crops_keep_their_order() -> None:
    data = encode(photo(31, 20), "PNG")
    array = np.asarray(pillow(data))
    got = t.compile([t.RandomHorizontalFlip(1), t.RandomVerticalFlip(1), t.CenterCrop((11, 8))])
    expected = Image.fromarray(np.ascontiguousarray(array[::-1, ::-1]))
    from torchvision import transforms as tv

    np.testing.assert_array_equal(got.apply(data), np.asarray(tv.CenterCrop((11, 8))(expected)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_types_and_layouts_hold_the_same_values(dtype: str, layout: str) -> None:
    data = encode(photo(60, 50), "PNG")
    steps = [t.Resize((21, 19)), t.ToTensor(), t.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.1))]
    reference = t.compile(steps).apply(data)
    got = t.compile(steps, dtype=dtype, layout=layout).apply(data)
    assert got.dtype == np.dtype(dtype)
    channels_first = got if layout == "chw" else got.transpose(2, 0, 1)
    np.testing.assert_array_equal(channels_first, reference.astype(dtype))


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    data = encode(photo(100, 90), quality=90)
    pipeline = t.compile([t.RandomResizedCrop(32), t.RandomHorizontalFlip()])
    keys = [(seed, epoch, sample) for seed in (0, 1) for epoch in (0, 1) for sample in range(8)]

    def one(key: tuple[int, int, int]) -> bytes:
        return pipeline.apply(data, seed=key[0], epoch=key[1], sample=key[2]).tobytes()

    alone = [one(key) for key in keys]
    assert len(set(alone)) == len(keys)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, keys * 5)) == alone * 5


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_truncation_is_an_error_for_every_crop(format: str) -> None:
    data = encode(photo(120, 100), format)
    pipeline = t.compile([t.RandomResizedCrop(16, scale=(0.01, 0.05))])
    for keep in (0, 1, 3, 11, 30, len(data) // 2, len(data) * 9 // 10):
        for sample in range(5):
            with pytest.raises(errors.CorruptionError):
                pipeline.apply(data[:keep], sample=sample)


def test_huge_headers_are_refused_before_anything_is_allocated() -> None:
    png = bytearray(encode(photo(8, 8), "PNG"))
    jpeg = bytearray(encode(photo(8, 8)))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"
    png[16:24] = b"\x7f\xff\xff\xff" * 2
    for data in (bytes(png), bytes(jpeg)):
        with pytest.raises(errors.CorruptionError):
            _native.decode_rgb(data)
    with pytest.raises(errors.CorruptionError, match="raise max_pixels"):
        _native.decode_rgb(encode(photo(20, 20), "WEBP"), max_pixels=399)


def test_random_boxes_have_torchvisions_distribution() -> None:
    # An image whose colours are its coordinates tells the box it was cut from.
    from torchvision import transforms as tv

    width, height = 250, 200
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    data = encode(Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8)), "PNG")
    pipeline = t.compile([t.RandomResizedCrop(64)])
    native, reference = [], []
    image = pillow(data)
    for sample in range(1500):
        out = pipeline.apply(data, sample=sample).astype(float)
        w = (out[32, 48, 0] - out[32, 16, 0]) * 2
        h = (out[48, 32, 1] - out[16, 32, 1]) * 2
        native.append((w, h, out[32, 32, 0], out[32, 32, 1]))
        top, left, rh, rw = tv.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        reference.append((rw, rh, left + rw / 2, top + rh / 2))
    a, b = np.array(native), np.array(reference)
    for column in range(4):
        for quantile in (10, 25, 50, 75, 90):
            difference = np.percentile(a[:, column], quantile) - np.percentile(
                b[:, column], quantile
            )
            assert abs(difference) < 12, (column, quantile)


@pytest.mark.parametrize(
    "make",
    [
        lambda: t.Resize(0),
        lambda: t.CenterCrop((5, -1)),
        lambda: t.RandomResizedCrop(8, scale=(0.5, 0.1)),
        lambda: t.RandomHorizontalFlip(1.5),
        lambda: t.Normalize((0, 0, 0), (1, 0, 1)),
        lambda: t.Normalize(0.5, 0.0),
        lambda: t.Normalize(float("nan"), 1.0),
        lambda: t.Normalize(None, 1.0),
        lambda: t.Normalize("half", 1.0),
        lambda: t.Normalize("123", 1.0),
        lambda: t.Normalize(10**400, 1.0),
        lambda: t.compile([t.Resize(8)]),
        lambda: t.compile([t.Resize((8, 8)), t.Normalize((0, 0, 0), (1, 1, 1))]),
        lambda: t.compile([t.Resize((8, 8)), t.ToTensor()], dtype="uint8"),
        lambda: t.compile([t.Resize((8, 8))], layout="nhwc"),
    ],
)
def test_wrong_parameters_are_usage_errors(make: Any) -> None:
    with pytest.raises(errors.UsageError):
        make()


@pytest.mark.parametrize("one", [0.5, np.float32(0.5), np.array(0.5)])
def test_a_number_normalizes_all_channels(one: Any) -> None:
    assert t.Normalize(one, one) == t.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pytest.raises(errors.UsageError, match=r"mean \(0\.5,\) must be three .* or one for all"):
        t.Normalize((0.5,), one)


def test_memory_for_large_images_is_counted_and_given_back(tmp_path: Path) -> None:
    side, folder = 5000, tmp_path / "class0"
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (side, side), (i, 0, 0)).save(folder / f"{i}.png", compress_level=1)

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    with nostall.DataLoader(
        nostall.ImageFolder(tmp_path, index=False), 1, transforms=[t.Resize((8, 8))],
        output="numpy", threads=2, tiers=[], epochs=1,
    ) as loader:  # fmt: skip
        before = resident()
        assert len(list(loader)) == 2
        assert loader.stats().memory["decoding"] >= 4 * side**2
        # Threads without work give it back after a second.
        deadline = time.monotonic() + 60
        while resident() - before >= side**2:
            assert time.monotonic() < deadline, "a quarter of what one image takes is still held"
            time.sleep(0.01)
