"""Imported by the server that tests fork processes from (`tests.warm`): what each would do first is done there."""

import gc

from recycle.exec.worker.worker import warm_up

warm_up()
gc.collect()
gc.freeze()
