"""The report on runs as one HTML file: `collect` and `predictions` gather the data, and `page` writes the file."""
