"""The packages that are committed are what this version would write."""

from pathlib import Path

import pytest

from dayzero.onboard.package import check_package

PACKAGES = sorted(file.parent for file in (Path(__file__).parents[1] / "generated").glob("*/onboard.lock"))


def test_there_is_an_example():
    assert [package.name for package in PACKAGES] == ["smollm2_moe"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_regeneration_gives_the_same_bytes(package):
    assert check_package(package) == []
