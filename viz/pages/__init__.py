"""The pages of the viewer in the order of their tabs: one file and one line here per page."""

from __future__ import annotations

from viz.pages.compare_page import ComparePage
from viz.pages.page import Page, Workspace
from viz.pages.plans_page import PlansPage
from viz.pages.report_page import ReportPage
from viz.pages.run_page import RunPage
from viz.pages.runs_page import RunsPage, StartPage
from viz.pages.schedule_page import SchedulePage
from viz.pages.scoreboard_page import ScoreboardPage
from viz.pages.systems_page import SystemsPage
from viz.pages.validate_page import ValidatePage

PAGES: tuple[type[Page], ...] = (
    StartPage,
    SystemsPage,
    RunsPage,
    RunPage,
    ReportPage,
    ScoreboardPage,
    SchedulePage,
    ComparePage,
    PlansPage,
    ValidatePage,
)


def open_pages(workspace: Workspace) -> list[Page]:
    """Create the pages for a workspace's content, in the order of their tabs, and store them in the workspace."""
    workspace.pages = [kind(workspace, place) for kind in PAGES for place in range(kind.count(workspace))]
    return workspace.pages
