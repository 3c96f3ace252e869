"""L2: tasks. A task is the loss of one unit and its evaluation; all else is shared."""
