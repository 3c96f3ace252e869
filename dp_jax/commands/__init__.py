"""L5: the commands of the command line, by what they work on."""
