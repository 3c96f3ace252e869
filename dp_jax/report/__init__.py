"""L3: the privacy record, its statement and verification, and the report page. Imports no JAX."""
