"""What is imported where the overlay is installed: the post-image, or the stock file, or an error."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay import manifest
from tests.runtime import sites
from tests.runtime.sites import COVERED, PATCHED, RIGHT, STOCK, TOLD, UTILS, Site

UNKNOWN = STOCK + b"\n# somebody's own change\n"
ACTIVATE = "import overlay; overlay.activate(); "
LENIENT = "import overlay; overlay.activate(strict=False); "
WHERE = "import transformers.modeling_layers as m; print(m.__file__)"


def image(site: Site) -> str:
    return str(site.packages / "overlay/patched/transformers/1.0" / COVERED)


# ---- what is loaded


def test_without_the_overlay_it_is_stock(tmp_path: Path) -> None:
    site = sites.make(tmp_path / "venv")
    site.install({COVERED: STOCK})
    site.run(TOLD).says("stock")


def test_installing_the_wheel_is_enough(site: Site) -> None:
    site.run(TOLD).says("patched")


def test_asking_for_it_is_enough(quiet: Site) -> None:
    quiet.run(TOLD).says("stock")
    quiet.run(ACTIVATE + TOLD).says("patched")


def test_the_module_is_the_post_image_in_every_respect(site: Site) -> None:
    code = f"""
import inspect, traceback
import transformers.modeling_layers as m
where = {image(site)!r}
assert (m.__file__, m.__spec__.origin, m.__spec__.loader.path, m.__cached__) == (where, where, where, m.__spec__.cached)
assert (m.__name__, m.__package__, m.Layer.__module__) == (m.__spec__.name, "transformers", m.__name__)
assert inspect.getsourcefile(m.Layer) == where and inspect.getsource(m) == open(where).read()
assert "patched" in inspect.getsource(m.Layer.forward)
try:
    m.fails()
