"""What the local label of a patched release changes: comparisons of versions, what is saved, what libraries decide."""

import ast
import re
import sys
import tarfile
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from overlay import environments
from overlay.queue import lock, source
from tests.third_party import gates
from tests.third_party.columns import LAID_OVER
from tests.variants import PATCHED, ROOT, STOCK, Variant, installed, run

WORKER = Path(__file__).with_name("local_label_worker.py")
PAGE = (ROOT / "docs" / "publishing.md").read_text("utf-8")
PINS = lock.read(ROOT / "upstream.lock")
DELIVERED = {
    project: {
        release.version: release.local_version
        for name, _, release in PINS.deliveries()
        if name == project and release.revision is not None
    }
    for project in PINS.packages
}
"""The version with the label, by the one without."""

OLD, NEW = STOCK[0], Variant(PATCHED[0].kind, PATCHED[0].release, by="wheel")
LABEL = DELIVERED["transformers"][NEW.release]


COMPARED = {
    "<": (False, False),
    "<=": (True, False),
    "==": (True, False),
    "!=": (False, True),
    ">=": (True, True),
    ">": (False, True),
}
"""What `Version(…) <operation> Version("5.14.1")` says of 5.14.1, and of 5.14.1 with the label."""

SPECIFIED = {"<": False, "<=": True, "==": True, "!=": False, ">=": True, ">": False, "===": False, "~=": True}
"""Whether the requirement `<operation>5.14.1` takes 5.14.1 with the label: as 5.14.1 itself but for `===`."""


@pytest.mark.parametrize("operation", COMPARED)
def test_versions(operation: str) -> None:
    stock, patched = (gates.Gate("", operation, NEW.release).decides(version) for version in (NEW.release, LABEL))
    assert (stock, patched) == COMPARED[operation]


@pytest.mark.parametrize("operation", SPECIFIED)
def test_requirements(operation: str) -> None:
    specifiers = SpecifierSet(f"{operation}{NEW.release}")
    assert specifiers.contains(LABEL) == SPECIFIED[operation]
    assert specifiers.contains(NEW.release) == (SPECIFIED[operation] or operation == "===")


def test_the_page_says_so() -> None:
    rows = [
        "| | `Version` of stock | with the label | requirement |",
        "|---|---|---|---|",
        *(
            f"| `{operation}` 5.14.1 | {yes[stock]} | {yes[patched] if stock == patched else f'**{yes[patched]}**'} | "
            f"{yes[SPECIFIED[operation]]} |"
            for yes in [{True: "yes", False: "no"}]
            for operation, (stock, patched) in COMPARED.items()
        ),
    ]
    assert "\n".join(rows) in PAGE
    versions = dict(pin.split("==") for pin in LAID_OVER)
    versions["accelerate"] = re.findall("^accelerate==(.*)$", environments.pins("third-party-2.13").read_text(), re.M)[
        0
    ]
    versions["megatron_core"] = PINS.packages["transformer_engine"].companion("megatron_core").version
    for name, number in GATES.items():
        assert f"| {name.replace('_', '-')} {versions[name]} | {LIBRARIES[name]} | {number} |" in PAGE


def test_other_releases_are_on_the_same_side() -> None:
    """The label changes nothing but comparisons with exactly that release."""
    for releases in DELIVERED.values():
        for release, label in releases.items():
            for other in ("0", f"{release}.dev0", f"{release}rc1", f"{release}.post1", f"{release}.0.1", "99"):
                for operation in gates.OPERATIONS:
                    gate = gates.Gate("", operation, other)
                    assert gate.decides(label) == gate.decides(release), (operation, other, label)


def megatron() -> dict[str, str]:
    """The Python files of megatron-core's sdist, of which nothing is run."""
    artefact = PINS.packages["transformer_engine"].companion("megatron_core").artefact
    found = {}
    with tarfile.open(source.fetch("megatron_core", artefact)) as archive:
        for member in archive:
            if re.search(r"^[^/]+/megatron/core/.*\.py$", member.name):
                stream = archive.extractfile(member)
                assert stream is not None
                found[member.name.partition("/")[2]] = stream.read().decode("utf-8")
    return found


def package(name: str) -> Path:
    """The folder of a library that is installed for the tests."""
    if name == "accelerate":
        (found,) = environments.python("third-party-2.13").parents[1].glob("lib/python3.*/site-packages/accelerate")
        return found
    return environments.variant(*LAID_OVER) / name


LIBRARIES = {
    "accelerate": "transformers",
    "peft": "transformers",
    "trl": "transformers",
    "megatron_core": "transformer_engine",
}
"""Whose version a library looks at."""

GATES = {"accelerate": 3, "peft": 17, "trl": 55, "megatron_core": 115}


@pytest.fixture(scope="module")
def found() -> Mapping[str, tuple[list[gates.Gate], list[str]]]:
    return {
        name: gates.TRANSFORMER_ENGINE.read(megatron())
        if name == "megatron_core"
        else gates.TRANSFORMERS.read(gates.sources(package(name)))
        for name in LIBRARIES
    }


