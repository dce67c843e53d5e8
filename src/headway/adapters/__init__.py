"""The world outside: engines, workers, trainers, journals, prompt sources and exporters behind `headway.protocols`."""
