"""A worker process: takes part in generations, runs its program and steps its stages. Begin with main_loop.py."""
