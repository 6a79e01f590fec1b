"""Drawing: boxes of lanes, SVG, PNG, charts, and their common colors."""
