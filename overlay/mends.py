"""Whether the overlay is at work in this process, and the exact commands that mend what is not."""

import os
import shlex
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import overlay
from overlay import installed, manifest, versions
from overlay.activation import VARIABLE

PTH = "modeling_overlay.pth"
"""What the wheel has beside `overlay/`: it activates the overlay in every process (overlay/startup.py)."""

_HOOK = "_modeling_overlay"
"""The module that it imports."""

CALL = "import overlay; overlay.activate()"
RESTART = "start this process again"


@dataclass(frozen=True)
class Overlay:
    """This installation of the overlay, as it is in this process.

    Attributes:
        version: of modeling-overlay.
        location: the folder of the package `overlay`, or its path in an archive.
        active: whether covered modules are loaded with their fix from now on.
        at_start: whether a new process of this interpreter has it from its start, by the `.pth` file, unless it is off.
        off: whether nothing but `MODELING_OVERLAY=0` keeps it from being active.
        how: what made it active, or why it is not, in a few words.
        mend: what makes it active: a shell command, a line of Python or `RESTART`; None where it is.
    """

    version: str
    location: str
    active: bool
    at_start: bool
    off: bool
    how: str
    mend: str | None


def overlay_here() -> Overlay:
    """How the overlay is installed, and whether it is active."""
    place = manifest.folder().parent
    at_start = _is_read(place.parent)
    zero = os.environ.get(VARIABLE) == "0"
    off = False
    mend: str | None = None
    if any(installed.is_ours(finder) for finder in sys.meta_path):
        how = f"active in every process, by {PTH}" if at_start else "active in this process, by overlay.activate()"
        return Overlay(version(), str(place), True, at_start, False, how, None)
    if at_start and zero:
        off, how, mend = True, f"off: {VARIABLE} is 0", f"unset {VARIABLE}"
    else:
        how, mend = _inactive(place.parent, at_start)
        if zero:
            how = f"{how}; and {VARIABLE} is 0"
            mend = f"unset {VARIABLE}" if mend == CALL else f"unset {VARIABLE} && {mend}"
    return Overlay(version(), str(place), False, at_start, off, how, mend)


def _inactive(home: Path, at_start: bool) -> tuple[str, str]:
    """Why the overlay is not active although it may be, and what makes it so."""
    if sys.flags.no_site:
        return "not active: with -S Python reads no .pth files", CALL
    if at_start:
        return f"not active: {PTH} was not there when this process started, or it was off then", RESTART
    if (home / PTH).is_file() and home.resolve() == Path(site.getusersitepackages()).resolve():
        return "not active: with -s or -I Python leaves out the user's site-packages", CALL
    if (home / PTH).is_file():
        return f"not active: Python reads no .pth files in {home}, which is no site-packages folder", CALL
    wheel = _wheel(home)
    if wheel is not None and _can_install():
        return "not active: this is a checkout, and its wheel is not installed", pip(wheel)
    return f"not active: it is not installed in site-packages, but used from {home}", CALL


def _is_read(home: Path) -> bool:
    """Whether Python has read, or would read, the `.pth` file in a folder when it starts. In a checkout, which comes
    first on the path, it is that of the installed wheel."""
    if _HOOK in sys.modules and (home / "upstream.lock").is_file():
        return True
    if sys.flags.no_site or not (home / PTH).is_file():
        return False
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    read = {Path(folder).resolve() for folder in folders}
    return home.resolve() in read or _HOOK in sys.modules  # a site folder that others added


def _wheel(home: Path) -> str | None:
    """The wheel that `scripts/apply.sh` wrote, where this is the checkout it did that in."""
    if not (home / "upstream.lock").is_file():
        return None
    found = sorted((home / "dist").glob(f"modeling_overlay-{overlay.__version__}+*.whl"))
    return None if not found else os.path.relpath(found[0]) if found[0].is_relative_to(Path.cwd()) else str(found[0])


def pip(*arguments: str) -> str:
    """A command that installs for this interpreter, and no other. Where it has no pip, uv or another pip does it."""
    if PathFinder.find_spec("pip") is None and shutil.which("uv"):
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
    if PathFinder.find_spec("pip") is None and shutil.which("pip"):
        return shlex.join(["pip", "--python", sys.executable, "install", *arguments])
    return shlex.join([python(), "-m", "pip", "install", *arguments])


def python() -> str:
    """What starts this interpreter in a shell: the short name where that is the first on `PATH`."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        # not what the links lead to: all virtual environments link to the same
        if found and Path(found).parent.resolve() == Path(sys.executable).parent.resolve():
            return name
    return sys.executable


def _can_install() -> bool:
    """Whether pip may write where this interpreter looks for packages."""
    if sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file():
        return False  # PEP 668
    return os.access(sysconfig.get_path("purelib"), os.W_OK) or bool(site.ENABLE_USER_SITE)


def reinstall(package: installed.Package, release: str) -> str | None:
    """The command that puts a stock release in the place of a package; None where pip cannot do that, because the files
    are not in a folder that it installs to, or should not: a label (PEP 440) says that somebody has built it.

    Where the installed version is that release but for its label, pip has to be forced, and leaves alone what else is
    installed.
    """
    places = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    if site.ENABLE_USER_SITE:
        places.add(Path(site.getusersitepackages()).resolve())
    if Path(package.location).parent.resolve() not in places or not _can_install():
        return None
    label = (package.version or "").partition("+")[2]
    if label and not label.startswith("overlay."):
        return None
    project = package.name
    if package.version is not None and versions.key(package.version) == versions.key(release):
        return pip("--force-reinstall", "--no-deps", f"{project}=={release}")
    return pip(f"{project}=={release}", *(f"{part}=={release}" for part in _PARTS.get(project, ()) if _is_there(part)))


_PARTS = {"transformer_engine": ("transformer_engine_torch", "transformer_engine_cu12", "transformer_engine_cu13")}
"""Distributions that a package wants to be of its own version."""


def _is_there(project: str) -> bool:
    try:
        metadata.version(project)
    except metadata.PackageNotFoundError:
        return False
    return True


def version() -> str:
    """That of the installed distribution, whose label says what is in it; in a checkout that of the package alone."""
    try:
        found = metadata.version("modeling-overlay")
    except metadata.PackageNotFoundError:
        return overlay.__version__
    return found if found.startswith(overlay.__version__) else overlay.__version__
