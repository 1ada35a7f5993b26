"""`upstream.lock`: what is pinned, and what each pin becomes.

The only module that knows the form of the file. The file is TOML (https://toml.io/en/v1.0.0), versioned by its key
`version`. Reading checks every field against a typed model; writing replaces values in place, so that comments and
order stay.
"""

import os
import re
import shutil
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.tags import sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from overlay.errors import OverlayError

FORMAT = 1
MAXIMUM = 1 << 20
"""Bytes that the file may have: ours has a fortieth of that."""
Location = tuple[str | int, ...]
"""Where a value is in the file, as keys and positions: `("packages", "transformers", "releases", 0, "wheel")`."""


def _public_version(text: str) -> str:
    try:
        version = Version(text)
    except InvalidVersion:
        raise ValueError("expected a version as PEP 440 has it, such as 5.14.1") from None
    if str(version) != text or version.local is not None:
        raise ValueError("expected a public version in its normal form (PEP 440), such as 5.14.1")
    return text


INVISIBLE = (
    r"\x80-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff"
)
"""Characters that nobody sees, or that turn text around, as part of a regular expression's set: the controls of ISO
6429 from 0x80 on, what ends a line for some programs, and what is Default_Ignorable_Code_Point in Unicode, such as the
bidirectional controls (CVE-2021-42574)."""

_UNSAFE = re.compile(
    r"(?:\A|/)(?:|[^/]*[. ]|\.git|git~[0-9]+|(?:con|prn|aux|nul|(?:com|lpt)[0-9\xb2\xb3\xb9])(?:\.[^/]*)?)"
    rf"(?:/|\Z)|[\x00-\x1f\x7f\\:{INVISIBLE}]",
    re.IGNORECASE,
)


def relative_path(text: str) -> str:
    """`text`, if it is a plain relative POSIX path: no `..`, no `.git` (nor what a file system takes for it), no drive,
    no backslash, no control or invisible character; and no name that Windows cannot have: a device's, or one that ends
    in a dot or a space.

    Raises:
        ValueError: it is not.
    """
    if _UNSAFE.search(text):
        raise ValueError(
            "expected a relative path without '..', '.git', ':', a backslash, control characters and names that no "
            "file has on some system"
        )
    return text


def folded(path: str) -> str:
    """What two paths have in common that a file system without case, or with normalized names, takes for one (Unicode
    3.13, canonical caseless matching)."""
    return path if path.isascii() and path.islower() else _decomposed(_decomposed(path).casefold())


