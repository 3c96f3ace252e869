"""L5: what is done with runs: evaluate, predict, compare, sweep, extract features."""
