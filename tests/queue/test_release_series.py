"""Every series fits every content that its files have had in its range, and is made of patches that git am takes."""

import subprocess
from pathlib import Path

import pytest

from overlay.deliver.wheel import Wheel
from overlay.queue import images, lock, series, source
from tests.variants import ROOT

LOCK = lock.read(ROOT / "upstream.lock")
PINNED = [
    pytest.param(name, package, release, id=f"{name}-{release.version}")
    for name, package in LOCK.packages.items()
    for release in package.releases
    if release.series is not None
]


@pytest.mark.parametrize(("name", "package", "release"), PINNED)
def test_fits(name: str, package: lock.Package, release: lock.Release, tmp_path: Path) -> None:
    upstream = Wheel.read(source.read(name, release.wheel), release.wheel.file)
    assert release.series is not None
    queue = series.read(ROOT / "patches" / release.series)
    made = images.make(queue, package.prefix, lambda path: upstream.member(path).content())
    images.check(
        made, [file for file in release.files if file.path != package.version_file], f"{name} {release.version}"
    )
    for image in made:
        compile(image.after, image.path, "exec")

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init", "--quiet")
    for image in made:
        file = tmp_path / package.prefix / image.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image.before)
    git("add", ".")
    git("commit", "--quiet", "--message", "upstream")
    git("am", "--quiet", *(str(patch.file) for patch in queue.for_delivery("wheel")))
    assert git("log", "--format=%s").splitlines()[-2::-1] == [patch.subject for patch in queue.for_delivery("wheel")]
    for image in made:
        assert (tmp_path / package.prefix / image.path).read_bytes() == image.after


def test_every_series_has_a_release() -> None:
    used = {release.series for package in LOCK.packages.values() for release in package.releases}
    assert {folder.name for folder in (ROOT / "patches").iterdir()} == used - {None}


def test_the_notice_is_in_every_file_that_a_wheel_changes_and_in_no_pull_request() -> None:
    for folder in (ROOT / "patches").iterdir():
        queue = series.read(folder)
        notices = [patch for patch in queue.patches if "4(b)" in patch.reason]
        assert {path for patch in notices for path in patch.paths} == set(queue.paths("wheel"))
        assert all("pull-request" not in patch.delivery for patch in notices)