def check_apart(paths: Iterable[str]) -> None:
    """Whether no file system takes two of `paths` for one, or one for a folder of another. One that ends in `/` is a
    folder.

    Raises:
        ValueError: two are the same; it says which.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        key = folded(path.removesuffix("/"))
        first = seen.setdefault(key, path)
        if first is not path and first != path:
            alike = "case" if first.casefold() == path.casefold() else "case or Unicode normalization"
            raise ValueError(f"{path} is the same as {first} but for {alike}")
        if first is not path and not path.endswith("/"):
            raise ValueError(f"{path} is doubled")
        at = key.rfind("/")
        while at > 0 and key[:at] not in folders:
            folders[key[:at]] = path
            at = key.rfind("/", 0, at)
    for key, path in seen.items():
        if key in folders and not path.endswith("/"):
            raise ValueError(f"{folders[key]} lies in {path}, which is a file")


def _decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _folder_prefix(text: str) -> str:
    if text:
        if not text.endswith("/"):
            raise ValueError("expected a path prefix that ends in '/', or nothing")
        relative_path(text[:-1])
    return text


def _file_name(text: str) -> str:
    if "/" in text:
        raise ValueError("expected a file name without a folder")
    return relative_path(text)


PublicVersion = Annotated[str, AfterValidator(_public_version)]
RelativePath = Annotated[str, AfterValidator(relative_path)]
FileName = Annotated[str, AfterValidator(_file_name)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
BlobId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
CommitId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")]
SeriesName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*-[0-9]+(\.[0-9]+)*(-[0-9]+(\.[0-9]+)*)?$")]
ProjectName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )


class Artefact(_Table):
    """A file on a package index: its name, its size in bytes and its sha256."""

    file: FileName
    size: Annotated[int, Field(gt=0)]
    sha256: Sha256


class Built(_Table):
    """A wheel that this project builds: its name and its sha256."""

    file: FileName
    sha256: Sha256


class Exchanged(_Table):
    """A file of the wheel that is exchanged, with its git blob ids before and after (40 hex digits, SHA-1 object
    format)."""

    path: RelativePath
    before: BlobId
    after: BlobId


class Right(_Table):
    """A file of the wheel that upstream has mended, with its git blob id."""

    path: RelativePath
    blob: BlobId


class Fixed(_Table):
    """The first release with these contents of files that a series changes in earlier ones, and that upstream has
    mended: the overlay leaves them alone."""

    version: PublicVersion
    files: Annotated[tuple[Right, ...], Field(strict=False, min_length=1)]


class Release(_Table):
    """One version of an upstream package.

    `use` is `deliver` for a release that is patched and delivered, `test` for one that only tests look at.
    `revision` is the number in the local version label: it rises whenever the bytes of the built wheel would change.
    """

    version: PublicVersion
    use: Literal["deliver", "test"]
    series: SeriesName | None = None
    revision: Annotated[int, Field(ge=1)] | None = None
    wheel: Artefact
    sdist: Artefact | None = None
    built: Built | None = None
    files: Annotated[tuple[Exchanged, ...], Field(strict=False)] = ()

    @property
    def local_version(self) -> str:
        """The version of the patched wheel, with the local version label of PEP 440: `5.14.1+overlay.1`."""
        return f"{self.version}+overlay.{self.revision}"

    @property
    def built_file(self) -> str:
        """The file name of the patched wheel: upstream's with the local version."""
        return self.wheel.file.replace(f"-{self.version}-", f"-{self.local_version}-", 1)


class Commit(_Table):
    """A commit of the git repository. Not `verified`: the id may be abbreviated, and nobody with a checkout has
    completed it."""

    id: CommitId
    verified: bool
    series: SeriesName | None = None
    files: Annotated[tuple[Exchanged, ...], Field(strict=False)] = ()


class Companion(_Table):
    """One version of another project, which tests install beside the package; nothing of it is patched or delivered.

    It is an sdist, or one wheel for each platform.
    """

    project: ProjectName
    version: PublicVersion
    use: Literal["test"]
    wheels: Annotated[tuple[Artefact, ...], Field(strict=False)] = ()
    sdist: Artefact | None = None

    @property
    def artefact(self) -> Artefact:
        """The sdist, or the wheel whose tags (PEP 425) this interpreter takes.

        Raises:
            OverlayError: there is no wheel for this machine.
        """
        if self.sdist is not None:
            return self.sdist
        tags = set(sys_tags())
        for wheel in self.wheels:
            if tags & parse_wheel_filename(wheel.file)[3]:
                return wheel
        raise OverlayError(
            f"expected a wheel of {self.project} {self.version} for this machine, found "
            f"{', '.join(wheel.file for wheel in self.wheels)}: pin one in upstream.lock, or use another machine"
        )


class Package(_Table):
    """An upstream project: path in its git tree = `prefix` + path in its wheel."""

    repository: Annotated[str, StringConstraints(pattern=r"^https://[^\s@]+$")]
    prefix: Annotated[str, AfterValidator(_folder_prefix)] = ""
    version_file: RelativePath | None = None
    commit: Commit | None = None
    releases: Annotated[tuple[Release, ...], Field(strict=False)]
    fixed: Annotated[tuple[Fixed, ...], Field(strict=False)] = ()
    companions: Annotated[tuple[Companion, ...], Field(strict=False)] = ()

    def companion(self, project: str, version: str | None = None) -> Companion:
        """The pinned companion `project`, of that version or of the only one there is.

        Raises:
            OverlayError: no such one is pinned, or several are and no version is named.
        """
        pinned = [one for one in self.companions if canonicalize_name(one.project) == canonicalize_name(project)]
        found = [one for one in pinned if version in (None, one.version)]
        if len(found) != 1:
            wanted = project if version is None else f"{project}=={version}"
            listed = ", ".join(f"{one.project}=={one.version}" for one in pinned or self.companions) or "none"
            raise OverlayError(
                f"expected one companion {wanted} in upstream.lock, found {listed}: name one of these, or pin it"
            )
        return found[0]


