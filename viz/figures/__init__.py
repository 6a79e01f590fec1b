"""What is drawn: boxes, the Plotly figures, the SVG, and the colours that all of them share."""
