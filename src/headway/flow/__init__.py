"""The components: one class, one task, one `run()` each. They await and act; what to do is decided in `headway.rules`."""
