"""The table of planted defects fits the tree; `python -m tests.mutants` runs the tests against each."""

import ast

from tests.mutants import ROOT, load_mutants, mutated


def test_each_mutant_changes_one_place_of_code_that_still_parses():
    mutants = load_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 60
    for mutant in mutants:
        ast.parse(mutated(mutant))
        assert all((ROOT / tests).exists() for tests in mutant.tests), mutant.name