class Lock(_Table):
    """The whole file."""

    version: Annotated[int, Field(ge=FORMAT, le=FORMAT)]  # a Literal would take true and 1.0 for 1
    packages: Annotated[dict[ProjectName, Package], Field(min_length=1)]

    def deliveries(self) -> Iterator[tuple[str, Package, Release]]:
        """Every release that is patched and delivered, in the order of the file."""
        for name, package in self.packages.items():
            for release in package.releases:
                if release.use == "deliver":
                    yield name, package, release

    def patched(self) -> Iterator[tuple[str, Package, Release]]:
        """Every release that has a series, delivered or for the tests, in the order of the file."""
        for name, package in self.packages.items():
            for release in package.releases:
                if release.series is not None:
                    yield name, package, release

    def spelled(self, project: str) -> str | None:
        """The name of a pinned project as this file has it, whatever form (PEP 503) it is given in; None where it is
        not pinned."""
        wanted = canonicalize_name(project)
        return next((name for name in self.packages if canonicalize_name(name) == wanted), None)

    def find(self, requirement: str, *, use: str | None = None) -> tuple[str, Package, Release]:
        """The pinned release that `requirement` (`name==version`) names.

        Raises:
            OverlayError: it is not of that form, or no such release is pinned.
        """
        name, separator, version = requirement.partition("==")
        wanted = self.spelled(name)
        pins = [
            (known, package, release)
            for known, package in self.packages.items()
            for release in package.releases
            if use in (None, release.use)
        ]
        for known, package, release in pins:
            if separator and known == wanted and release.version == version:
                return known, package, release
        if use == "deliver" and wanted:
            self._check_deliverable(requirement, self.packages[wanted], version)
        same = [pin for pin in pins if canonicalize_name(pin[0]) == wanted]
        listed = ", ".join(f"{known}=={release.version}" for known, _, release in same or pins)
        another = "overlay add-release"
        if use == "deliver" and wanted and version:
            another += (
                f" {wanted}=={version} --use deliver, and the overlay wheel covers what has the same files (overlay "
                "doctor says so)"
            )
        raise OverlayError(
            f"expected one of the pinned releases ({listed}), found {requirement!r}: name one of these; another one "
            f"is pinned by {another}"
        )

    @staticmethod
    def _check_deliverable(requirement: str, package: Package, version: str) -> None:
        """Raises OverlayError for a release that is pinned, or known to be right, and not delivered."""
        pin = next((release for release in package.releases if release.version == version), None)
        with suppress(InvalidVersion):
            since = min((Version(fixed.version) for fixed in package.fixed), default=None)
            if (pin is None or pin.series is None) and since is not None and since <= Version(version):
                raise OverlayError(
                    f"{requirement}: expected a release that is patched, found that upstream has none of the faults "
                    f"since {since}: install it as it is"
                )
        if pin is not None:
            raise OverlayError(
                f"{requirement} is pinned for the tests alone: to deliver it, run overlay add-release {requirement} "
                "--use deliver"
            )


@dataclass(frozen=True)
class _Problem(Exception):
    where: Location
    what: str


