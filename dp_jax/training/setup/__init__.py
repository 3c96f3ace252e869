"""From a configuration to a run that is ready to start; nothing is written yet."""
