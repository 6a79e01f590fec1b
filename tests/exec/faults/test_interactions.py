"""Random combinations of optional features and faults change no bit and never hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle.exec.processes.forkserver import ForkServer
from tests.exec.interactions import draw_interaction, outcome_of, run_interaction

pytestmark = pytest.mark.process


@pytest.mark.parametrize("seed", range(3))
def test_features_and_faults_change_no_bit(seed: int, servers: dict[str, ForkServer], tmp_path: Path) -> None:
    run_interaction(draw_interaction(seed), tmp_path, servers["emulated"])


@pytest.mark.soak
def test_two_hundred_random_interactions_change_no_bit_and_never_hang() -> None:
    outcomes = {str(interaction): outcome_of(interaction) for interaction in map(draw_interaction, range(200))}
    assert {text: outcome for text, outcome in outcomes.items() if outcome} == {}