def key(where: Location) -> str:
    """`where` as people write it: `packages.transformers.releases[0].wheel`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "(the whole file)"


def parse(text: str, source: str = "upstream.lock") -> Lock:
    """The lock that `text` holds.

    Args:
        text: the file's content.
        source: its name, for messages.

    Raises:
        OverlayError: it is no TOML, has an unknown, doubled, missing or ill-formed key, or contradicts itself. The
            message names the key and the line.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise OverlayError(
            f"{source}: expected tables and arrays a few levels deep, found many more: restore the file"
        ) from None
    except ValueError as error:  # TOMLDecodeError, or that of an integer with thousands of digits
        raise OverlayError(f"{source}: {_toml_problem(text, error)}: mend that line") from None
    found = data.get("version")
    if isinstance(found, int) and not isinstance(found, bool) and found > FORMAT:
        raise OverlayError(
            f"{source}:{line(text, ('version',))}: version: expected {FORMAT}, found {found}: this lock is from a "
            "newer modeling-overlay, update this one"
        )
    try:
        lock = Lock.model_validate(data)
        _check(lock)
    except ValidationError as error:
        first = error.errors()[0]
        where: Location = tuple(part for part in first["loc"] if part != "[key]")
        raise OverlayError(f"{source}:{line(text, where)}: {key(where)}: {_pydantic_problem(dict(first))}") from None
    except _Problem as problem:
        raise OverlayError(f"{source}:{line(text, problem.where)}: {key(problem.where)}: {problem.what}") from None
    return lock


def read(path: Path) -> Lock:
    """The lock in the file `path`. Raises OverlayError as `parse` does, and where the file cannot be read."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of the file `path`. Raises OverlayError where it cannot be read, is not UTF-8 or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAXIMUM + 1)
        if len(content) > MAXIMUM:
            raise OverlayError(f"{path}: expected a lock of at most {MAXIMUM} bytes, found more: restore the file")
        return content.decode("utf-8")  # as it is: `write` must leave line ends alone
    except FileNotFoundError:
        raise OverlayError(
            f"expected the lock at {path}, found no such file: run from a checkout, or name it with --root"
        ) from None
    except UnicodeDecodeError as error:
        raise OverlayError(
            f"{path}: expected UTF-8, found the byte 0x{error.object[error.start]:02x} at offset {error.start}: "
            "restore the file"
        ) from None


def write(path: Path, changes: Mapping[Location, Any]) -> Lock:
    """Sets the values at the given locations and leaves every other character of the file as it is; None removes a key.

    The new text is checked before it replaces the old one, at once (`os.replace`), so a failure leaves the file as it
    was.

    Raises:
        OverlayError: what would be written is no sound lock.
    """
    text = edited(read_text(path), changes)
    lock = parse(text, str(path))
    with replacement(path, text) as replace:
        replace()
    return lock


def edited(text: str, changes: Mapping[Location, Any]) -> str:
    """The text of a lock with other values at the given locations; None removes a key."""
    import tomlkit  # only writers need it

    document = tomlkit.parse(text)
    for where, value in changes.items():
        table: Any = document
        for part in where[:-1]:
            table = table[part]
        if value is None:
            table.pop(where[-1], None)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            _put(table, where[-1], _array(value))
        elif isinstance(value, Mapping):
            _put(table, where[-1], _inline(value))
        else:
            _put(table, where[-1], value)
    return _ended_as(text, tomlkit.dumps(document))


def _ended_as(text: str, new: str) -> str:
    """`new`, with line ends of CR and LF where `text` has no other ones."""
    ends = "\r\n" if "\n" in text and not re.search(r"(?<!\r)\n", text) else "\n"
    return re.sub(r"(?<!\r)\n", ends, new)


@contextmanager
def replacement(path: Path, text: str) -> Iterator[Callable[[], object]]:
    """Writes `text` beside the file `path`, and yields what puts it in its place, at once."""
    temporary = path.resolve().with_name(f".{path.name}.overlay-{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        shutil.copymode(path, temporary)
        yield lambda: temporary.replace(path.resolve())
    finally:
        temporary.unlink(missing_ok=True)


def inserted(text: str, name: str, release: Release) -> str:
    """The text of a lock with another release of the project `name`, behind the last one with the same `use`, or else
    behind all. Comments that stand before the next entry stay there."""
    releases = parse(text).packages[name].releases
    alike = [position for position, other in enumerate(releases) if other.use == release.use]
    anchor = line(text, ("packages", name, "releases", (alike or [len(releases) - 1])[-1]))
    rows = text.split("\n")
    end = next((number for number in range(anchor, len(rows)) if rows[number].lstrip().startswith("[")), len(rows))
    while end > anchor and (not rows[end - 1].strip() or rows[end - 1].lstrip().startswith("#")):
        end -= 1
    return _ended_as(text, "\n".join([*rows[:end], "", *_entry(name, release), *rows[end:]]))


def _entry(name: str, release: Release) -> list[str]:
    """The lines of a release, in the form that the file has."""
    import tomlkit

    values = release.model_dump(by_alias=True, exclude_none=True)
    rows = [f"[[packages.{name}.releases]]"]
    for key_ in ("version", "use", "series", "revision", "wheel", "files", "built"):
        value = values.get(key_)
        if isinstance(value, Mapping) and key_ == "wheel":  # by hand elsewhere, with blanks inside the braces
            rows.append(f"{key_} = {_inline(value).as_string().replace('{', '{ ').replace('}', ' }')}")
        elif value:
            item = _inline(value) if isinstance(value, Mapping) else _array(value) if key_ == "files" else value
            rows += tomlkit.dumps({key_: item}).rstrip("\n").split("\n")
    return rows


def _put(table: Any, name: str | int, value: Any) -> None:
    """Sets a value; a new one goes before the blank lines and comments at the end, which belong to the table that
    follows."""
    behind = []
    if name not in table:
        body = table.value.body
        while body and body[-1][0] is None:
            behind.append(body.pop()[1])
    table[name] = value
    for item in reversed(behind):
        table.add(item)


def _inline(value: Mapping[str, Any]) -> Any:
    import tomlkit

    table = tomlkit.inline_table()
    table.update(value)
    return table


def _array(values: Sequence[Mapping[str, Any]]) -> Any:
    import tomlkit

    array = tomlkit.array()
    for value in values:
        array.add_line(_inline(value), indent="  ")
    return array.multiline(True) if not values else _closed(array)


def _closed(array: Any) -> Any:
    array.add_line(indent="")
    return array


def line(text: str, where: Location) -> int:
    """The line (from 1) at which the value at `where` stands, or else the nearest table around it that is there.

    No TOML library keeps positions, so a marker is put in the value's place in a copy and looked up in the text that
    results.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import AoT, Table

    marker = "\N{POSITION INDICATOR}here\N{POSITION INDICATOR}"
    for length in range(len(where), 0, -1):
        try:
            document: Any = tomlkit.parse(text)
            table: Any = document
            for part in where[: length - 1]:
                table = table[part]
            item = table[where[length - 1]]
            if isinstance(item, AoT):
                item = item[0]
            if isinstance(item, Table) and item.is_super_table():
                continue
            if isinstance(item, Table):
                item.comment(marker)
            else:
                table[where[length - 1]] = marker
            marked = tomlkit.dumps(document)
        except (TOMLKitError, LookupError, TypeError, ValueError, RecursionError):
            continue
        if marker in marked:
            return marked[: marked.index(marker)].count("\n") + 1
    return 1


