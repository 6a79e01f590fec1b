"""Writes the table; see table.py."""

import sys
from pathlib import Path

from tests.library_names.table import write_table

write_table([Path(argument) for argument in sys.argv[1:]])