except ValueError as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print(frame.lineno, frame.line, frame.filename == where)
"""
    line = PATCHED.decode().splitlines().index('    raise ValueError("line 13")') + 1
    site.run(code).says(f'{line} raise ValueError("line 13") True')


def test_bytecode_is_cached_beside_the_post_image(site: Site) -> None:
    site.run(TOLD).says("patched")
    cached = Path(image(site)).parent / "__pycache__"
    assert [path.name for path in cached.iterdir()] == [f"modeling_layers.{sys.implementation.cache_tag}.pyc"]
    assert not list((site.packages / COVERED).parent.glob("__pycache__/modeling_layers*"))
    code = "import transformers.modeling_layers as m, importlib.util as u; "
    site.run(code + "print(m.__cached__ == u.cache_from_source(m.__file__))").says("True")


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux, for a read-only mount")
def test_site_packages_may_be_read_only(site: Site) -> None:
    subprocess.run(["mount", "--bind", site.packages, site.packages], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", site.packages], check=True)
        site.run(TOLD).says("patched")
        assert not list(site.packages.rglob("__pycache__"))
    finally:
        subprocess.run(["umount", site.packages], check=True)


def test_bytecode_goes_where_python_is_told_to_put_it(site: Site, tmp_path: Path) -> None:
    site.variables["PYTHONPYCACHEPREFIX"] = str(tmp_path / "bytecode")
    site.run(TOLD).says("patched")
    assert list((tmp_path / "bytecode").rglob("modeling_layers*.pyc"))
    assert not list(site.packages.rglob("*.pyc"))


def test_a_module_that_is_not_covered_is_left_alone(site: Site) -> None:
    site.install({"transformers/other.py": STOCK, "covered/modeling_layers.py": STOCK})
    code = "import transformers.other as a, covered.modeling_layers as b, transformers as c; "
    site.run(code + "print(a.told(), b.told(), c.__file__)").says(
        f"stock stock {site.packages / 'transformers/__init__.py'}"
    )


def test_a_patched_wheel_is_left_alone(site: Site) -> None:
    site.install({COVERED: PATCHED})
    site.variables["MODELING_OVERLAY"] = "strict"
    site.run(WHERE).says(str(site.packages / COVERED))


def test_a_patched_file_of_another_revision_is_not_what_was_asked_for(site: Site) -> None:
    site.install({COVERED: PATCHED + b"\n# another revision\n"})
    done = site.run(WHERE)
    assert done.out == f"{site.packages / COVERED}\n"
    assert "patched by another revision or changed since: install the patched wheel of this one" in done.said
    site.run(ACTIVATE + WHERE).fails("OverlayMismatchError", "another revision")


def test_a_release_with_a_fix_of_upstreams_own_is_left_alone(site: Site) -> None:
    site.install({UTILS: RIGHT})
    site.variables["MODELING_OVERLAY"] = "strict"
    code = "import transformers.utils.generic as m; print(m.__file__)"
    site.run(code).says(str(site.packages / UTILS))
    site.install({UTILS: b"FIXED = False\n"})
    site.run(code).fails("OverlayMismatchError", UTILS)


# ---- unknown content


@pytest.mark.parametrize("content", [UNKNOWN, STOCK.replace(b"\n", b"\r\n"), b""], ids=["changed", "CRLF", "empty"])
def test_unknown_content_is_an_error_where_somebody_asked(quiet: Site, content: bytes) -> None:
    quiet.install({COVERED: content})
    blob = manifest.blob_id(content)
    quiet.run(ACTIVATE + TOLD).fails(
        "OverlayMismatchError",
        str(quiet.packages / COVERED),
        f"{COVERED} of transformers 1.0",
        blob,
        "MODELING_OVERLAY=0",
    )


def test_unknown_content_is_no_import_error(quiet: Site) -> None:
    """Which others would take for a package that is not installed."""
    quiet.install({COVERED: UNKNOWN})
    code = f"try:\n  {TOLD}\nexcept ImportError:\n  print('not installed')"
    quiet.run(ACTIVATE + "\n" + code).fails("OverlayMismatchError")


def test_unknown_content_is_a_warning_where_nobody_asked(site: Site) -> None:
    site.install({COVERED: UNKNOWN})
    done = site.run(TOLD + "; import importlib; importlib.reload(m); print(m.told())")
    assert (done.code, done.out) == (0, "stock\nstock\n")
    said = [line for line in done.said.splitlines() if str(site.packages / COVERED) in line]
    assert ["RuntimeWarning: " in line for line in said] == [False, True], done.said  # logging's last resort, warnings
    code = "import logging; logging.basicConfig(format='%(name)s %(levelname)s'); " + TOLD
    assert "overlay WARNING\n" in site.run(code).said


def test_one_warning_for_a_package(site: Site) -> None:
    site.install({COVERED: UNKNOWN, UTILS: b"FIXED = False\n"})
    done = site.run(TOLD + "; import transformers.utils.generic")
    assert done.said.count("RuntimeWarning") == 1


@pytest.mark.parametrize("which", ["activate", "variable"])
def test_strict(site: Site, which: str) -> None:
    site.install({COVERED: UNKNOWN})
    if which == "variable":
        site.variables["MODELING_OVERLAY"] = "strict"
    site.run((ACTIVATE if which == "activate" else "") + TOLD).fails("OverlayMismatchError", COVERED)


@pytest.mark.parametrize(
    "lenient", [LENIENT, "import overlay; overlay.activate(strict=False); overlay.activate(strict=False); "]
)
def test_a_second_call_only_tightens(site: Site, lenient: str) -> None:
    site.install({COVERED: UNKNOWN})
    assert site.run(lenient + TOLD).out == "stock\n"
    site.run(lenient + ACTIVATE + TOLD).fails("OverlayMismatchError")
    site.run(ACTIVATE + lenient + TOLD).fails("OverlayMismatchError")
    site.variables["MODELING_OVERLAY"] = "strict"
    site.run(lenient + TOLD).fails("OverlayMismatchError")


def test_tightening_looks_at_what_is_imported(site: Site) -> None:
    site.install({COVERED: UNKNOWN})
    site.run(TOLD + "; " + ACTIVATE).fails("OverlayMismatchError", COVERED)


def test_a_package_without_sources_is_unknown(quiet: Site) -> None:
    source = quiet.packages / COVERED
    subprocess.run([quiet.python, "-m", "compileall", "-q", "-b", source.parent], check=True)
    source.unlink()
    quiet.run(TOLD).says("stock")
    quiet.run(ACTIVATE + TOLD).fails("OverlayMismatchError", "modeling_layers.pyc")


# ---- off


def test_off(site: Site) -> None:
    site.variables["MODELING_OVERLAY"] = "0"
    site.run("import sys; print([m for m in sys.modules if m.startswith('overlay.f')]); " + TOLD).says("[]", "stock")
    done = site.run(ACTIVATE + TOLD)
    assert done.out == "stock\n"
    assert "MODELING_OVERLAY is 0: overlay.activate() does nothing" in done.said


@pytest.mark.parametrize("value", ["", "1"])
def test_on(site: Site, value: str) -> None:
    site.variables["MODELING_OVERLAY"] = value
    site.run(TOLD).says("patched")


@pytest.mark.parametrize("value", ["off", "STRICT", "2"])
def test_another_value_is_named(site: Site, value: str) -> None:
    site.variables["MODELING_OVERLAY"] = value
    done = site.run(TOLD)
    assert done.out == "patched\n"
    assert f"MODELING_OVERLAY: expected 0, 1 or strict, found {value!r}" in done.said


# ---- too late


def test_a_module_that_is_imported_already_is_an_error(quiet: Site) -> None:
    main = quiet.folder / "train.py"
    main.write_text(f"{TOLD}\n{ACTIVATE}\n", encoding="utf-8")
    done = quiet.command(str(main))
    done.fails(
        "OverlayError",
        "transformers.modeling_layers",
        str(quiet.packages / COVERED),
        f"call overlay.activate() in {main}",
    )
    assert done.out == "stock\n"
    quiet.run(TOLD + "; " + LENIENT).fails("OverlayError", "in this program above everything that imports transformers")


def test_what_is_right_may_be_imported_already(site: Site) -> None:
    site.run(f"{TOLD}; {ACTIVATE}{LENIENT}print(m.told())").says("patched", "patched")
    site.install({COVERED: PATCHED})
    site.run(f"{TOLD}; {ACTIVATE}print(m.told())").says("patched", "patched")


def test_the_package_may_be_imported_already(quiet: Site) -> None:
    """Before its covered modules are: nothing is lost yet."""
    quiet.run("import transformers; " + ACTIVATE + TOLD).says("patched")


# ---- every process


def test_every_process_has_it(site: Site) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TOLD!r}], check=True)"
    site.run(code).says("patched")
    site.run(TOLD, "-I").says("patched")
    site.run(TOLD, "-S").fails("ModuleNotFoundError")  # no site-packages at all


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("asked", [False, True])
def test_multiprocessing_and_pickle(site: Site, quiet_main: Callable[[str], str], method: str, asked: bool) -> None:
    if asked:
        (site.packages / "modeling_overlay.pth").unlink()
    main = site.folder / "main.py"
    main.write_text(quiet_main(ACTIVATE if asked else ""), encoding="utf-8")
    site.command(str(main), method).says("patched", "patched", "True")


@pytest.fixture
def quiet_main() -> Callable[[str], str]:
    return lambda activate: (
        f"""
{activate}
import multiprocessing, pickle, sys
import transformers.modeling_layers as m