def _toml_problem(text: str, error: ValueError) -> str:
    at = re.search(r"\(at line (\d+), column \d+\)", str(error))
    if at is None:
        return str(error)
    number = int(at[1])
    lines = text.splitlines()
    content = lines[number - 1].strip() if number <= len(lines) else ""
    found = _short(content if content.startswith("[") else content.partition("=")[0].strip())
    what = "a key or table that is there already" if "overwrite" in str(error) or "twice" in str(error) else "no TOML"
    return f"line {number}: {found}: {what} ({str(error).replace(at[0], '').strip()})"


def _short(text: str) -> str:
    """`text`, or its beginning: what is wrong may be a whole file."""
    return text if len(text) <= 200 else f"{text[:200]}…"


def _pydantic_problem(error: Mapping[str, Any]) -> str:
    kind, found = error["type"], error["input"]
    if kind == "extra_forbidden":
        return "unknown key: take it out, or update modeling-overlay"
    if kind == "missing":
        return "missing: expected a value for this key"
    if kind == "value_error":
        return f"{error['ctx']['error']}, found {_short(repr(found))}"
    shown = _short(repr(found))
    if kind == "string_pattern_mismatch":
        expected = {
            r"^[0-9a-f]{64}$": "a sha256 of 64 hex digits",
            r"^[0-9a-f]{40}$": "a git blob id of 40 hex digits",
            r"^[0-9a-f]{7,40}$": "a git commit id of 7 to 40 hex digits",
        }.get(error["ctx"]["pattern"], f"text like {error['ctx']['pattern']}")
        return f"expected {expected}, found {shown}"
    return f"{str(error['msg']).replace('Input should be', 'expected')}, found {shown}"


