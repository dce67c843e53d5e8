"""The embedded engine and trainer: the only place where torch lives. Importing this package alone does not import it."""
