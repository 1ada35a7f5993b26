"""TransformerEngine as users import it: its Python code, its native library and its extension, on torch, without a GPU.

The environment `te-2.14` has torch, the native library and the cuBLAS that this needs; the Python code, stock or
patched, is laid over it together with the extension.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from overlay import environments
from overlay.queue import lock, source
from tests import variants
from tests.transformer_engine.native import extension
from tests.variants import ROOT, Variant, run_worker, wheel

PROJECT = "transformer_engine"
ENVIRONMENT = "te-2.14"
RELEASE = "2.13.0"
"""The release that the suite runs on, unless it is told another one."""


def stock(release: str = RELEASE) -> Variant:
    return Variant("stock", release, PROJECT)


def patched(release: str = RELEASE) -> Variant:
    return Variant("patched", release, PROJECT, "wheel")


def overlaid(release: str = RELEASE) -> Variant:
    return Variant("patched", release, PROJECT, "overlay")


@functools.cache
def _package() -> lock.Package:
    return lock.read(ROOT / "upstream.lock").packages[PROJECT]


def releases() -> list[str]:
    """The releases that are patched and whose native parts are pinned, the oldest first."""
    native = {one.version for one in _package().companions if one.project == "transformer_engine_torch"}
    patched = {one.version for one in _package().releases if one.series is not None}
    return sorted(patched & native, key=Version)


@functools.cache
def companion(project: str, version: str | None = None) -> Path:
    """The file of a companion that `upstream.lock` pins.

    Args:
        version: None for the only one that is pinned.
    """
    one = _package().companion(project, version)
    return source.fetch(one.project, one.artefact)


@functools.cache
def interpreter(native: str = RELEASE) -> Path:
    """The interpreter of the environment with the native library of the release `native`, made if it is not there."""
    # cuBLAS: the library needs a symbol that the version which torch asks for lacks
    return environments.python(ENVIRONMENT, companion("nvidia_cublas"), companion("transformer_engine_cu13", native))


@functools.cache
def extension_wheel(native: str = RELEASE) -> Path:
    """The extension of the release `native`, built if it is not there."""
    return extension.built(companion("transformer_engine_torch", native), interpreter(native))


def installed(variant: Variant, native: str | None = None) -> Path:
    """The folder to put on PYTHONPATH for a build with the extension of the release `native`, by default its own."""
    if variant.delivery == "overlay":
        stock = wheel(replace(variant, kind="stock"))
        return variants.overlaid(
            environments.variant(stock, variants.overlay_wheel(), extension_wheel(native or variant.release))
        )
    return environments.variant(wheel(variant), extension_wheel(native or variant.release))


def variables(native: str = RELEASE) -> Mapping[str, str]:
    """The environment variables that keep TransformerEngine to the CUDA libraries of the environment, and off any
    GPU."""
    cuda = extension.toolkit(interpreter(native))
    cudnn = cuda.parent / "cudnn"
    return {
        # Looked into before /usr/local/cuda, which may hold another version of the toolkit
        "CUDA_HOME": str(cuda),
        "CUDNN_HOME": str(cudnn),
        # Where there is a CUDA_HOME, TransformerEngine takes it that the loader finds cuBLAS
        "LD_LIBRARY_PATH": os.pathsep.join((str(cuda / "lib"), str(cudnn / "lib"))),
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(script: Path, *arguments: object, variant: Variant, native: str | None = None, timeout: float = 1200) -> Any:
    """What `script RESULT.json ARGUMENT...` wrote to its first argument, with a build beside the native parts of the
    release `native`, by default its own. Raises AssertionError as `tests.variants.run` does."""
    native = native or variant.release
    return run_worker(
        script,
        *arguments,
        on=str(variant),
        interpreter=interpreter(native),
        laid_over=[installed(variant, native)],
        variables=variables(native),
        timeout=timeout,
    )


@functools.cache
def observed(script: Path, variant: Variant, *arguments: object) -> Any:
    """As `run`, once for a test run: several files look at the same build."""
    return run(script, *arguments, variant=variant, timeout=1800)


def processes(variant: Variant, native: str | None = None) -> tuple[Path, dict[str, str]]:
    """The interpreter and the environment variables for other processes with a build, such as upstream's tests."""
    native = native or variant.release
    path = os.pathsep.join(map(str, [installed(variant, native)]))
    return interpreter(native), os.environ | {"PYTHONPATH": path, **variables(native)}