def _check(lock: Lock) -> None:
    """What no single field shows. Raises _Problem."""
    for name, package in lock.packages.items():
        at: Location = ("packages", name)
        if package.commit is not None:
            _check_commit(package.commit, (*at, "commit"))
        seen: set[str] = set()
        for position, release in enumerate(package.releases):
            here = (*at, "releases", position)
            if release.version in seen:
                raise _Problem((*here, "version"), f"{release.version} is pinned twice: keep one of the two")
            seen.add(release.version)
            _check_release(name, release, here)
        _check_fixed(package, (*at, "fixed"))
        _check_companions(package.companions, (*at, "companions"))


def _check_commit(commit: Commit, at: Location) -> None:
    if commit.verified:
        if len(commit.id) != 40:
            raise _Problem(
                (*at, "id"),
                f"expected the full id (40 hex digits) of a verified commit, found {commit.id!r}: run overlay lock "
                "complete",
            )
        if commit.series is None or not commit.files:
            raise _Problem(
                (*at, "verified"),
                "expected a series and files for a verified commit, found none: run overlay lock complete",
            )
    elif commit.series is not None or commit.files:
        raise _Problem(
            (*at, "verified"), "expected no series and no files for an unverified commit: run overlay lock complete"
        )
    _check_files(commit.files, at)


def _check_release(name: str, release: Release, at: Location) -> None:
    _check_wheel_name(name, release.wheel.file, release.version, (*at, "wheel", "file"))
    if release.series is not None and not in_range(name, release.series, release.version):
        raise _Problem(
            (*at, "series"),
            f"expected a series of {name} whose range holds {release.version}, found {release.series!r}",
        )
    if release.sdist is not None:
        _check_sdist_name(name, release.sdist.file, release.version, (*at, "sdist", "file"))
    _check_files(release.files, at)
    if release.use == "test":
        if release.files and release.series is None:
            raise _Problem((*at, "series"), "missing: expected the series that changes the files, or no files")
        if release.revision is not None or release.built is not None:
            raise _Problem((*at, "use"), "expected no revision and no built wheel for a release that only tests use")
    else:
        if release.series is None:
            raise _Problem((*at, "series"), "missing: expected the series that applies to a delivered release")
        if release.built is not None:
            if release.revision is None:
                raise _Problem((*at, "revision"), "missing: expected the revision of a wheel that is built")
            if release.built.file != release.built_file:
                raise _Problem((*at, "built", "file"), f"expected {release.built_file!r}, found {release.built.file!r}")
            if not release.files:
                raise _Problem(
                    (*at, "files"), "missing: expected the files that are exchanged: run overlay lock update"
                )


