"""Small models of many architectures, each with a loss over a batch: what a user might bring."""
