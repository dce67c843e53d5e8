"""The journal on local disk: SQLite, with payload segments beside it."""
