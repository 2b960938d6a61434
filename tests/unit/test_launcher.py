"""Nothing of the user comes before what is installed, however it is installed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import eesd_launcher
from eesd_launcher import ordered
from tests.support.shadows import write_shadows

_REPOSITORY = Path(__file__).parents[2]
_BUILT = ("eesd_launcher.py", "pyproject.toml", "README.md", "LICENSE", "cluster", "eesd_dist")
_LIBRARY = os.path.dirname(os.__file__)
_SITE = os.path.join(_LIBRARY, "site-packages")


def _pip(*words: str) -> None:
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, *words], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def from_a_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`eesd` of an environment that has our wheel, and the other packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*_BUILT, "serve_app"):
        source = _REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / "source" / name, copy_function=os.symlink)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(source, folder / "source")
    quiet = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    _pip("wheel", *quiet, "--no-build-isolation", f"--wheel-dir={folder}", f"{folder}/source")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    _pip("--python", str(python), "install", *quiet, str(wheel))
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    assert (site / "serve_app" / "cli" / "main.py").is_file()
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "venv" / "bin" / "eesd"


@pytest.fixture(params=["editable", "wheel"])
def eesd(request: pytest.FixtureRequest) -> Path:
    if request.param == "editable":
        return Path(sys.executable).with_name("eesd")
    wheel: Path = request.getfixturevalue("from_a_wheel")
    return wheel


@pytest.mark.parametrize("arguments", [None, "{}", ":{}", "."], ids=str)
def test_files_of_the_user_are_not_imported(
    eesd: Path, arguments: str | None, tmp_path: Path
) -> None:
    write_shadows(tmp_path)
    env = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    if arguments is not None:
        env["PYTHONPATH"] = arguments.format(tmp_path)
    for word in ("version", "--help"):
        done = subprocess.run(
            [eesd, word], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "eesd" in done.stdout


def test_code_of_the_user_is_found_after_what_is_installed() -> None:
    entries = ["/mine", "/python311.zip", _LIBRARY, f"{_LIBRARY}/lib-dynload", _SITE]
    library = [_LIBRARY, f"{_LIBRARY}/lib-dynload"]
    path = ordered(entries, named=["/mine", "/new"], own=_SITE)
    assert path == [*library, _SITE, "/python311.zip", "/mine", "/new"]
    path = ordered(entries, named=["/mine"], own="/checkout")
    assert path == [*library, "/checkout", "/python311.zip", _SITE, "/mine"]


def test_packages_that_pythonpath_names_are_ours_nonetheless() -> None:
    path = ordered(["/checkout", _LIBRARY, _SITE], named=["/checkout"], own="/checkout")
    assert path == [_LIBRARY, "/checkout", _SITE]


def test_a_path_in_order_stays_as_it_is() -> None:
    path = ordered(["/mine", _LIBRARY, _SITE], named=["/mine"], own="/checkout")
    assert ordered(path, named=path, own="/checkout") == path


def test_the_working_directory_is_not_on_the_path(tmp_path: Path) -> None:
    where = os.getcwd()
    assert where not in ordered([where, _LIBRARY, _SITE], named=[""], own=_SITE)


def test_processes_that_are_started_have_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "0")
    monkeypatch.setattr(sys, "path", [str(_REPOSITORY), str(tmp_path), _LIBRARY, _SITE])
    eesd_launcher.in_order()
    shown = subprocess.check_output(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    )
    path = [entry for entry in json.loads(shown) if entry in sys.path]
    assert path == sys.path
    assert path[-1] == str(tmp_path)
