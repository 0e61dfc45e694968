"""The conda recipe builds this version with all that its build asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import nostall

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())
# By what the build asks pkg-config and CMake for: the package of conda-forge. libspng is built from
# its source.
PACKAGES = {
    "libjpeg": "libjpeg-turbo",
    "libdeflate": "libdeflate",
    "libwebp": "libwebp-base",
    "libtiff-4": "libtiff",
    "libsodium": "libsodium",
    "liburing": "liburing",
    "ZLIB": "zlib",
    "ucx": "ucx",
}


def names(requirements: list[str]) -> dict[str, str]:
    """By its name: the versions that are asked for."""
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in requirements}


def test_the_recipe_builds_the_source_distribution_of_this_version() -> None:
    assert RECIPE["context"]["version"] == nostall.__version__
    assert RECIPE["source"][0]["path"] == "../../dist/nostall-${{ version }}.tar.gz"


def test_the_recipe_asks_for_what_pyproject_asks_for() -> None:
    host, run = (names(RECIPE["requirements"][part]) for part in ("host", "run"))
    for line in PROJECT["build-system"]["requires"]:
        name, version = re.fullmatch(r"([\w-]+)(.*)", line).groups()  # type: ignore[union-attr]
        assert host[name] == version.replace("==", "")
    for line in PROJECT["project"]["dependencies"]:
        name, version = re.fullmatch(r"([\w-]+)(.*)", line).groups()  # type: ignore[union-attr]
        assert run[name] == version


def test_the_recipe_has_every_library_that_the_build_looks_for() -> None:
    asked = set()
    for room in (ROOT / "native").glob("*/CMakeLists.txt"):
        for line in re.findall(r"pkg_check_modules\((.*)\)", room.read_text()):
            asked.add(re.split("[>=]", line.split()[-1])[0])
        asked |= set(re.findall(r"find_package\((ZLIB|ucx)", room.read_text()))
    assert asked - {"spng"} == set(PACKAGES)
    host = names(RECIPE["requirements"]["host"])
    assert set(PACKAGES.values()) <= set(host)
    # The version of libspng of a wheel, and the digest of its source.
    spng = RECIPE["source"][1]["url"]
    assert (
        re.search(r'"libspng",\s+"([\d.]+)-', (ROOT / "scripts" / "wheel").read_text())[1] in spng
    )  # type: ignore[index]
