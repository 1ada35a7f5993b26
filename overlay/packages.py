"""`overlay.status()`: which of the packages that matter are installed, which fault each has, and what mends it.

Nothing is imported for it: what is imported already counts as it was loaded, the rest by the files that would be.
Standard library only.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from overlay import installed, manifest, mends, versions
from overlay.errors import OverlayError
from overlay.manifest import Fault, File, Manifest, Release
from overlay.mends import Overlay

State = Literal[
    "not installed",
    "stock",
    "patched wheel",
    "overlaid",
    "partly patched",
    "fixed upstream",
    "off",
    "unknown",
    "beside",
]
"""What a package is in this process.

- `stock`: the content of a release that has a fault, and the overlay does not mend it.
- `patched wheel`: it was installed from a wheel of this project.
- `overlaid`: stock on the disk, and loaded with the fix.
- `partly patched`: one file has the fix, another has not.
- `fixed upstream`: a release that needs no fix.
- `off`: it would be overlaid, but for `MODELING_OVERLAY=0`.
- `unknown`: content that no known release has.
- `beside`: none that is patched, but one that matters for the faults (torch, DeepSpeed, PEFT, accelerate).
"""

FileState = Literal[
    "stock", "patched wheel", "overlaid", "fixed upstream", "off", "unknown", "replaced since", "missing"
]
"""As `State`; `replaced since`: this process loaded it before it was exchanged on the disk; `missing`: not there."""

BESIDE = ("torch", "deepspeed", "peft", "accelerate")

GUARD = "transformers/modeling_utils.py"
"""Where the guard for PEFT under ZeRO-3 is, in releases that have it patched."""

DEEPSPEED_FAULT = Fault(
    "peft-zero3",
    "PEFT with ZeRO-3 and non-reentrant checkpointing: backward raises CheckpointError (mended in DeepSpeed 0.19.3)",
)
DEEPSPEED_RIGHT = "0.19.3"

FIRST_KNOWN = {"transformers": "4.53", "transformer_engine": "2.10"}
"""The first release that is known to have a fault that this project mends; what was before was not looked at."""


@dataclass(frozen=True)
class FileStatus:
    """A covered file: its path in the wheel, the git blob id of what is installed (None where nothing can be read),
    and its state."""

    path: str
    blob: str | None
    state: FileState


@dataclass(frozen=True)
class PackageStatus:
    """A package as it is in this process.

    Attributes:
        project: what it is imported by.
        version: that of its metadata; None where it has none, or is not installed.
        location: its folder, or its path in an archive; None where it is not installed.
        state: see `State`.
        files: those that the overlay covers.
        faults: those that are live here. Where the content is unknown they are what the nearest covered release has,
            and the text says so.
        mend: a shell command, a line of Python to put first in the program, or `start this process again`; None where
            nothing is to be mended, or no one command does it (a note says what does).
        notes: what else is worth to know.
    """

    project: str
    version: str | None
    location: str | None
    state: State
    files: tuple[FileStatus, ...] = ()
    faults: tuple[Fault, ...] = ()
    mend: str | None = None
    notes: tuple[str, ...] = ()


def status() -> list[PackageStatus]:
    """The covered packages, installed or not, and those beside them that are installed.

    It tells of this process: call it in the program that trains, after its imports; `overlay doctor` tells what every
    process of an interpreter gets.

    Returns:
        Those with a live fault first.

    Raises:
        OverlayError: there are no patched files, they are of another version of this project, or of some releases
            alone, so that what they do not know may be another one.
    """
    listing = manifest.read()
    here = mends.overlay_here()
    covered = [_covered(name, listing, here) for name in manifest.PROJECTS]
    unknown = [one for one in covered if not listing.complete and _is_of_another(one, listing)]
    if unknown:
        named = ", ".join(f"{release.project} {release.version}" for release in listing.releases)
        raise OverlayError(
            f"expected the patched files of every pinned release in {manifest.folder()}, to know {unknown[0].project} "
            f"{unknown[0].version} by, found those of {named} alone, which scripts/apply.sh was asked for: run it "
            "without a release"
        )
    found = [*covered, *_beside(covered[manifest.PROJECTS.index("transformers")])]
    return sorted(found, key=lambda package: not package.faults)


def _is_of_another(package: PackageStatus, listing: Manifest) -> bool:
    """Whether a package that is not known may be of a release that the listing has not."""
    states = {file.state for file in package.files}
    version = versions.key(package.version or "")
    has = any((one.project, versions.key(one.version)) == (package.project, version) for one in listing.releases)
    return "unknown" in {package.state, *states} and not has


def _covered(name: str, listing: Manifest, here: Overlay) -> PackageStatus:
    package = installed.find(name)
    if package is None:
        return PackageStatus(name, None, None, "not installed", notes=tuple(installed.remains(name)))
    modules = {module: path for module, path in listing.modules().items() if path.startswith(f"{name}/")}
    files = tuple(_file(package, module, path, listing, here) for module, path in sorted(modules.items()))
    return _Judged(package, files, listing, here).status()


# ---- one file


def _file(package: installed.Package, module: str, path: str, listing: Manifest, here: Overlay) -> FileStatus:
    loaded = sys.modules.get(module)
    spec: ModuleSpec | None = getattr(loaded, "__spec__", None)
    ours_first = False
    if loaded is None or spec is None:
        loaded = None
        spec, ours_first = package.spec(module)
    if spec is None or spec.origin is None:
        return FileStatus(path, None, "missing")
    content = _content(spec)
    blob = manifest.blob_id(content)
    if manifest.folder() in Path(spec.origin).parents:
        return FileStatus(path, blob, "overlaid")
    if loaded is not None and not _is_what_was_loaded(loaded, spec):
        return FileStatus(path, blob, "replaced since")
    image = listing.image(path, blob)
    if image is not None and not _is_whole(image):
        return FileStatus(path, blob, "stock")
    if image is not None:
        return FileStatus(path, blob, "overlaid" if ours_first else "off" if here.off else "stock")
    if manifest.NOTICE in content:
        return FileStatus(path, blob, "patched wheel")
    return FileStatus(path, blob, "fixed upstream" if listing.is_right(path, blob) else "unknown")


def _is_whole(image: File) -> bool:
    try:
        manifest.image_path(image)
    except OverlayError:
        return False
    return True


def _content(spec: ModuleSpec) -> bytes:
    loader: Any = spec.loader
    try:
        return bytes(loader.get_data(spec.origin))
    except (AttributeError, OSError):
        return b""  # no file: its content is not known either


def _is_what_was_loaded(module: ModuleType, spec: ModuleSpec) -> bool:
    """Whether the file on the disk is still the one that a module was made of: pip may have exchanged it since.

    The module's own functions and methods are compared with the code that the file gives now.
    """
    loader: Any = spec.loader
    try:
        now = set(_codes(loader.get_code(module.__name__)))
    except Exception:  # gone, or not Python any more
        return False
    holders = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    own = [
        value.__code__
        for holder in holders
        if getattr(holder, "__module__", module.__name__) == module.__name__
        for value in list(vars(holder).values())
        if isinstance(value, FunctionType) and value.__code__.co_filename == spec.origin
    ]
    return all(code in now for code in own)


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# ---- one package


class _Judged:
    """A covered package with the state of its files: what that makes of the package."""

    def __init__(
        self, package: installed.Package, files: tuple[FileStatus, ...], listing: Manifest, here: Overlay
    ) -> None:
        self.package = package
        self.files = files
        self.here = here
        self.listing = listing
        named = versions.key(package.version or "")
        self.version = named if named[0] else None
        self.releases = [release for release in listing.releases if release.project == package.name]
        self.wrong = [file for file in files if file.state in ("stock", "off", "unknown", "replaced since")]

    def status(self) -> PackageStatus:
        notes = [*self.package.notes]
        faults = self._faults(notes)
        mend = self._mend(notes) if faults else None
        self._remarks(notes)
        package = self.package
        return PackageStatus(
            package.name, package.version, package.location, self._state(), self.files, faults, mend, tuple(notes)
        )

    def _state(self) -> State:
        states = {file.state for file in self.files}
        if self.wrong:
            if states & {"overlaid", "patched wheel"}:
                return "partly patched"
            wrong: Sequence[State] = ("unknown", "stock", "off")
            found = {"unknown" if state == "replaced since" else state for state in states}
            return next(state for state in wrong if state in found)
        right: Sequence[State] = ("overlaid", "patched wheel", "fixed upstream")
        return next((state for state in right if state in states), "unknown")

    def _faults(self, notes: list[str]) -> tuple[Fault, ...]:
        """Those of the releases that the wrong files are of; for unknown content those of the nearest."""
        found: dict[str, Fault] = {}
        for file in self.wrong:
            release = self._release(file)
            if release is not None:
                found |= {fault.code: fault for fault in _own(release)}
        for file in self.wrong:
            if file.state not in ("unknown", "replaced since"):
                continue
            nearest = self._nearest()
            if self._is_early():
                note = f"before {FIRST_KNOWN[self.package.name]}: whether it has the fault is not known"
            elif file.state == "unknown" and self._is_right_by_version(file):
                note = f"{file.path}: by its version it is fixed upstream, but its content is not known"
            elif nearest is None:
                continue
            else:
                likely = "likely, by its version" if self.version else "likely"
                for fault in _own(nearest):
                    found.setdefault(fault.code, Fault(fault.code, f"{likely}: {fault.text}"))
                continue
            if note not in notes:
                notes.append(note)
        return tuple(found.values())

    def _release(self, file: FileStatus) -> Release | None:
        """The release that a stock file is of; several have the same content: the one of this version, or else the
        one that most of the files are of."""
        same = [release for release in self.releases if _has(release, file)]
        return next(
            (release for release in same if versions.key(release.version) == self.version),
            max(same, key=lambda release: sum(_has(release, other) for other in self.files), default=None),
        )

    def _nearest(self) -> Release | None:
        """The covered release before this version, or else the first; the last where there is no version."""
        ordered = sorted(self.releases, key=lambda release: versions.key(release.version))
        if self.version is None:
            return ordered[-1] if ordered else None
        before = [release for release in ordered if versions.key(release.version) <= self.version]
        return before[-1] if before else ordered[0] if ordered else None

    def _is_early(self) -> bool:
        return self.version is not None and self.version < versions.key(FIRST_KNOWN[self.package.name])

    def _is_right_by_version(self, file: FileStatus) -> bool:
        right = [versions.key(version) for version in self.listing.right.get(file.path, {}).values()]
        return self.version is not None and bool(right) and self.version >= min(right)

    def _mend(self, notes: list[str]) -> str | None:
        states = {file.state for file in self.wrong}
        name = self.package.name
        if "replaced since" in states:
            notes.append("what this process loaded is no longer on the disk: start it again")
            return mends.RESTART
        if "unknown" in states:
            return self._reinstall(notes)
        if self.here.mend is not None:
            notes.append(f"the overlay is {self.here.how}")
            if self.here.mend == mends.CALL:
                notes.append(f"put the call into the program that trains, above every import of {name}")
            return self.here.mend
        imported = {path for module, path in self.listing.modules().items() if module in sys.modules}
        if not any(file.path in imported for file in self.wrong):
            notes.append(
                "another finder on sys.meta_path comes before the overlay's: put it behind that, or leave it out"
            )
            return None
        if self.here.at_start:
            notes.append(f"{name} was imported before the overlay was active in this process")
            return mends.RESTART
        main = getattr(sys.modules.get("__main__"), "__file__", None) or "the program"
        notes.append(f"imported before overlay.activate(): call it in {main} above every import of {name}")
        return mends.CALL

    def _reinstall(self, notes: list[str]) -> str | None:
        nearest = self._nearest()
        assert nearest is not None  # else there is no fault
        command = mends.reinstall(self.package, nearest.version)
        text = f"{self.package.name} {nearest.version} is the nearest release that this overlay covers"
        if command is None:
            notes.append(f"{text}; this copy is not one that pip may exchange: put that release's files in its place")
            return None
        notes.append(f"{text}; the command replaces what is installed")
        covered = any(versions.key(release.version) == self.version for release in self.releases)
        if not covered and re.fullmatch(r"[0-9.]+", self.package.version or ""):  # an index has no other kinds
            this = f"{self.package.name}=={self.package.version}"
            notes.append(f"to cover this one, if a series fits it: overlay add-release {this}, in a checkout")
        then = self.here.mend
        if then is None or then == mends.RESTART:
            return command
        if then == mends.CALL:
            notes.append(f"after that, call overlay.activate() above every import of {self.package.name}")
            return command
        return f"{command} && {then}"

    def _remarks(self, notes: list[str]) -> None:
        if self.wrong:
            listed = ", ".join(f"{file.path} {file.state}" for file in self.files if file.state != "missing")
            if len({file.state for file in self.files} - {"missing"}) > 1:
                notes.append(listed)
        label = self.package.version or ""
        if "+overlay." in label and any(file.state in ("stock", "off") for file in self.wrong):
            notes.append(f"the version is that of a patched wheel, but stock files lie over it: {label}")
        known = {(file.path, file.after) for release in self.releases for file in release.files}
        if any(file.state == "patched wheel" and (file.path, file.blob) not in known for file in self.files):
            notes.append("patched by another revision than this overlay has")
        elif self.version and not any(file.state == "unknown" for file in self.wrong):
            self._remark_version(self.version[0], notes)

    def _remark_version(self, numbers: tuple[int, ...], notes: list[str]) -> None:
        """Where the content says another release than the metadata does."""
        present = [file for file in self.files if file.state in ("stock", "off", "overlaid", "patched wheel")]
        fitting = [release for release in self.releases if all(_has(release, file, any_side=True) for file in present)]
        if present and fitting and all(versions.key(one.version)[0] != numbers for one in fitting):
            notes.append(f"its covered files are those of {' or '.join(one.version for one in fitting)}")


def _own(release: Release) -> list[Fault]:
    """The faults of a release but the one that is DeepSpeed's, whose guard a release has."""
    return [fault for fault in release.faults if fault.code != DEEPSPEED_FAULT.code]


