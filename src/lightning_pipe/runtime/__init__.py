"""One rank of a running pipeline: its stages, its neighbours, its peers. Knows no Lightning."""
