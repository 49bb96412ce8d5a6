"""The report on runs as one HTML file: `curves` and `predictions` gather the data, and `page` writes the file."""
