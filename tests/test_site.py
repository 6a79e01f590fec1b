"""What is published: the static site, whose links lead somewhere, and the wheel, which holds what commands need."""

import importlib.util
import re
import subprocess
import sys
import zipfile

import pytest

import recycle
import recycle.exec
from recycle.ir.families import FAMILIES
from tests import DOCS, ROOT


@pytest.fixture(scope="module")
def site():
    specification = importlib.util.spec_from_file_location("site_pages", DOCS / "site.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_reference_has_the_whole_public_api(site):
    named = {name for names in site.API.values() for name in names}
    assert named >= set(recycle.__all__)
    assert {name for name in named if not name.startswith("exec.")} == set(recycle.__all__)
    assert {name.removeprefix("exec.") for name in named - set(recycle.__all__)} <= set(recycle.exec.__all__)


def test_links_become_pages_or_text(site, tmp_path):
    text = (
        "[a](docs/reference/faults.md#kill) [b](CONTRIBUTING.md) [c](examples/notebooks) [d](https://example.org)"
        " ![e](docs/pictures/failure.svg)"
    )
    assert site.relinked(text, DOCS.parent, tmp_path / "guides", tmp_path) == (
        "[a](../reference/faults.md#kill) [b](../contributing.md) c (`examples/notebooks`) [d](https://example.org)"
        " ![e](../pictures/failure.svg)"
    )


@pytest.mark.slow
def test_the_gallery_has_every_family_with_the_same_work(site, tmp_path):
    page = site.gallery(tmp_path)
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (?:[12] \| [0-9.]+) \| ([0-9.]+) % ", page, flags=re.MULTILINE))
    assert set(rows) == set(FAMILIES)
    assert "| 1f1b | 1 | 33 |" in page
    assert "| interleaved | 2 | 28.5 |" in page
    assert "| zb-v | 2 | 24 |" in page
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in FAMILIES for kind in ("html", "svg")
    }


def test_written_pages_are_in_the_navigation_with_valid_links(site, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "gallery", lambda folder: "# Gallery")  # whose pages another test makes
    site.write_pages(tmp_path / "pages")
    written = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*.md")}
    assert written == set(re.findall(r"([\w/-]+\.md)", site.configuration(tmp_path / "out")))
    text = (tmp_path / "pages" / "playground.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links == ["playground/viewer.html"]
    assert (tmp_path / "pages" / links[0]).stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.process
def test_built_site_has_no_broken_references(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra site)")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is not installed (extra site)")
    command = [sys.executable, str(DOCS / "site.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    assert {"index.html", "api.html", "gallery.html", "playground.html"} <= {page.name for page in pages}
    assert "recycle.Schedule.from_text" in pages[tmp_path / "api.html"]
    lost, loaded = [], []
    for page, text in pages.items():
        loaded += re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="((?:https?:)?//[^"]+)"', text)
        for link in re.findall(r'(?:href|src)="([^"#:]+)(?:#[^"]*)?"', text):
            lost += [] if (page.parent / link).exists() else [f"{page.name}: {link}"]
    assert (lost, loaded) == ([], [])
    assert "lanes-view" in (tmp_path / "playground" / "viewer.html").read_text(encoding="utf-8")


@pytest.mark.soak
def test_a_wheel_holds_what_the_commands_need(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("this environment has no pip")
    source = tmp_path / "source"  # a copy: setuptools leaves a folder "build" next to what it builds
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "recycle", "viz", "pyproject.toml", "README.md", "LICENSE"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("recycle_pipeline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"recycle/py.typed", "viz/py.typed", "viz/assets/modules/search.js"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"recycle", "viz", wheel.name.split("-py3")[0] + ".dist-info"}
    for folder in (ROOT / "viz" / "assets", ROOT / "viz" / "assets" / "modules"):
        assert {f"{folder.relative_to(ROOT)}/{asset.name}" for asset in folder.glob("*.js")} <= set(names)