def _has(release: Release, file: FileStatus, *, any_side: bool = False) -> bool:
    """Whether a file is that of a release before its patches, or, with `any_side`, after them."""
    return any(
        one.path == file.path and file.blob in ((one.before, one.after) if any_side else (one.before,))
        for one in release.files
    )


# ---- beside them


def _beside(transformers: PackageStatus) -> list[PackageStatus]:
    found = {name: package for name in BESIDE if (package := installed.find(name)) is not None}
    return [_companion(package, transformers, "peft" in found) for package in found.values()]


def _companion(package: installed.Package, transformers: PackageStatus, peft: bool) -> PackageStatus:
    guard = next((file.state for file in transformers.files if file.path == GUARD), "missing")
    old = package.version is not None and versions.key(package.version) < versions.key(DEEPSPEED_RIGHT)
    needs_guard = package.name == "deepspeed" and old and peft and transformers.state != "not installed"
    faults: tuple[Fault, ...] = ()
    mend = None
    if needs_guard and guard not in ("overlaid", "patched wheel"):
        faults = (DEEPSPEED_FAULT,)
        has_image = guard in ("stock", "off")  # then what mends transformers mends this
        mend = (transformers.mend if has_image else None) or mends.pip(f"deepspeed>={DEEPSPEED_RIGHT}")
    return PackageStatus(package.name, package.version, package.location, "beside", (), faults, mend, package.notes)
