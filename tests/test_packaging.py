"""The source distribution and the wheel: built without a network, and installed into an empty folder."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from lightning_hybrid.version import __version__

ROOT = Path(__file__).parents[1]


def run(*command, cwd, **options):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The paths of both, built from a copy: building writes into the source tree."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "lightning_hybrid", source / "lightning_hybrid", ignore=shutil.ignore_patterns("*.pyc"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), cwd=source)
    [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    return sdist, wheel


def test_both_contain_package_license_and_type_marker(distributions):
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        packed = archive.getnames()
    for names in (packed, zipfile.ZipFile(wheel).namelist()):
        for end in ("/LICENSE", "lightning_hybrid/py.typed", "lightning_hybrid/strategies/hybrid3d.py"):
            assert any(name.endswith(end) for name in names), end
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    assert len(modules) == len(list((ROOT / "lightning_hybrid").rglob("*.py")))


def test_metadata(distributions):
    archive = zipfile.ZipFile(distributions[1])
    [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    extras = {"docs", "quickstart", "examples", "test", "dev", "fairscale", "torchao", "bitsandbytes"}
    assert extras == set(metadata.get_all("Provides-Extra"))
    assert "lightning<2.7,>=2.6" in metadata.get_all("Requires-Dist")


def test_the_wheel_is_installed_and_imported_without_the_sources(distributions, tmp_path):
    _, wheel = distributions
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    run(*pip, str(wheel), cwd=tmp_path)
    code = "import lightning_hybrid as h, sys; print(h.__version__, h.__file__, 'torch' in sys.modules)"
    version, path, has_torch = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(target)}).split()
    assert (version, has_torch) == (__version__, "False")
    assert Path(path).is_relative_to(target)
    script = target / "bin" / "lightning-hybrid"
    said = run(sys.executable, str(script), "--version", cwd=tmp_path, env={"PYTHONPATH": str(target)})
    assert said.strip() == f"lightning-hybrid {__version__}"
