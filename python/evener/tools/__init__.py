"""The verbs of the command `evener`, one package each, and `fabric`, the map that they share."""
