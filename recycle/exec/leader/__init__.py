"""The leader of a run: a pure state machine that decides who is alive, what runs next and what is committed."""
