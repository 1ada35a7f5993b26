"""The extension that binds TransformerEngine to torch, `transformer_engine_torch`, built from its pinned sdist.

The one place where upstream's own build runs. The wheel is kept in the cache folder, by the hash of everything that
went into it.
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

from overlay import cache, processes
from overlay.errors import OverlayError
from overlay.progress import Progress, say

FORMAT = 1
"""Raise it when a wheel that an older version of this module built must not be used again."""

FLAGS = {
    "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # or it would download a wheel that upstream built
    "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",  # headers from the environment
}
KEPT = re.compile(r"(PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TERM|XDG_\w+|CCACHE_\w+)$")
"""What the build sees of the caller's environment: nothing that would change what is built, or where."""

LONGEST = 300
"""How many characters of the log are quoted."""

EVERY = 30
"""Seconds between two lines of progress where there is no terminal."""


def built(sdist: Path, interpreter: Path) -> Path:
    """The wheel of the extension for an environment that has torch and the CUDA headers, built if it is not there.

    Args:
        sdist: the source archive, known by its bytes.
        interpreter: of an environment whose folder is named by a hash of what is in it (`overlay.environments`).

    Raises:
        OverlayError: there is no C++ compiler, no Python header or no CUDA toolkit, which it says how to get; or the
            build fails.
    """
    compiler, about = _compiler()
    _check_headers(interpreter)
    sources = hashlib.sha256(sdist.read_bytes()).hexdigest()
    parts = (str(FORMAT), sources, interpreter.parent.parent.name, about, *map("=".join, sorted(FLAGS.items())))
    home = cache.folder() / "extensions" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if not any(home.glob("*.whl")):
        with cache.locked(f"extension-{home.name}") as lock:
            if not any(home.glob("*.whl")):
                try:
                    _build(sdist, interpreter, compiler, home, lock)
                except OSError as error:
                    raise OverlayError(
                        f"{sdist.name} cannot be built in {home.parent}: {error.strerror or error}: mend that, or set "
                        "XDG_CACHE_HOME to another folder"
                    ) from error
    return next(home.glob("*.whl"))


def toolkit(interpreter: Path) -> Path:
    """The CUDA toolkit that NVIDIA's wheels installed into an environment."""
    return next(iter(interpreter.parent.parent.glob("lib/python3.*/site-packages/nvidia/cu1*")), Path("nvidia/cu13"))


def _compiler() -> tuple[str, str]:
    """The command of the C++ compiler, and what it says of its version."""
    name, *arguments = shlex.split(os.environ.get("CXX") or "c++") or ["c++"]
    found = shutil.which(name)
    if found is None:
        raise OverlayError(
            f"building transformer_engine_torch: expected a C++ compiler, found no {name} on PATH: install one (on "
            "Debian and Ubuntu the package g++), or set CXX to its path"
        )
    command = [found, *arguments]
    done = subprocess.run(
        [*command, "--version"], env=os.environ | {"LC_ALL": "C"}, capture_output=True, errors="replace", check=False
    )
    if done.returncode != 0 or not done.stdout:
        raise OverlayError(
            f"building transformer_engine_torch: expected {name} to say its version, found exit status "
            f"{done.returncode}: set CXX to a C++ compiler"
        )
    return shlex.join(command), done.stdout


def _check_headers(interpreter: Path) -> None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise OverlayError(
            f"building transformer_engine_torch: expected Python.h in {include}, found none: install the headers of "
            "this Python (on Debian and Ubuntu the package python3-dev)"
        )
    cuda = toolkit(interpreter)
    for part in ("bin/nvcc", "include/cuda_runtime.h", "include/cublas_v2.h"):
        if not (cuda / part).is_file():
            raise OverlayError(
                f"building transformer_engine_torch: expected a CUDA toolkit at {cuda}, found no {part}: remove "
                f"{interpreter.parent.parent}, and it is made again, with NVIDIA's wheels (nvidia-cuda-nvcc and others)"
            )


def _build(sdist: Path, interpreter: Path, compiler: str, home: Path, lock: int) -> None:
    """Builds the wheel into `home`; the caller holds its lock."""
    started = time.monotonic()
    cache.make(home.parent)
    for left in home.parent.glob(f"{home.name}.*.part"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    log = home.with_name(f"{home.name}.log")
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    say(f"building {sdist.name} with {jobs} compilers at once (about 7 minutes with 2); what it prints goes to {log}")
    with tempfile.TemporaryDirectory(prefix=f"{home.name}.", suffix=".part", dir=home.parent) as scratch:
        made = Path(scratch, "made")
        command = [str(interpreter), "-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(made)]
        with log.open("wb") as output:
            process = processes.start(
                [*command, str(sdist)],
                env=_variables(interpreter, compiler, jobs, Path(scratch)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
            )
            try:
                _watch(process, log)
            finally:
                processes.kill_group(process)
        if process.returncode != 0 or not list(made.glob("*.whl")):
            raise OverlayError(f"{sdist.name} cannot be built: {_reason(log)}; all that was said is in {log}")
        shutil.rmtree(home, ignore_errors=True)  # whose wheel somebody has taken out
        made.rename(home)
    log.unlink(missing_ok=True)
    say(f"built {sdist.name} in {time.monotonic() - started:.0f} s")


def _variables(interpreter: Path, compiler: str, jobs: str, scratch: Path) -> dict[str, str]:
    cuda = toolkit(interpreter)
    return {name: value for name, value in os.environ.items() if KEPT.match(name)} | {
        **FLAGS,
        "CXX": compiler,
        "CPLUS_INCLUDE_PATH": os.pathsep.join(map(str, sorted(cuda.parent.glob("*/include")))),
        "CUDA_HOME": str(cuda),
        "MAX_JOBS": jobs,
        "PATH": os.pathsep.join((str(interpreter.parent), os.environ.get("PATH", os.defpath))),  # ninja is there
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
    }


def _watch(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for the process, and shows how many files ninja has compiled: as it comes on a terminal, else now and
    then."""
    progress: Progress | None = None
    with contextlib.ExitStack() as bar:
        done, said = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            found = re.findall(rb"^ *\[(\d+)/(\d+)\] ", log.read_bytes(), re.MULTILINE)
            if not found:
                continue
            now, total = map(int, found[-1])
            if progress is None:
                progress = bar.enter_context(Progress("compiling", total, "files"))
            progress.advance(now - done)
            done = now
            if not os.isatty(2) and time.monotonic() - said > EVERY:
                said = time.monotonic()
                say(f"compiled {done} of {total} files")


def _reason(log: Path) -> str:
    """The line of the log that says most of why it failed."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    for sign in ("No space left on device", "fatal error:", "error:", "Error:"):
        for line in lines:
            if sign in line:
                return line[:LONGEST]
    return lines[-1][:LONGEST] if lines else "no message"
