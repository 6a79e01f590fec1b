"""A worker process: it lives through generations, interprets its program and steps its stages as commits say."""
