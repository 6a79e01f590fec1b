"""Cases for checkers and simulators of pipeline schedules; begin with README.md. Nothing but `recycle_checker` imports
recycle."""
