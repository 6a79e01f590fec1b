"""The viewer: timelines of plans and runs, on loopback, in a file, or as SVG. Imports neither torch nor a solver."""