@pytest.mark.parametrize("name", LIBRARIES)
def test_gates_decide_as_on_stock(found: Mapping[str, tuple[list[gates.Gate], list[str]]], name: str) -> None:
    read, unread = found[name]
    different = [
        f"{gate.place}: {gate.operation} {gate.version}"
        for gate in read
        for release, label in DELIVERED[LIBRARIES[name]].items()
        if gate.decides(release) != gate.decides(label)
    ]
    assert different == []
    assert unread == []
    assert len(read) == GATES[name]


@pytest.mark.parametrize("name", ["accelerate", "peft", "trl", "transformers"])
def test_these_do_not_look_at_transformer_engine(name: str) -> None:
    folder = installed(OLD) / name if name == "transformers" else package(name)
    assert gates.TRANSFORMER_ENGINE.read(gates.sources(folder)) == ([], [])


@pytest.mark.parametrize("name", ["accelerate", "peft", "trl"])
def test_requirements_of_the_libraries_are_met(name: str) -> None:
    """What `pip check` looks at."""
    (metadata,) = package(name).parent.glob(f"{name}-*.dist-info/METADATA")
    for text in HeaderParser().parsestr(metadata.read_text("utf-8")).get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.name == "transformers":
            for release, label in DELIVERED["transformers"].items():
                assert requirement.specifier.contains(label) == requirement.specifier.contains(release)


def test_megatrons_own_function_decides_as_on_stock(
    found: Mapping[str, tuple[list[gates.Gate], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_te_min_version` of megatron-core, with what `transformer_engine.__version__` is."""
    tree = ast.parse(megatron()["megatron/core/utils.py"])
    names = ("get_te_version", "is_te_min_version")
    functions: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(functions) == 2
    program = compile(ast.Module(functions, []), "megatron/core/utils.py", "exec")
    asked = sorted(
        {(gate.version, gate.operation == ">=") for gate in found["megatron_core"][0] if gate.operation[0] == ">"}
    )

    def decisions(version: str) -> list[bool]:
        module = types.ModuleType("transformer_engine")
        module.__dict__["__version__"] = version
        monkeypatch.setitem(sys.modules, "transformer_engine", module)
        namespace: dict[str, Any] = {"PkgVersion": Version, "HAVE_PACKAGING": True, "_te_version": None}
        exec(program, namespace)  # noqa: S102
        return [namespace["is_te_min_version"](least, equality) for least, equality in asked]

    for release, label in DELIVERED["transformer_engine"].items():
        assert decisions(release) == decisions(label)
    assert set(decisions("2.1")) == {True, False}


def observe(variant: Variant, *folders: Path) -> Any:
    return run(WORKER, *folders, variant=variant, environment="third-party", beside=LAID_OVER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Variant, Any]:
    """What each build says of itself and saved, and, as `loaded`, what it makes of what the other one saved."""
    folders = {variant: tmp_path_factory.mktemp(variant.kind) for variant in (OLD, NEW)}
    for variant in folders:
        installed(variant)  # which must not happen twice at once
    with ThreadPoolExecutor(2) as pool:
        first = dict(zip(folders, pool.map(lambda variant: observe(variant, folders[variant]), folders), strict=True))
        others = {OLD: folders[NEW], NEW: folders[OLD]}
        then = pool.map(lambda variant: observe(variant, others[variant], tmp_path_factory.mktemp("on")), folders)
        return {variant: {**first[variant], "loaded": loaded} for variant, loaded in zip(folders, then, strict=True)}


def test_what_is_saved_has_the_label(saved: Mapping[Variant, Any]) -> None:
    for variant, version in ((OLD, OLD.release), (NEW, LABEL)):
        assert saved[variant]["transformers"] == version
        assert saved[variant]["labels"] == {"config.json": version, "generation_config.json": version}
    assert saved[OLD]["files"] == saved[NEW]["files"]
    assert {"model.safetensors", "tokenizer.json"} <= set(saved[OLD]["files"])


def test_each_loads_what_the_other_one_saved(saved: Mapping[Variant, Any]) -> None:
    """Weights, configurations and the tokenizer, without a warning."""
    for variant, other in ((OLD, NEW), (NEW, OLD)):
        loaded = saved[variant]["loaded"]
        assert loaded["transformers"] == saved[variant]["transformers"]
        assert loaded["logits"] == saved[other]["logits"]
        assert loaded["wrong"] == {}
        assert (loaded["new tokens"], loaded["words"]) == (3, [1, 7, 0])
        assert loaded["warnings while loading"] == []


def test_a_trainer_goes_on_with_a_warning(saved: Mapping[Variant, Any]) -> None:
    """It compares the two versions as text."""
    for variant, other in ((OLD, NEW), (NEW, OLD)):
        loaded = saved[variant]["loaded"]
        assert loaded["steps"] == 2
        (warning,) = loaded["warnings while going on"]
        assert f"trained with {saved[other]['transformers']} of" in warning


def test_libraries_decide_as_on_stock(saved: Mapping[Variant, Any]) -> None:
    """As they are imported beside it."""
    assert saved[NEW]["gates"] == saved[OLD]["gates"]
    assert len(saved[OLD]["gates"]) > 12