def child(layer):
    return m.told(), layer

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        said, layer = pool.apply(child, (m.Layer(),))
    print(said)
    print(layer.forward())
    print(type(layer) is m.Layer and type(pickle.loads(pickle.dumps(layer))) is m.Layer)
"""
    )


def test_many_threads_import_it_once(site: Site) -> None:
    code = """
import concurrent.futures, importlib
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    found = list(pool.map(lambda _: importlib.import_module("transformers.modeling_layers"), range(64)))
print(len(set(map(id, found))), found[0].told())
"""
    site.run(code).says("1 patched")


# ---- other ways to be installed


def test_reload(site: Site) -> None:
    code = (
        TOLD
        + "; import importlib; old = m.Layer; again = importlib.reload(m); print(again is m, m.told(), m.Layer is old)"
    )
    site.run(code).says("patched", "True patched False")


def test_what_a_search_without_an_import_finds(site: Site) -> None:
    code = "import importlib.util as u; print(u.find_spec('transformers.modeling_layers').origin)"
    site.run(code).says(image(site))


WRAPPER = """
import sys, importlib.util

class Chained:
    def __init__(self, loader):
        self.loader = loader
    def __getattr__(self, name):
        return getattr(self.loader, name)
    def exec_module(self, module):
        self.loader.exec_module(module)
        print("hooked", module.__name__)

