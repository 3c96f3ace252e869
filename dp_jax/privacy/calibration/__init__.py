"""From a target to a mechanism: noise, steps or rate, and what a compute budget buys."""
