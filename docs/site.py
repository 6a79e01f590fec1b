"""The documentation as a static site: these pages, an API reference from the docstrings, a gallery of schedules,
and a playground that draws what is dropped on it.

    python docs/site.py [--out FOLDER]

`make site` installs what it needs (extra `site`) and calls it. Any static host serves what it writes; nothing is loaded
from elsewhere. The gallery's pages are the viewer itself, each with one schedule inside.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Shape
from recycle.cli.app import COMMANDS, command_of
from recycle.ir.families import FAMILIES
from viz.export import export, html
from viz.numbers import percent
from viz.sources import ScheduleFile, family_sources, schedule_source

ROOT = Path(__file__).parent.parent
RANKS, MICRO_BATCHES = 4, 8
TOP_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""File of the repository's root -> page."""
FOLDERS = {
    "guides": "Guides",
    "explanations": "How it works",
    "reference": "Reference",
    "measurements": "Measurements",
}
"""Folder of docs -> heading of its pages."""
API = {
    "Schedules": [
        "Shape",
        "Schedule",
        "MicroBatch",
        "Worker",
        "lower",
        "check",
        "simulate",
        "Finding",
        "Findings",
        "Timeline",
    ],
    "Jobs and times": ["Job", "Profile", "Link"],
    "Training": ["exec.train", "exec.run", "exec.RunResult"],
    "Errors": ["RecycleError", "ScheduleError", "JobError", "PlanError", "RunError", "ScheduleWarning"],
}


PLAYGROUND = """
<section class="card playground"><label><strong>Drop a timeline anywhere on this page, or choose one:</strong>
<input type="file" accept=".json,.gz,.html"></label>
<p class="hint">A Chrome trace from <code>recycle convert plan.json timeline.json --to chrome-trace</code>, the
<code>trace.json</code> of a run, or a page from <code>recycle view --export</code>. Nothing is sent anywhere. Schedules
without times are for <code>recycle check</code> and <code>recycle simulate</code>.</p>
<p role="status" class="status calm"></p></section>
"""


PLAYGROUND_PAGE = """# Playground

[Open the playground](playground/viewer.html) and drop a timeline on it: a Chrome trace of a plan, the `trace.json` of a
run, or a page that `recycle view --export` wrote. It is drawn in your browser, by the lanes that the viewer has, and
nothing is sent anywhere. A schedule has no times yet:

    recycle convert plan.json timeline.json --to chrome-trace --times 1,1,1
"""


