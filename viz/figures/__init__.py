"""What is drawn: boxes of lanes, the SVG and the PNG, charts, and the colours that all of them share."""
