"""Settings for every test process: one thread, no chatter about closed sockets, a terminal of one width, Ctrl-C.

They stand before torch is imported.
"""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ["COLUMNS"] = "120"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("tests.cost", "tests.flaky")
