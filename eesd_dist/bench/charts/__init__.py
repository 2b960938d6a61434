"""PNG pictures of reports, drawn with matplotlib."""
