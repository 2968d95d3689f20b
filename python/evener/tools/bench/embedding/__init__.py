"""`evener bench embedding`: lookups and steps beside the peers that are installed."""
