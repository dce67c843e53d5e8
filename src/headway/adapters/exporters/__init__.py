"""Where metrics go: files, and the progress line."""
