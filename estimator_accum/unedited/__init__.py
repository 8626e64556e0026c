"""The commands `run` and `check`, which train scripts that know nothing of the library."""
