"""Rows that follow each other without a value between them: on a worker, on a lane, and where transfers are serial."""

from __future__ import annotations

import numpy as np

from recycle.ir.columns import Columns, Rows
from recycle.ir.instruction import Beside, Receive, ReduceBucket, ReduceGradients, Send, Transfer
from recycle.ir.kinds import is_kind


def consecutive(chains: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """Edges from each row of a chain to the next; `chains` is (chain, row) of all rows, chain by chain in order."""
    chain, rows = chains
    same = chain[1:] == chain[:-1]
    return rows[:-1][same], rows[1:][same]


def chain_ends(chains: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """(first row, last row) of each chain; `chains` as in `consecutive`."""
    chain, rows = chains
    return rows[np.diff(chain, prepend=-1) != 0], rows[np.diff(chain, append=-1) != 0]


def compute_chains(columns: Columns) -> tuple[Rows, Rows]:
    """(worker, row) of each compute, reduce and step: a worker runs them one after the other, in program order."""
    rows = np.flatnonzero(~is_kind(columns.kind, Beside))
    return columns.worker[rows].astype(np.int64), rows


def compute_before(columns: Columns) -> Rows:
    """For each row the last compute, reduce or step before it in its program, -1 where there is none."""
    at = np.where(is_kind(columns.kind, Beside), -1, np.arange(len(columns)))
    before = np.append(-1, np.maximum.accumulate(at)[:-1]) if len(at) else at
    return np.where(before >= columns.offsets[columns.worker], before, -1)


def sum_chains(columns: Columns) -> tuple[Rows, Rows]:
    """(worker, row) of each sum over hosts that a worker begins: they run one after the other, in program order."""
    rows = np.flatnonzero(is_kind(columns.kind, (ReduceBucket, ReduceGradients)))
    return columns.worker[rows].astype(np.int64), rows


def compute_order(columns: Columns) -> tuple[Rows, Rows]:
    """Edges of program order: each compute, reduce or step row to the next such row of its worker."""
    return consecutive(compute_chains(columns))


def lane_chains(columns: Columns) -> tuple[Rows, Rows]:
    """(lane, row) of each send: those of one directed pair of workers follow each other."""
    rows = np.flatnonzero(is_kind(columns.kind, Send))
    lane = columns.worker[rows].astype(np.int64) << 32 | columns.peer[rows]
    order = np.argsort(lane, kind="stable")
    return lane[order], rows[order]


def serial_chains(columns: Columns, sends: Rows) -> tuple[Rows, Rows]:
    """(worker, send) of each transfer end where a worker carries one transfer at a time, in program order, unbuffered.

    A transfer, sent or received, is named by its send; receives without a send are passed over.
    """
    rows = np.flatnonzero(is_kind(columns.kind, Transfer))
    transfer = np.where(is_kind(columns.kind[rows], Receive), sends[rows], rows)
    return columns.worker[rows[transfer >= 0]].astype(np.int64), transfer[transfer >= 0]
