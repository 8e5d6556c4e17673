"""One model, one batch, one optimizer: what trains it over processes, side by side."""
