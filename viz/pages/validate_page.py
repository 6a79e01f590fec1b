"""The page for dropped schedule files: errors, their places, and the drawable part.

Files are untrusted: they are neither executed nor stored, and shown as text only. A file larger than any schedule that
the page could show, or claiming to be, is refused unread.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from dash import Dash, dcc, html, no_update

from recycle.errors import RecycleError, ScheduleError
from recycle.files import entries
from recycle.ir import formats, native
from recycle.ir.formats import chrome_trace
from recycle.ir.formats.schedule_input import ScheduleInput, unpack
from recycle.ir.instruction import Transfer, parse_instruction
from recycle.ir.schedule import Schedule
from recycle.job.shape import Shape, Worker
from viz.pages import parts
from viz.pages.page import Mode, Page, Workspace
from viz.pages.schedule_page import findings_of, timelines
from viz.pages.scoreboard_page import verdict
from viz.sources import ScheduleFile, executed_source, schedule_source

MAX_BYTES = 2**25
MAX_INSTRUCTIONS, MAX_WORKERS, MAX_CHUNKS, MAX_CELLS = 1_000_000, 8192, 2**18, 2**22
"""Limits of a dropped file; `recycle check` accepts more."""
_SEPARATORS, _MAX_SEPARATORS = (b",", b" ", b"\n", b"\r"), MAX_INSTRUCTIONS * 3 // 2
"""Separators of JSON and text, and their limit: tokens between them become objects while a file is read."""
_LONGEST_NAME = 120
_MAX_LEFT_OUT = 1000
"""Maximum number of omitted parts; a file with more is not a schedule."""


def read_dropped(contents: str, name: str) -> ScheduleFile:
    """Read, check and time a dropped file. Raises RecycleError if the file is not a schedule, or is too large."""
    name = printable(name)
    return inspect(_content(contents, name), name)


def inspect(content: bytes, name: str) -> ScheduleFile:
    unpacked = unpack(content, name)
    text = unpacked.text
    is_trace = chrome_trace.recognises(text)
    if not is_trace and sum(text.count(separator) for separator in _SEPARATORS) > _MAX_SEPARATORS:
        raise ScheduleError(
            f"{name}: has more cells, words or lines than a schedule that the page shows: use recycle check"
        )
    stated_shape = None if is_trace else _stated_shape(text)
    if stated_shape is not None:
        _refuse_large(stated_shape, 0, name)
    left_out: list[str] = []
    max_instructions = min(unpacked.most, MAX_INSTRUCTIONS)
    try:
        source = formats.load_unpacked(replace(unpacked, most=max_instructions), name)
    except ScheduleError:
        salvaged = _salvage(text, name, max_instructions)
        if salvaged is None:
            raise
        schedule, left_out = salvaged
        source = ScheduleInput(name, schedule)
    _refuse_large(source.schedule.shape, len(source.schedule.columns), name)
    executed = executed_source(Path(name), source)
    file = executed or schedule_source(Path(name), source.schedule, source.planned)
    return replace(file, left_out=tuple(left_out))


def _salvage(content: bytes, name: str, max_instructions: int) -> tuple[Schedule, list[str]] | None:
    if not native.recognises(content):
        return None
    try:
        file: dict[str, Any] = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        shape = Shape.from_json(msgspec.json.decode(file["shape"]))
        programs = msgspec.json.decode(file["programs"])
        left_out: list[str] = []
        readable = {}
        for worker, text in programs.items():
            try:
                shape.require(Worker.parse(worker), "programs")
            except RecycleError as error:
                left_out.append(str(error))
                continue
            readable[worker] = " ".join(_readable(shape, worker, text, left_out))
        return Schedule.loads(msgspec.json.encode({**file, "programs": readable}), name, max_instructions), left_out
    except (RecycleError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        return None


def _readable(shape: Shape, worker: str, text: str, left_out: list[str]) -> list[str]:
    words = []
    for position, word in enumerate(text.split()):
        try:
            instruction = parse_instruction(word, shape.pipelines == 1)
            if isinstance(instruction, Transfer):
                shape.require(instruction.peer, word)
            words.append(word)
        except RecycleError as error:
            left_out.append(f"worker {worker}, position {position}: {error}")
            if len(left_out) > _MAX_LEFT_OUT:
                raise
    return words


def _content(contents: str, name: str) -> bytes:
    head, _, encoded = contents.partition(",")
    if not head.startswith("data:") or "base64" not in head:
        raise ScheduleError(f"{name}: the browser sent no file")
    if len(encoded) > MAX_BYTES * 4 // 3 + 4:
        raise ScheduleError(
            f"{name}: too large for the page (at most {MAX_BYTES // 2**20} MB): use recycle check {name}"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ScheduleError(f"{name}: the browser sent only a part of the file") from None


def _stated_shape(content: bytes) -> Shape | None:
    try:
        return Shape.from_json(
            msgspec.json.decode(entries(content, ScheduleError)["shape"], type=dict[str, int | list[int]])
        )
    except (RecycleError, KeyError, TypeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_large(shape: Shape, instructions: int, name: str) -> None:
    cells = shape.stages * max(shape.global_micro_batches, shape.worker_count)
    is_large = shape.worker_count > MAX_WORKERS or shape.stages * shape.pipelines > MAX_CHUNKS or cells > MAX_CELLS
    if is_large or instructions > MAX_INSTRUCTIONS:
        raise ScheduleError(
            f"{name}: {shape} with {instructions:,} instructions is too large for the page (at most"
            f" {MAX_INSTRUCTIONS:,} instructions, {MAX_WORKERS:,} workers, {MAX_CHUNKS:,} chunks): use recycle check"
        )


def printable(name: str) -> str:
    line = str(RecycleError(name.replace("\\", "/").rsplit("/", 1)[-1])) or "file"
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 12]}…{line[-11:]}"


MAX_FINDINGS = 200

FORMATS = (
    "Native JSON, torch's schedule CSV, a Chrome trace, a trace of torch's profiler or a Megatron table, also as gzip;"
    f" up to {MAX_BYTES // 2**20} MB."
)


class ValidatePage(Page):
    prefix, title = "validate", "Validate"
    has_lanes, first_panel = True, "findings"
    invitation = "Drop a schedule file: findings with their rule, and the place of each."

    @classmethod
    def count(cls, _: Workspace) -> int:
        return 1

    def layout(self) -> Mode:
        prompt = html.Strong("Drop a schedule file here"), html.Span(" or press to choose one."), parts.hint(FORMATS)
        upload = parts.div(
            "row",
            dcc.Upload(html.Div(prompt), id=self.name("upload"), className="drop", max_size=MAX_BYTES),
            parts.div("status", id=self.name("message"), role="status"),
            data_most=str(MAX_BYTES),
        )
        empty = parts.empty_state("No file was dropped yet.", "It is read on this machine and not stored.")
        panels = {"Findings": [upload, html.Div(empty, id=self.name("verdict"))]}
        return Mode([], panels)

    def answer(self, contents: str, name: str) -> tuple[list[Any], list[Any], Any]:
        """Answer a dropped file: its lanes; a verdict with findings; a status line."""
        name = printable(name)
        try:
            file = read_dropped(contents, name)
        except RecycleError as error:
            hint = "docs/reference/file-format.md describes the files."
            lanes = parts.empty_state(f"{name} could not be read as a schedule.", hint)
            return [lanes], [parts.problems([str(error)])], f"{name}: refused"
        left_out = parts.problems([f"skipped, because it cannot be read: {line}" for line in file.left_out])
        panel = [self.verdict(file), left_out, findings_of(file, "Findings", MAX_FINDINGS)]
        status = html.Span(f"{name}: read", className="calm")
        return timelines([file], self.prefix, self.cache), panel, status

    def verdict(self, file: ScheduleFile) -> html.Section:
        schedule = file.schedule
        words = [f"{schedule.shape}", f"{len(schedule.columns):,} instructions", f"optimizer {schedule.optimizer}"]
        return parts.card(f"{file.name}: {verdict(file)}", parts.chips(words))

    def register(self, app: Dash) -> None:
        """Add the page's callbacks, and the server's limit of request sizes."""
        # A dropped file is base64 inside JSON; larger requests are refused unread.
        app.server.config["MAX_CONTENT_LENGTH"] = MAX_BYTES * 4 // 3 + 2**20

        answered = [self.output(part) for part in ("lanes", "verdict", "message")]
        file = self.input("upload", "contents"), self.state("upload", "filename")

        @app.callback(answered, *file, prevent_initial_call=True)
        def check_it(contents: str | None, name: str | None) -> Any:
            return self.answer(contents, name or "file") if contents else [no_update] * 3
