"""The documents of `overlay.deliver.sbom`, made with the CycloneDX library: CycloneDX 1.6 (ECMA-424,
https://cyclonedx.org/docs/1.6/json/).

A document says nothing of when, where or by which version of this project it was made: it is part of a wheel's bytes,
which are the same wherever the same patches are.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cyclonedx.model import AttachedText, ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property
from cyclonedx.model import XsUri as Address
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.issue import IssueClassification, IssueType, IssueTypeSource
from cyclonedx.model.license import LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from overlay.deliver.post_images import Overlaid
from overlay.deliver.sbom import PATCHED, Changed, Upstream
from overlay.explain import NAMESPACE
from overlay.queue import git, series
from overlay.queue.lock import Package

TOOL = "modeling-overlay"

_LICENCE = "Apache-2.0"
"""That of both upstreams and of this project."""


def of_wheel(
    upstream: Upstream,
    version: str,
    queue: series.Series,
    changed: Sequence[Changed],
    notes: str | None = None,
) -> bytes:
    """As `sbom.of_wheel`."""
    purl = PackageURL("pypi", None, canonicalize_name(upstream.project), version)
    described = "Upstream's, with these patches; files that are not listed are as upstream has them"
    patches = queue.for_delivery("wheel")
    root = _patched(upstream, version, queue.name, patches, changed, described, purl, notes)
    return _document(root, {_reference(upstream.project, version): patches})


def of_overlay(listed: Iterable[tuple[Package, Overlaid]]) -> bytes:
    """As `sbom.of_overlay`."""
    releases, order = [], {}
    for package, one in listed:
        if not one.images:
            continue
        patches = one.queue.for_delivery("overlay")
        order[_reference(one.project, one.release.version)] = patches
        component = _patched(
            Upstream.pinned(one.project, package, one.release),
            one.release.version,
            one.queue.name,
            patches,
            [Changed(image.path, PATCHED, image.before, image.after) for image in one.images],
            "The files that are laid over an installation with this content; nothing else of it is in this wheel",
        )
        releases.append(component)
    licences = [LicenseExpression(_LICENCE)]
    return _document(
        Component(name=TOOL, type=ComponentType.LIBRARY, bom_ref=TOOL, licenses=licences, components=releases), order
    )


def _reference(project: str, version: str) -> str:
    return f"{project}=={version}"


def _patched(
    upstream: Upstream,
    version: str,
    queue: str,
    patches: Sequence[series.Patch],
    changed: Sequence[Changed],
    description: str,
    purl: PackageURL | None = None,
    notes: str | None = None,
) -> Component:
    """What is patched, with its pedigree. It has a `purl` where it is a package: files of one are none."""
    name = _reference(upstream.project, version)
    properties = {f"{NAMESPACE}:series": queue} | {
        f"{NAMESPACE}:patch:{number}:{key}": value
        for number, patch in enumerate(patches, 1)
        for key, value in {
            "file": patch.file.name,
            "subject": patch.subject,
            "bug": patch.trailers["Bug"],
            "origin": patch.trailers["Origin"],
            "applied-upstream": patch.trailers["Applied-Upstream"],
        }.items()
    }
    return Component(
        name=upstream.project,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=name,
        description=description,
        purl=purl,
        licenses=[LicenseExpression(_LICENCE)],
        pedigree=Pedigree(
            ancestors=[_ancestor(upstream, name)], patches=[_patch(patch) for patch in patches], notes=notes
        ),
        components=[_file(file, f"{name}/{file.path}") for file in changed],
        properties=_properties(properties),
    )


def _ancestor(upstream: Upstream, descendant: str) -> Component:
    return Component(
        name=upstream.project,
        version=upstream.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{descendant}<-{upstream.commit or upstream.file}",
        purl=_purl(upstream),
        licenses=[LicenseExpression(_LICENCE)],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=upstream.sha256)] if upstream.sha256 else [],
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=Address(upstream.repository))],
    )


def _purl(upstream: Upstream) -> PackageURL:
    """The package URL (ECMA-427) of what was patched."""
    where = {"vcs_url": f"git+{upstream.repository}@{upstream.commit}"}
    if upstream.file is not None:
        where = {"file_name": upstream.file}
    return PackageURL("pypi", None, canonicalize_name(upstream.project), upstream.version, where)


def _patch(patch: series.Patch) -> Patch:
    backport = patch.trailers["Origin"].startswith("backport")
    return Patch(
        type=PatchClassification.BACKPORT if backport else PatchClassification.UNOFFICIAL,
        diff=Diff(text=AttachedText(content=patch.diff)),
        resolves=_issues(patch),
    )


def _issues(patch: series.Patch) -> list[IssueType]:
    """What a patch resolves: the faults that it mends or, where it mends none that a user sees, what it is for."""
    bug = patch.trailers["Bug"]
    known = re.match(r"https?://", bug) is not None
    numbered = known and re.search(r"/[0-9]+/?$", bug) is not None
    kind = IssueClassification.DEFECT if patch.faults else IssueClassification.ENHANCEMENT
    named = [(fault.code, fault.text) for fault in patch.faults] or [(patch.file.stem, patch.subject)]
    return [
        IssueType(
            type=kind,
            id=code,
            name=text,
            description=patch.reason,
            # a tracker is where the issue would be; only a number names one
            source=IssueTypeSource(url=Address(bug)) if known and not numbered else None,
            references=[Address(bug)] if numbered else [],
        )
        for code, text in named
    ]


def _file(file: Changed, reference: str) -> Component:
    hashes = []
    properties = {f"{NAMESPACE}:change": file.why}
    if file.before is not None and file.after is not None:
        hashes.append(HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(file.after).hexdigest()))
        properties[f"{NAMESPACE}:blob:before"] = git.blob_id(file.before)
        properties[f"{NAMESPACE}:blob:after"] = git.blob_id(file.after)
    return Component(
        name=file.path, type=ComponentType.FILE, bom_ref=reference, hashes=hashes, properties=_properties(properties)
    )


def _properties(values: Mapping[str, str]) -> list[Property]:
    return [Property(name=name, value=value) for name, value in values.items()]


def _document(root: Component, order: Mapping[str, Sequence[series.Patch]]) -> bytes:
    """The document of `root`; `order` has the patches of each component in their order, by the component's reference.

    The library keeps them as a sorted set, and a series has an order. What it adds to make two documents of the same
    content differ is optional.
    """
    # no version: the bytes of a wheel would change with every change of this project
    tool = Component(name=TOOL, type=ComponentType.APPLICATION, bom_ref=f"{TOOL} (tool)")
    bom = Bom(metadata=BomMetaData(component=root, tools=ToolRepository(components=[tool])))
    made: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del made["metadata"]["timestamp"], made["serialNumber"]
    described = made["metadata"]["component"]
    for component in (described, *described.get("components", ())):
        if component["bom-ref"] in order:
            places = {patch.diff: place for place, patch in enumerate(order[component["bom-ref"]])}
            component["pedigree"]["patches"].sort(key=lambda patch: places[patch["diff"]["text"]["content"]])
    return (json.dumps(made, indent=2) + "\n").encode()
