"""L3: the report page: sections, plots and pages. Imports no JAX."""
