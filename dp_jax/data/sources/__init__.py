"""Random-access sources of records, one file a format."""