class Hooks:
    asked = set()
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "transformers.modeling_layers" or fullname in self.asked:
            return None
        self.asked.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
            spec.loader = Chained(spec.loader)
            return spec
        finally:
            self.asked.remove(fullname)

sys.meta_path.insert(0, Hooks())
"""
"""Post-import hooks, as wrapt has them."""


@pytest.mark.parametrize("first", ["wrapper", "overlay", "overlay, on request"])
def test_others_that_wrap_what_is_found(site: Site, first: str) -> None:
    if first == "wrapper":
        (site.packages / "a_wrapper.py").write_text(WRAPPER, encoding="utf-8")
        (site.packages / "a_wrapper.pth").write_text("import a_wrapper\n", encoding="utf-8")
        site.run(TOLD).says("hooked transformers.modeling_layers", "patched")
    else:
        activate = ACTIVATE if first != "overlay" else ""
        site.run(WRAPPER + "\n" + activate + TOLD).says("hooked transformers.modeling_layers", "patched")


@pytest.mark.parametrize("how", ["path", "finder"])
def test_an_editable_install(tmp_path: Path, how: str) -> None:
    site = sites.make(tmp_path / "venv")
    site.install_overlay()
    source = site.install({COVERED: STOCK}, tmp_path / "checkout/src")
    if how == "path":
        (site.packages / "__editable__.transformers.pth").write_text(f"{source}\n", encoding="utf-8")
    else:  # as setuptools does it, for a layout that a path does not do for
        finder = f"""
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location

class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "transformers":
            return spec_from_file_location(fullname, {str(source / "transformers/__init__.py")!r})

def install():
    sys.meta_path.append(_EditableFinder)
"""
        (site.packages / "__editable___transformers_finder.py").write_text(finder, encoding="utf-8")
        line = "import __editable___transformers_finder; __editable___transformers_finder.install()\n"
        (site.packages / "__editable__.transformers.pth").write_text(line, encoding="utf-8")
    site.run(TOLD).says("patched")
    site.run(WHERE).says(image(site))


@pytest.mark.parametrize("what", ["transformers", "overlay", "both"])
def test_in_an_archive(tmp_path: Path, what: str) -> None:
    site = sites.make(tmp_path / "venv")
    place = site.install({COVERED: STOCK}, tmp_path / "files")
    site.install_overlay(place, pth=False)
    archived = ("transformers", "overlay") if what == "both" else (what,)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(place.rglob("*")):
            inside = path.relative_to(place)
            if path.is_file() and inside.parts[0] in archived:
                file.write(path, inside)
    for name in archived:
        shutil.rmtree(place / name)
    site.variables["PYTHONPATH"] = f"{archive}{os.pathsep}{place}"
    site.run(ACTIVATE + TOLD + "; import inspect; print('patched' in inspect.getsource(m.Layer))").says(
        "patched", "True"
    )
    site.run(ACTIVATE + WHERE).says(
        str((archive if "overlay" in archived else place) / "overlay/patched/transformers/1.0" / COVERED)
    )


def test_the_first_of_two_versions_counts(site: Site, tmp_path: Path) -> None:
    other = site.install({COVERED: UNKNOWN}, tmp_path / "other")
    site.variables["PYTHONPATH"] = str(other)
    site.run(ACTIVATE + TOLD).fails("OverlayMismatchError", str(other / COVERED))
    site.install({COVERED: STOCK}, other)
    site.install({COVERED: UNKNOWN})
    site.run(ACTIVATE + TOLD).says("patched")


def test_a_link_to_the_package(site: Site, tmp_path: Path) -> None:
    shutil.move(site.packages / "transformers", tmp_path / "transformers")
    (site.packages / "transformers").symlink_to(tmp_path / "transformers")
    site.run(TOLD).says("patched")


def test_without_patched_files(site: Site) -> None:
    """A checkout on the path in which `scripts/apply.sh` did not run."""
    shutil.rmtree(site.packages / "overlay/patched")
    done = site.run(TOLD)
    assert done.out == "stock\n"
    assert "expected the patched files" in done.said
    site.run(ACTIVATE).fails("OverlayError: expected the patched files")


def test_a_manifest_of_another_version(site: Site) -> None:
    file = site.packages / "overlay/patched/manifest.json"
    file.write_text(file.read_text("utf-8").replace(f'"format": {manifest.FORMAT}', '"format": 99'), encoding="utf-8")
    site.run(ACTIVATE).fails(f"expected format {manifest.FORMAT}, found 99")


# ---- what it costs


def test_at_the_start_next_to_nothing_is_imported(site: Site) -> None:
    code = "import sys; print(sorted(set(sys.modules) - set(before)))"
    with_it = site.run(f"before = []; {code}").out
    (site.packages / "modeling_overlay.pth").unlink()
    without = site.run(f"before = []; {code}").out
    assert set(eval(with_it)) - set(eval(without)) == {"_modeling_overlay"}  # noqa: S307


def test_importing_a_covered_package_imports_the_standard_library_alone(site: Site) -> None:
    names = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names"
    done = site.run(f"{TOLD}; import sys; print({names})")
    assert set(eval(done.out.splitlines()[1])) == {"_modeling_overlay", "overlay", "transformers", "__main__"}  # noqa: S307


def test_other_imports_go_past_it(site: Site) -> None:
    """Until a covered package is imported, and afterwards: no manifest is read for another package."""
    site.install({"other.py": b""})
    code = "import sys, other; print('overlay.finder' in sys.modules, 'overlay.manifest' in sys.modules)"
    site.run(code).says("False False")


def test_each_name_is_what_it_says_however_often_it_is_asked_for(site: Site) -> None:
    """A module of the same name as a function would take its place once it is imported."""
    code = """
