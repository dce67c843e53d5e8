"""What headway writes and reads: run directory, manifests, rollout and batch encodings, journal events. Versioned; nothing is pickled."""