THEME = """{% extends "base.html" %}
{% block styles %}{{ super() }}<style id="hljs-light"></style><style id="hljs-dark"></style>{% endblock %}
"""
"""Its switch between light and dark turns these two off and on, though nothing is highlighted in the browser."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        write_pages(pages)
        (Path(folder) / "theme").mkdir()
        (Path(folder) / "theme" / "main.html").write_text(THEME)
        (Path(folder) / "mkdocs.yml").write_text(configuration(out))
        done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"], cwd=folder)
    if done.returncode == 0:
        print(f"wrote {out}; look at it with: python -m http.server --directory {out}")
    return done.returncode


def write_pages(pages: Path) -> None:
    """Put all Markdown of the site into the folder `pages`, with links that lead to pages of it."""
    (pages / "gallery").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "pictures", pages / "pictures")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        place = pages / page.relative_to(ROOT / "docs")
        place.parent.mkdir(exist_ok=True)
        place.write_text(relinked(page.read_text(), page.parent, place.parent, pages))
    for name, place in TOP_PAGES.items():
        (pages / place).write_text(relinked((ROOT / name).read_text(), ROOT, pages, pages))
    (pages / "gallery.md").write_text(gallery(pages / "gallery"))
    (pages / "playground").mkdir()
    (pages / "playground" / "viewer.html").write_text(playground())
    (pages / "playground.md").write_text(PLAYGROUND_PAGE)
    (pages / "api.md").write_text(reference())
    (pages / "commands.md").write_text(commands())


def relinked(text: str, folder: Path, place: Path, pages: Path) -> str:
    """Markdown whose links lead to pages of the site; a link to a file that is not a page becomes its text.

    Args:
        text: of a page in `folder` of the repository.
        place: the page's folder in the site, whose pages lie in `pages`.
    """

    def target(match: re.Match[str]) -> str:
        shown, anchor = match[1], match[3] or ""
        linked = (folder / match[2]).resolve().relative_to(ROOT.resolve())
        if str(linked) in TOP_PAGES:
            page = pages / TOP_PAGES[str(linked)]
        elif linked.parts[0] == "docs" and linked.suffix in (".md", ".svg", ".png") and (ROOT / linked).is_file():
            page = pages.joinpath(*linked.parts[1:])
        else:
            return f"{shown} (`{linked}`)"
        return f"[{shown}]({os.path.relpath(page, place)}{anchor})"

    return re.sub(r"(?<!`)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", target, text)


def gallery(folder: Path) -> str:
    """A page of all families with their figures and pictures; each family's viewer goes to `folder`."""
    rows = ["| family | chunks | period | bubbles | most activations | |", "|---|---|---|---|---|---|"]
    pictures = []
    for source in family_sources(Shape(1, RANKS, MICRO_BATCHES)):
        assert isinstance(source, ScheduleFile)
        assert source.timeline is not None
        name, timeline, chunks = source.name, source.timeline, source.schedule.shape.chunks
        export(folder / f"{name}.html", [source])
        export(folder / f"{name}.svg", [source])
        rows.append(
            f"| {name} | {chunks} | {timeline.period:g} | {percent(timeline.bubble_ratio)} |"
            f" {max(peak for peak in timeline.peak_activations if peak is not None) / chunks:g} |"
            f" [open](gallery/{name}.html) |"
        )
        about = (FAMILIES[name].__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").split(" Raises ")[0]
        pictures += [
            f"## {name} {{#family-{name}}}",
            "",
            about,
            "",
            f"[![{name}](gallery/{name}.svg)](gallery/{name}.html)",
            "",
        ]
    return "\n".join(
        [
            "# Gallery",
            "",
            f"Every family with {RANKS} ranks and {MICRO_BATCHES} micro-batches; the forward of a rank's whole part of"
            " the model takes 1, its input gradient 1 and its weight gradient 1, so families with several chunks per"
            " rank do the same work. An activation of a rank's whole part counts as 1.",
            "",
            *rows,
            "",
            *pictures,
        ]
    )


def playground() -> str:
    """A page that draws what is dropped on it, without a server: the viewer with an example, and `playground.js`."""
    chunks = 2  # so that the example has the shades of later chunks
    schedule = FAMILIES["zb-v"](Shape(1, RANKS, MICRO_BATCHES, chunks=chunks))
    page = html([schedule_source(Path("Example: zb-v"), schedule)])
    script = (ROOT / "docs" / "playground.js").read_text(encoding="utf-8")
    return page.replace("<main>", f"<main>{PLAYGROUND}", 1).replace(
        "</body>", f'<script type="module">{script}</script></body>', 1
    )


def reference() -> str:
    """The page of the public API, which mkdocstrings fills from the docstrings."""
    lines = ["# Python API", ""]
    for heading, names in API.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += [f"::: recycle.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def commands() -> str:
    """The page of all commands with their options, from what `--help` prints."""
    lines = ["# Commands", ""]
    for name in COMMANDS:
        command = command_of(name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## recycle {name}", "", f"`recycle {name} {usage}`", "", command.help or "", ""]
        lines += ["| option | meaning | default |", "|---|---|---|"]
        for parameter in command.params:
            names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
            given = parameter.default
            default = "" if given in (None, False, (), []) or not isinstance(given, str | int | float) else f"`{given}`"
            about = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {names} | {about} | {default} |")
        lines.append("")
    return "\n".join(lines)


def configuration(out: Path) -> str:
    """The settings of mkdocs."""
    navigation = ["nav:", "  - Start: index.md", "  - Getting started: getting-started.md"]
    navigation += ["  - Gallery: gallery.md", "  - Playground: playground.md", "  - Advice: advice.md"]
    for folder, heading in FOLDERS.items():
        pages = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
        navigation += [f"  - {heading}:", *(f"    - {folder}/{page}" for page in pages)]
    navigation.append("  - contributing.md")
    return "\n".join(
        [
            "site_name: recycle",
            "docs_dir: pages",
            f"site_dir: {out}",
            "use_directory_urls: false",
            # Its code is coloured when the pages are made: in the browser it would be with a script from elsewhere.
            "theme: {name: mkdocs, custom_dir: theme, highlightjs: false,",
            "  color_mode: auto, user_color_mode_toggle: true}",
            "markdown_extensions: [tables, attr_list, fenced_code, codehilite, {toc: {permalink: true}}]",
            "plugins:",
            "  - search",
            "  - mkdocstrings: {handlers: {python: {",
            f"      paths: [{ROOT}], options: {{docstring_style: google, show_source: false, show_root_heading: true,",
            "      show_root_full_path: false, members_order: source, filters: ['!^_'],",
            # One entry may describe several parameters, "model, data, loss: ...".
            "      docstring_options: {warn_unknown_params: false, warn_missing_types: false}}}}}",
            *navigation,
            "  - Commands: commands.md",
            "  - API: api.md",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
