"""Settings for every test process: one thread, no chatter about closed sockets, a terminal of one width.

They stand before torch is imported.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ["COLUMNS"] = "120"