def _check_fixed(package: Package, at: Location) -> None:
    changed = {file.path for release in package.releases for file in release.files}
    ours = {(file.path, blob) for release in package.releases for file in release.files for blob in _blobs(file)}
    with_series = {release.version: release.series for release in package.releases if release.series is not None}
    versions: set[str] = set()
    known: dict[tuple[str, str], str] = {}
    for position, fixed in enumerate(package.fixed):
        here = (*at, position)
        if fixed.version in versions:
            raise _Problem((*here, "version"), f"{fixed.version} is named twice: keep one of the two")
        if fixed.version in with_series:
            raise _Problem(
                (*here, "version"),
                f"expected a release without a series, found {fixed.version}, which has {with_series[fixed.version]}: "
                "take one of the two out",
            )
        versions.add(fixed.version)
        paths: set[str] = set()
        for number, file in enumerate(fixed.files):
            there = (*here, "files", number)
            if file.path in paths:
                raise _Problem((*there, "path"), f"{file.path} is named twice: keep one of the two")
            paths.add(file.path)
            if file.path not in changed:
                raise _Problem(
                    (*there, "path"), f"expected a file that a series changes, found {file.path}: take it out"
                )
            if (file.path, file.blob) in known:
                raise _Problem(
                    (*there, "blob"), f"{file.blob} is that of {known[file.path, file.blob]} already: keep the first"
                )
            if (file.path, file.blob) in ours:
                raise _Problem(
                    (*there, "blob"), f"expected a file that upstream has mended, found one of a series: {file.blob}"
                )
            known[file.path, file.blob] = fixed.version


def _blobs(file: Exchanged) -> tuple[str, str]:
    return file.before, file.after


def _check_companions(companions: tuple[Companion, ...], at: Location) -> None:
    seen: set[tuple[str, str]] = set()
    for position, one in enumerate(companions):
        here = (*at, position)
        if (one.project, one.version) in seen:
            raise _Problem((*here, "version"), f"{one.project} {one.version} is pinned twice: keep one of the two")
        seen.add((one.project, one.version))
        if one.sdist is not None and one.wheels:
            raise _Problem(
                (*here, "sdist"), "expected an sdist or wheels, found both: keep the ones that are installed"
            )
        if one.sdist is not None:
            _check_sdist_name(one.project, one.sdist.file, one.version, (*here, "sdist", "file"))
        elif not one.wheels:
            raise _Problem((*here, "wheels"), "missing: expected an sdist or wheels")
        files: set[str] = set()
        for number, wheel in enumerate(one.wheels):
            there = (*here, "wheels", number, "file")
            _check_wheel_name(one.project, wheel.file, one.version, there)
            if wheel.file in files:
                raise _Problem(there, f"{wheel.file} is named twice: keep one of the two")
            files.add(wheel.file)


def first_release(series: str) -> Version:
    """Where the range in the name of the series begins."""
    return Version(series.split("-")[1])


def nearest(names: Iterable[str], release: Version) -> str:
    """Of these series the last one whose range begins no later than at the release, or else the first."""
    ordered = sorted(names, key=first_release)
    return [ordered[0], *(name for name in ordered if first_release(name) <= release)][-1]


def in_range(name: str, series: str, release: str) -> bool:
    """Whether the range in the name of the series, `<project>-<first>[-<last>]`, holds the release."""
    project, first, *last = series.split("-")
    lowest, highest = (tuple(map(int, part.split("."))) for part in (first, *(last or [first])))
    version = Version(release).release
    return project == name and lowest <= version[: len(lowest)] and version[: len(highest)] <= highest


def _check_wheel_name(name: str, file: str, version: str, at: Location) -> None:
    try:
        found, found_version, build, _ = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise _Problem(at, str(error)) from None
    spelled = file.startswith(f"{name}-{version}-")
    if found != canonicalize_name(name) or str(found_version) != version or build or not spelled:
        raise _Problem(at, f"expected the wheel of {name} {version}, found {file!r}")


def _check_sdist_name(name: str, file: str, version: str, at: Location) -> None:
    try:
        found, found_version = parse_sdist_filename(file)
    except InvalidSdistFilename as error:
        raise _Problem(at, str(error)) from None
    if found != canonicalize_name(name) or str(found_version) != version or file.endswith(".zip"):
        raise _Problem(at, f"expected the sdist of {name} {version}, found {file!r}")


def _check_files(files: tuple[Exchanged, ...], at: Location) -> None:
    seen: set[str] = set()
    for position, file in enumerate(files):
        here = (*at, "files", position)
        if folded(file.path) in seen:
            raise _Problem((*here, "path"), f"{file.path} is named twice: keep one of the two")
        if file.before == file.after:
            raise _Problem(
                (*here, "after"), "expected another blob id than before: a file that does not change is not exchanged"
            )
        seen.add(folded(file.path))
