"""Settings for every test process, before torch is imported: one thread, and no chatter about closed sockets."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
