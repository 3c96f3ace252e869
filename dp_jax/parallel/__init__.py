"""L4: several devices and several hosts as one run."""
