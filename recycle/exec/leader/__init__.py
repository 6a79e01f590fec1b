"""The leader of a run: a pure state machine that decides membership, plans and commits."""
