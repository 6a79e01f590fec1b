"""A worker process: takes part in generations, interprets its program and steps its stages by the commits."""
