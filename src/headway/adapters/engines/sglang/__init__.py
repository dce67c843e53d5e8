"""Engines that speak SGLang's API."""
