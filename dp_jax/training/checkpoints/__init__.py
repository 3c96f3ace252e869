"""The folder of a run: whose it is, its keys, its budget, and from where it goes on."""
