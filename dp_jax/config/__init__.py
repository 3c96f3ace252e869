"""L4: the configuration of a run: one frozen dataclass a section, parsing, and files."""
