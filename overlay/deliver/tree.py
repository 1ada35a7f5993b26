"""A wheel from a git checkout of upstream, for its user alone: no lock names its bytes, so it goes to `--out` and
nowhere else."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from overlay.deliver import output, sbom
from overlay.deliver.apply import changes, check_target, products
from overlay.deliver.wheel import Wheel, patched, relabelled, save, with_tree
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import images
from overlay.queue.checkout import Checkout, fitting, project_of
from overlay.queue.lock import Lock, Package


def from_git(
    lock: Lock,
    root: Path,
    folder: Path,
    out: Path,
    *,
    any_commit: bool = False,
    metadata_from: str | None = None,
    run_upstream_build: bool = False,
) -> Path:
    """Patches what is committed at HEAD of a checkout with the one series that fits, and writes a wheel.

    Args:
        lock: the pins.
        root: the checkout of this project, which holds `patches/`.
        folder: the checkout of upstream.
        out: where the wheel goes; nothing else there changes.
        any_commit: also where HEAD is not the commit that is pinned.
        metadata_from: a wheel, or a pinned `name==version`, whose metadata the new wheel gets; by default that of the
            nearest pinned release: by the version of the tree, or by its files where they do not say one.
        run_upstream_build: build by upstream's own build instead, which runs upstream's code, in an isolated
            environment.

    Returns:
        The wheel.

    Raises:
        OverlayError: HEAD is not the pinned commit, a touched file has changes that are not committed, no series or
            more than one fits, or the build fails. Nothing is written then.
    """
    head = Checkout.open(folder)
    project, package = project_of(lock, head)
    if not any_commit:
        _check_commit(project, package, head)
    queue, made = fitting(root / "patches", project, package, head)
    changed = head.changed(package.prefix + image.path for image in made)
    if changed:
        raise OverlayError(
            f"{folder}: expected {changed[0]} as it is committed, found changes that are not: commit or stash them"
        )
    check_target(out, root)
    if head.changed([package.prefix + project]):
        say(f"{folder}: changes that are not committed are left out")
    say(f"{project} at {head.commit[:12]}: {queue.name} fits; no lock names this tree, so its wheel is for you alone")
    committed = head.files(f"{package.prefix}{project}")
    tree = committed | {package.prefix + image.path: image.after for image in made}
    if run_upstream_build:
        wheel = _built(head, tree)
    else:
        wheel = with_tree(
            _nearest(lock, project, package, queue.name, committed, metadata_from),
            {path.removeprefix(package.prefix): tree[path] for path in tree},
        )
    version = _version(package, tree) or wheel.version
    local_version = f"{version}{'.' if '+' in version else '+'}overlay.g{head.commit[:12]}"
    label = None
    if package.version_file is not None:
        before = wheel.member(package.version_file).content()
        label = images.Image(
            package.version_file, before, relabelled(package.version_file, before, version, local_version)
        )
    document = sbom.of_wheel(
        sbom.Upstream(project, version, package.repository, commit=head.commit),
        local_version,
        queue,
        changes(made, label, wheel, wheel.version, local_version),
        "No lock names this commit: its id is all that says what was patched. "
        + ("Built by upstream's own build." if run_upstream_build else f"The metadata is that of {wheel.name}."),
    )
    files = {label.path: label.after} if label else {}
    members = patched(wheel, files, wheel.version, local_version, {sbom.MEMBER: document})
    file = out / f"{project}-{local_version}-{wheel.tag}.whl"
    with output.replaced(out, lambda path: path == file.name, leftovers=products(lock, out)) as staging:
        save(members, staging / file.name)
    say(f"wrote {file}")
    return file


def _check_commit(project: str, package: Package, head: Checkout) -> None:
    if package.commit is None:
        raise OverlayError(
            f"expected a pinned commit of {project}, found none in upstream.lock: name the checkout with --any-commit"
        )
    if not head.commit.startswith(package.commit.id):
        raise OverlayError(
            f"{head.folder}: expected the pinned commit {package.commit.id}, found {head.commit[:12]}: check that "
            "commit out, or use --any-commit"
        )


def _version(package: Package, tree: Mapping[str, bytes]) -> str | None:
    """The version that the tree says it has, where it says it in a file of the package."""
    if package.version_file is None:
        return None
    found = re.search(rb'^__version__ = "(.*)"$', tree.get(package.prefix + package.version_file, b""), re.MULTILINE)
    if found is None:
        return None
    try:
        return str(Version(found[1].decode("utf-8")))
    except (InvalidVersion, UnicodeDecodeError):
        raise OverlayError(
            f"{package.version_file}: expected __version__ to be a version (PEP 440), found {found[1]!r}: correct "
            "it in the checkout"
        ) from None


def _nearest(
    lock: Lock, project: str, package: Package, queue: str, tree: Mapping[str, bytes], named: str | None
) -> Wheel:
    """The wheel that the metadata comes from.

    Args:
        queue: the series that fits.
        tree: what is committed, before the series.
        named: a wheel or `name==version`.
    """
    if named is not None and "==" not in named:
        file = Path(named)
        try:
            wheel = Wheel.read(file.read_bytes(), file.name)
        except FileNotFoundError:
            raise OverlayError(
                f"--metadata-from: expected a wheel or NAME==VERSION, found no file {named}: name one that is there"
            ) from None
        wheel.check_project(project)
        return wheel
    if named is not None:
        known, _, release = lock.find(named)
        if known != project:
            raise OverlayError(f"--metadata-from: expected a release of {project}, found {named}: name one of it")
    else:
        wanted = _version(package, tree)
        if wanted is None:
            return _most_alike(project, package, queue, tree)
        ordered = sorted(package.releases, key=lambda release: Version(release.version))
        older = [release for release in ordered if Version(release.version) <= Version(wanted)]
        release = older[-1] if older else ordered[0]
    say(f"metadata comes from {release.wheel.file}")
    return Wheel.pinned(project, release.wheel)


def _most_alike(project: str, package: Package, queue: str, tree: Mapping[str, bytes]) -> Wheel:
    """The wheel with the most files as in the tree, of the pinned releases that have the series; of equals the
    latest."""
    releases = [release for release in package.releases if release.series == queue] or package.releases
    wheels = [Wheel.pinned(project, release.wheel) for release in releases]

    def alike(wheel: Wheel) -> tuple[int, Version]:
        same = sum(tree.get(package.prefix + member.name) == member.content() for member in wheel.members)
        return same, Version(wheel.version)

    wheel = max(wheels, key=alike)
    say(f"metadata comes from {wheel.name}, whose files are most like those of the tree; --metadata-from names another")
    return wheel


def _built(head: Checkout, tree: Mapping[str, bytes]) -> Wheel:
    """The wheel that upstream's own build makes of the commit with the files of `tree` in it (PEP 517, in an isolated
    environment)."""
    say("running upstream's own build, in an isolated environment; this takes a minute or more")
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
        sources, made = Path(temporary, "sources"), Path(temporary, "made")
        head.export(sources)
        for path, content in tree.items():
            (sources / path).write_bytes(content)
        command: Sequence[str] = [sys.executable, "-P", "-m", "build", "--wheel", "--outdir", str(made), str(sources)]
        done = subprocess.run(
            command,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},  # it may name this project
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        wheels = list(made.glob("*.whl")) if made.is_dir() else []
        if done.returncode != 0 or len(wheels) != 1:
            said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
            raise OverlayError(
                f"{head.folder}: expected upstream's build to make one wheel, found: {said[-1].strip()}: try it by "
                "hand with python -m build, or use --metadata-from"
            )
        return Wheel.read(wheels[0].read_bytes(), wheels[0].name)