import overlay
for _ in range(2):
    for name, place in overlay._PLACES.items():
        found = getattr(overlay, name)
        assert (found.__module__, found.__name__) == (place, name), (found, place, name)
assert {*overlay._PLACES, "integrations"} <= set(dir(overlay))
try:
    overlay.nothing
except AttributeError as error:
    print(error)
"""
    site.run(code).says("module 'overlay' has no attribute 'nothing'")


# ---- beside what else there is


def test_a_module_of_the_same_name_is_the_programs_own(site: Site) -> None:
    folder = site.folder / "program"
    folder.mkdir()
    (folder / "overlay.py").write_text("def mine():\n    return 'mine'\n", encoding="utf-8")
    main = folder / "main.py"
    main.write_text("import overlay\nprint(overlay.mine())\n", encoding="utf-8")
    site.command(str(main)).says("mine")
    main.write_text(f"import overlay\n{TOLD}\n", encoding="utf-8")
    done = site.command(str(main))
    assert (done.code, done.out) == (0, "stock\n")
    assert "RuntimeWarning: modeling-overlay: nothing is mended in this process: " in done.said
    assert str(main) in done.said
    site.variables["MODELING_OVERLAY"] = "strict"
    site.command(str(main)).fails("RuntimeError: modeling-overlay: nothing is mended in this process")


def test_uninstalled_while_a_process_runs(site: Site) -> None:
    done = site.run(f"import shutil; shutil.rmtree({str(site.packages / 'overlay')!r}); {TOLD}")
    assert (done.code, done.out) == (0, "stock\n")
    assert "nothing is mended in this process: No module named" in done.said


AHEAD = """
import sys
from importlib.util import spec_from_file_location

class Ahead:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "transformers":
            place = {place!r}
            return spec_from_file_location(fullname, place, submodule_search_locations=[place.rpartition("/")[0]])

sys.meta_path.insert(0, Ahead())
"""
"""An editable install of the package alone, which is asked before the overlay, or behind it."""


@pytest.mark.parametrize("name", ["zz_ahead", "aa_behind"])
@pytest.mark.parametrize("activate", ["", ACTIVATE])
def test_a_finder_that_finds_the_package_first(site: Site, tmp_path: Path, name: str, activate: str) -> None:
    shutil.move(site.packages / "transformers", tmp_path / "transformers")
    (site.packages / f"{name}.py").write_text(
        AHEAD.format(place=str(tmp_path / "transformers/__init__.py")), encoding="utf-8"
    )
    (site.packages / f"{name}.pth").write_text(f"import {name}\n", encoding="utf-8")
    site.run(activate + TOLD).says("patched")


def test_a_package_that_is_in_memory_already(site: Site) -> None:
    code = "import sys, types; p = types.ModuleType('transformers'); sys.modules['transformers'] = p; "
    site.run(code + f"p.__path__ = [{str(site.packages / 'transformers')!r}]; " + TOLD).says("patched")


def test_many_threads_look_for_it(site: Site) -> None:
    """`importlib.util.find_spec` takes no import lock."""
    code = """
