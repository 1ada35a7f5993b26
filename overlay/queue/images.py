"""Pre-images and post-images: the files that a series touches, before and after it, each checked against its blob id
in the lock.

A post-image is made once, here; the wheel, the overlay and the pull request use the same bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from overlay.errors import OverlayError
from overlay.queue import git
from overlay.queue.lock import Exchanged
from overlay.queue.series import Delivery, Series, apply


@dataclass(frozen=True)
class Image:
    """One file, by its path in the wheel: its content before and after."""

    path: str
    before: bytes
    after: bytes

    @property
    def exchanged(self) -> Exchanged:
        """The blob ids, as the lock names them."""
        return Exchanged(path=self.path, before=git.blob_id(self.before), after=git.blob_id(self.after))


def make(series: Series, prefix: str, read: Callable[[str], bytes], delivery: Delivery = "wheel") -> list[Image]:
    """The images of every file that the series touches for a delivery.

    Args:
        series: the patches.
        prefix: what a path in the wheel has before it in upstream's git tree.
        read: the content of a file by its path in the wheel.
        delivery: which patches are taken.

    Raises:
        OverlayError: a path is outside of the prefix, a patch creates a file, or one does not fit.
    """
    pre_images: dict[str, bytes] = {}
    for patch in series.for_delivery(delivery):
        for path in patch.paths:
            if not path.startswith(prefix) or path in patch.created:
                raise OverlayError(
                    f"{patch.file}: expected a change of a file under {prefix or 'the package'!r} that is there, "
                    f"found {path}: only a patch with Delivery: pull-request may touch others"
                )
            pre_images[path] = read(path.removeprefix(prefix))
    post_images = apply(series.for_delivery(delivery), pre_images)
    return [Image(path.removeprefix(prefix), content, post_images[path]) for path, content in pre_images.items()]


def fits(
    queues: Sequence[Series], prefix: str, read: Callable[[str], bytes], delivery: Delivery = "wheel"
) -> tuple[list[tuple[Series, list[Image]]], dict[str, str]]:
    """Tries each series: those that fit, with their images, and why each other does not, by its name.

    Args:
        queues: the series.
        prefix, read, delivery: as for `make`.
    """
    found: list[tuple[Series, list[Image]]] = []
    reasons: dict[str, str] = {}
    for queue in queues:
        try:
            found.append((queue, make(queue, prefix, read, delivery)))
        except OverlayError as error:
            reasons[queue.name] = str(error).removeprefix(f"{queue.folder}/").partition(": expected")[0]
    return found, reasons


def check(images: Sequence[Image], expected: Sequence[Exchanged], where: str) -> None:
    """Compares images with what the lock names for them.

    Args:
        images: every file that is exchanged.
        expected: the lock's entries.
        where: the release, for messages.

    Raises:
        OverlayError: a blob id differs, or the two do not name the same files.
    """
    named: Mapping[str, Exchanged] = {file.path: file for file in expected}
    for image in images:
        found = image.exchanged
        pinned = named.get(image.path)
        if pinned is None:
            raise OverlayError(f"{where}: {image.path} is exchanged, but not in the lock: run overlay lock update")
        for side in ("before", "after"):
            if getattr(found, side) != getattr(pinned, side):
                cause = (
                    "this is not the release that the lock names"
                    if side == "before"
                    else "the series has changed since the lock was written: run overlay lock update"
                )
                raise OverlayError(
                    f"{where}: {image.path}: expected the blob {getattr(pinned, side)} {side} the series, found "
                    f"{getattr(found, side)}: {cause}"
                )
    for path in named.keys() - {image.path for image in images}:
        raise OverlayError(f"{where}: the lock names {path}, which no patch changes: run overlay lock update")
