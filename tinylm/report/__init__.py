"""The report, one HTML file about runs: `collect` and `predictions` gather the data, and `page` writes the file."""