import concurrent.futures, importlib.util, sys
sys.setswitchinterval(1e-6)
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    names = ["transformers", "transformer_engine"] * 32
    found = list(pool.map(lambda name: importlib.util.find_spec(name) is not None, names))
print(found == [True, False] * 32)
"""
    site.run(code).says("True")


def test_activate_puts_it_first(site: Site) -> None:
    code = "import sys; sys.meta_path.insert(0, type('Other', (), {'find_spec': lambda *given: None})()); " + ACTIVATE
    site.run(code + "print([type(one).__name__ for one in sys.meta_path[:2]])").says("['Watch', 'Other']")


def test_a_call_that_fails_leaves_no_finder(quiet: Site) -> None:
    code = f"""
{TOLD}
import overlay, sys
before = list(sys.meta_path)
try:
    overlay.activate()
except overlay.OverlayError:
    print(sys.meta_path == before)
"""
    quiet.run(code).says("stock", "True")


# ---- an installation that is not whole


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}'])
def test_a_manifest_that_cannot_be_read(site: Site, content: str) -> None:
    (site.packages / "overlay/patched/manifest.json").write_text(content, encoding="utf-8")
    done = site.run(TOLD)
    assert (done.code, done.out) == (0, "stock\n")
    assert "install the overlay wheel again" in done.said
    site.variables["MODELING_OVERLAY"] = "strict"
    site.run(TOLD).fails("OverlayError", "manifest.json")


@pytest.mark.parametrize("what", ["missing", "changed"])
def test_a_post_image_that_is_not_what_the_manifest_says(site: Site, what: str) -> None:
    file = Path(image(site))
    file.unlink() if what == "missing" else file.write_bytes(PATCHED + b"\n")
    done = site.run(TOLD)
    assert (done.code, done.out) == (0, "stock\n")
    assert "install the overlay wheel again" in done.said
    site.run(ACTIVATE + TOLD).fails("OverlayError", str(file))


def test_warnings_that_are_errors_are_errors_each_time(site: Site) -> None:
    site.install({COVERED: UNKNOWN})
    code = f"for _ in range(2):\n  try:\n    {TOLD}\n  except RuntimeWarning as error:\n    print('raised')"
    assert site.run(code, "-W", "error::RuntimeWarning").out == "raised\nraised\n"


def test_the_warning_points_at_the_import(site: Site) -> None:
    site.install({COVERED: UNKNOWN})
    main = site.folder / "train.py"
    main.write_text("\n\nimport transformers.modeling_layers\n", encoding="utf-8")
    assert f"{main}:3: RuntimeWarning: " in site.command(str(main)).said
    main.write_text("\nimport transformers.modeling_layers\nimport overlay\noverlay.activate(strict=False)\n", "utf-8")
    assert f"{main}:2: RuntimeWarning: " in site.command(str(main)).said


def test_a_warning_for_what_is_imported_already(quiet: Site) -> None:
    quiet.install({COVERED: UNKNOWN})
    assert "RuntimeWarning: " in quiet.run(TOLD + "; " + LENIENT).said


def test_a_covered_package_keeps_its_modules(site: Site) -> None:
    """A package's `__init__.py` is a module as any other; what is in its folder stays where it is."""
    path = "transformers/utils/__init__.py"
    site.install({"transformers/utils/inner.py": b"VALUE = 1\n", path: b"KIND = 'stock'\n"})
    place = site.packages / "overlay/patched"
    after = manifest.NOTICE + b"x\nKIND = 'patched'\n"
    (place / "package.py").write_bytes(after)
    listing = json.loads((place / "manifest.json").read_text("utf-8"))
    ids = {"before": manifest.blob_id(b"KIND = 'stock'\n"), "after": manifest.blob_id(after)}
    listing["releases"][0]["files"].append({"path": path, **ids, "image": "package.py"})
    (place / "manifest.json").write_text(json.dumps(listing), encoding="utf-8")
    code = "import transformers.utils as u, transformers.utils.inner as i; print(u.KIND, i.VALUE, u.__path__)"
    site.run(code).says(f"patched 1 {[str(site.packages / 'transformers/utils')]}")
