"""Reports on data: audit, statistics, malformed records, single rows, an HTML page."""
